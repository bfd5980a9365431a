"""Warns if a model's key biases would spoil the keys that a cache stores.

A bias of the key projection is a constant part of the keys. In models such as Qwen2.5 it is hundreds of times as large
as what differs between tokens, in the channels of a few RoPE pairs. A range or a scale per token then spends its codes
on these channels, and so does a codebook (`Format.for_biased_keys`). Formats with a range or a center per channel do
not.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..presets import preset_with
from ..storage.layer_spec import LayerSpec
from .served_models import KEY_PROJECTIONS

#: biases are large if their largest number is this many times the usual norm of a weight row of the key projection,
#: which is the size of a key's own part for inputs of size 1. Measured on Qwen2.5-Coder 0.5B and 1.5B: up to 33 times,
#: int4 per token has 2 to 5 times the error of int4 per channel, as in SmolLM2, which has no biases; from 57 times on
#: it has 8 to 50 times that error
LARGE = 40.0
#: the norm of a row in both models, for weights that are not stored as plain numbers
USUAL_ROW = 0.6

#: models that a warning has named
_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
#: ratios by layer, of models whose biases were all in memory
_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, float]] = weakref.WeakKeyDictionary()


def warn_of_key_biases(model: Any, specs: Mapping[int, LayerSpec], sizes: Mapping[int, tuple]) -> bool:
    """Warn, once for each model, if layers store keys in a format that the model's key biases spoil.

    Args:
        model: the model; anything else than a module has no biases to look at.
        specs: of the packed layers. sizes: KV heads and widths of their keys and values.

    Returns:
        Whether some biases are not in memory yet, and should be looked at later.
    """
    if not isinstance(model, torch.nn.Module) or model in _warned:
        return False
    if (spoiled := spoiled_layers(model, specs, sizes)) is None:
        return True
    if spoiled:
        _warned.add(model)
        warnings.warn(_text(model, spoiled, specs), stacklevel=4)
    return False


def spoiled_layers(
    model: torch.nn.Module, specs: Mapping[int, LayerSpec], sizes: Mapping[int, tuple]
) -> dict[int, float] | None:
    """The layers whose keys the model's biases spoil in these specs, and how many times too large a bias is there.
    `None`: some biases are not in memory yet."""
    able = [index for index, spec in specs.items() if needs_small_biases(spec)]
    ratios = _ratios(model, sizes) if able else {}
    return None if ratios is None else {index: ratios[index] for index in able if ratios.get(index, 0.0) >= LARGE}


def needs_small_biases(spec: LayerSpec) -> bool:
    """Whether large key biases would spoil the keys of a layer."""
    return spec.reading.name == "separate" and spec.key_format.for_biased_keys != spec.key_format


def _ratios(model: torch.nn.Module, sizes: Mapping[int, tuple]) -> dict[int, float] | None:
    """The ratio of each packed layer that has a bias. `None`: a bias is not in memory yet."""
    if model not in _known:  # a cache is made in each call of `lb.generate`
        ratios = dict[int, float]()
        for index, name, projection in _projections(model):
            if index in sizes and (bias := _numbers(projection, "bias")) is not None:
                if bias.is_meta:
                    return None
                ratios[index] = _ratio(projection, name, bias, *sizes[index][:2])
        _known[model] = ratios
    return _known[model]


def has_key_biases(model: torch.nn.Module) -> bool:
    """Whether the model's key projections have biases. Their numbers are not looked at, so the model may be on the meta
    device."""
    return any(_numbers(projection, "bias") is not None for _, _, projection in _projections(model))


def _projections(model: torch.nn.Module) -> Iterator[tuple[int, str, torch.nn.Module]]:
    """Layer index, name and module of each key projection."""
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        for name in KEY_PROJECTIONS if isinstance(index, int) else ():
            if isinstance(projection := getattr(module, name, None), torch.nn.Module):
                yield index, name, projection  # type: ignore[misc]


def _numbers(projection: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Bias or weight; `None` if there is none. Accelerate keeps offloaded ones in a map of its hook."""
    tensor = getattr(projection, name, None)
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_meta and (kept := getattr(getattr(projection, "_hf_hook", None), "weights_map", None)) is not None:
        tensor = kept[name]
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _ratio(projection: torch.nn.Module, name: str, bias: torch.Tensor, heads: int, head_dim: int) -> float:
    """The largest bias of a KV head, divided by the usual norm of the head's weight rows."""
    heads = len(bias) // head_dim if name == "k_proj" else heads
    largest = _of_keys(bias.float(), name, heads, head_dim).abs().amax(-1)
    rows = torch.full_like(largest, USUAL_ROW)
    weight = _numbers(projection, "weight")
    plain = weight is not None and weight.is_floating_point() and weight.itemsize > 1 and not weight.is_meta
    if weight is not None and plain and weight.dim() == 2 and len(weight) == len(bias):
        squares = weight.float().square().sum(-1)
        rows = _of_keys(squares, name, heads, head_dim).mean(-1).sqrt().to(largest.device)
    return float((largest / rows.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0).max())


def _of_keys(x: torch.Tensor, name: str, heads: int, head_dim: int) -> torch.Tensor:
    """The part `[heads, head_dim]` of a projection's outputs `[n]` that is keys."""
    if name == "qkv_proj":  # all queries, all keys, all values
        x = x[-2 * heads * head_dim : -heads * head_dim]
    elif name == "query_key_value":  # the queries of a KV head, its key, its value
        return x.view(heads, -1, head_dim)[:, -2]
    return x.view(heads, head_dim)


def _text(model: torch.nn.Module, large: Mapping[int, float], specs: Mapping[int, LayerSpec]) -> str:
    spec = specs[min(large)]
    better = spec.key_format.for_biased_keys
    name = preset_with(better, spec)
    instead = f"preset {name!r}" if name is not None else f"key_format={better.name!r}"
    named = [f"{index} ({ratio:.0f} times)" for index, ratio in sorted(large.items())]
    return (
        f"{type(model).__name__} has key biases that key_format={spec.key_format.name!r} does not survive: in "
        f"layer{'s' if len(named) > 1 else ''} {', '.join(named)} a bias is that many times as large as what differs between "
        f"tokens, and takes the codes of all channels. Texts will be wrong. Take {instead}, whose keys survive"
    )
