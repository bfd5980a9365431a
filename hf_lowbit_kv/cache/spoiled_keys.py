"""Warns if a model's weights would spoil the keys that a cache stores.

Two properties of a layer do that:

- Large key biases. A bias of the key projection is a constant part of the keys. In models such as Qwen2.5 it is hundreds
  of times as large as what differs between tokens, in the channels of a few RoPE pairs. A range or a scale per token then
  spends its codes on these channels, and so does a codebook (`Format.for_biased_keys`). Formats with a range or a center
  per channel do not.
- Uneven channels under a rotation. With a range per channel a small channel has a small error. A Hadamard rotation gives
  all channels the same error. If queries are large where keys are small, their product then has a much larger error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..formats import Format
from ..presets import preset_with
from ..storage.layer_spec import LayerSpec
from .served_models import KEY_PROJECTIONS

#: smallest `Ratios.bias` that counts as large. Measured on the layers of Qwen2.5-Coder 0.5B and 1.5B, with the keys of 1536
#: tokens of an essay: up to a ratio of 33, int4 per token has 2 to 4 times the error of int4 per channel, as in SmolLM2,
#: which has no biases. From a ratio of 62 on, it has 8 to 75 times that error
LARGE = 40.0
#: smallest `Ratios.rotation` that counts as uneven. Measured on the same models with int2 per channel: up to a ratio of 1.5,
#: a rotation multiplies the error of q.k by 0.7 to 1.6. At 2.3 (layer 0 of Qwen2.5-Coder-0.5B) it multiplies it by 9
UNEVEN = 1.9
#: usual norm of a weight row of the key projection in both Qwen models, for weights that are not stored as plain numbers
USUAL_ROW = 0.6


class Ratios(NamedTuple):
    """What the weights of a layer predict for its keys."""

    #: the largest key bias, divided by the usual norm of a weight row
    bias: float
    #: the error of q.k with rotated keys, divided by the error without a rotation
    rotation: float


#: the warnings that were shown, by model
_warned: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
#: by layer, of models whose weights were all in memory
_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, Ratios]] = weakref.WeakKeyDictionary()


def warn_of_spoiled_keys(model: Any, specs: Mapping[int, LayerSpec], sizes: Mapping[int, tuple]) -> bool:
    """Warn if layers store keys in a way that the model's weights spoil: once for each model and way.

    Args:
        model: the model; anything else than a module has no weights to look at.
        specs: of the packed layers.
        sizes: KV heads and widths of their keys and values.

    Returns:
        Whether some weights are not in memory yet, and should be looked at later.
    """
    if not isinstance(model, torch.nn.Module):
        return False
    if (texts := spoiled_keys(model, specs, sizes)) is None:
        return True
    for text in texts:
        if text not in (shown := _warned.setdefault(model, set())):
            shown.add(text)
            warnings.warn(text, stacklevel=4)
    return False


def spoiled_keys(
    model: torch.nn.Module, specs: Mapping[int, LayerSpec], sizes: Mapping[int, tuple]
) -> list[str] | None:
    """Texts that name the layers whose keys the model's weights spoil in these specs, and a better preset; one for each
    cause. `None`: some weights are not in memory yet."""
    biased = [index for index, spec in specs.items() if needs_small_biases(spec)]
    rotated = [index for index, spec in specs.items() if needs_even_channels(spec)]
    if not biased and not rotated:
        return []
    if (ratios := _ratios(model, sizes)) is None:
        return None
    name, texts = type(model).__name__, []
    if large := {i: ratios[i].bias for i in biased if i in ratios and ratios[i].bias >= LARGE}:
        spec = specs[min(large)]
        texts.append(
            f"{name} has key biases that are too large for key_format={spec.key_format.name!r}: in {_named(large)} a bias is "
            "that many times as large as the differences between tokens, so the codes cannot hold both. Texts will be wrong. "
            f"Take {_instead(spec, spec.key_format.for_biased_keys)}, whose keys survive"
        )
    if uneven := {i: ratios[i].rotation for i in rotated if i in ratios and ratios[i].rotation >= UNEVEN}:
        spec = specs[min(uneven)]
        texts.append(
            f"{name} has keys that key_transform={spec.key_transform.name!r} spoils: in {_named(uneven)} rotated keys have at "
            "least that many times the error of keys as they are. Texts will be wrong. Take "
            f"{_instead(spec, spec.key_format)}, without a rotation"
        )
    return texts


def needs_small_biases(spec: LayerSpec) -> bool:
    """Whether large key biases would spoil the keys of a layer."""
    return spec.attention_kind.name == "separate" and spec.key_format.for_biased_keys != spec.key_format


def needs_even_channels(spec: LayerSpec) -> bool:
    """Whether the keys of a layer have a range per channel after a rotation that is not calibrated."""
    fused = spec.key_transform.fused
    rotated = fused is not None and fused.rotated and not fused.scaled
    return rotated and spec.attention_kind.name == "separate" and not needs_small_biases(spec)


def has_key_biases(model: torch.nn.Module) -> bool:
    """Whether the model's key projections have biases. Their numbers are not looked at, so the model may be on the meta
    device."""
    return any(_numbers(getattr(module, name), "bias") is not None for _, name, module in _attention_modules(model))


def _ratios(model: torch.nn.Module, sizes: Mapping[int, tuple]) -> dict[int, Ratios] | None:
    """Of each packed layer. `None`: a weight is not in memory yet."""
    if model not in _known:  # a cache is made in each call of `lb.generate`
        ratios = dict[int, Ratios]()
        for index, name, module in _attention_modules(model):
            if index not in sizes:
                continue
            heads, head_dim = sizes[index][:2]
            parts = [_numbers(getattr(module, name), part) for part in ("bias", "weight")]
            if any(part is not None and part.is_meta for part in parts):
                return None
            ratios[index] = Ratios(
                _bias(getattr(module, name), name, heads, head_dim), _rotation(module, name, heads, head_dim)
            )
        _known[model] = ratios
    return _known[model]


def _attention_modules(model: torch.nn.Module) -> Iterator[tuple[int, str, torch.nn.Module]]:
    """Layer index, name of the key projection, and the module that has it."""
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        for name in KEY_PROJECTIONS if isinstance(index, int) else ():
            if isinstance(getattr(module, name, None), torch.nn.Module):
                yield index, name, module  # type: ignore[misc]


def _numbers(projection: torch.nn.Module | None, name: str) -> torch.Tensor | None:
    """Bias or weight; `None` if there is none. Accelerate keeps offloaded ones in a map of its hook."""
    tensor = getattr(projection, name, None)
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_meta and (kept := getattr(getattr(projection, "_hf_hook", None), "weights_map", None)) is not None:
        tensor = kept[name]
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _squares(projection: torch.nn.Module | None) -> torch.Tensor | None:
    """Squared norms of the weight rows, float32 `[outputs]`; `None`: weights that are not stored as plain numbers."""
    weight = _numbers(projection, "weight")
    if type(weight) is not torch.Tensor or weight.is_meta or weight.dim() != 2:  # a subclass has packed numbers
        return None
    if not weight.is_floating_point() or weight.itemsize < 2:
        return None
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()


def _bias(projection: torch.nn.Module, name: str, heads: int, head_dim: int) -> float:
    """The largest bias of a KV head, divided by the usual norm of the head's weight rows."""
    if (bias := _numbers(projection, "bias")) is None:
        return 0.0
    heads = len(bias) // head_dim if name == "k_proj" else heads
    largest = _of_keys(bias.float(), name, heads, head_dim).abs().amax(-1)
    rows = torch.full_like(largest, USUAL_ROW)
    squares = _squares(projection)
    if squares is not None and len(squares) == len(bias):
        rows = _of_keys(squares, name, heads, head_dim).mean(-1).sqrt().to(largest.device)
    return float((largest / rows.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0).max())


def _rotation(module: torch.nn.Module, name: str, heads: int, head_dim: int) -> float:
    """The error of q.k with rotated keys, divided by the error of keys as they are: the largest of all KV heads. 1 if the
    weights cannot tell.

    A channel's error is proportional to the size of its keys. It counts as much as the size of its queries. RoPE mixes
    the two channels of a pair."""
    keys = _squares(getattr(module, name))
    queries = _squares(getattr(module, "q_proj", None)) if name == "k_proj" else keys
    if keys is None or queries is None or len(keys) % head_dim or len(queries) % head_dim or head_dim % 2:
        return 1.0
    bias = _numbers(getattr(module, "q_proj" if name == "k_proj" else name), "bias")
    if bias is not None:
        queries = queries + bias.to(queries).square()
    heads = len(keys) // head_dim if name == "k_proj" else heads
    keys = _of_keys(keys, name, heads, head_dim)
    queries = _of_queries(queries, name, heads, head_dim).to(keys.device)
    for part, norm in (("k", "k_norm"), ("q", "q_norm")):
        scale = _numbers(getattr(module, norm, None), "weight")
        if scale is not None and scale.shape == (head_dim,):  # of an RMS norm of each head
            squared = scale.to(keys).square()
            keys, queries = (keys * squared, queries) if part == "k" else (keys, queries * squared)
    keys, queries = (x.unflatten(-1, (2, -1)).mean(-2) for x in (keys, queries))
    ratio = (keys.mean(-1) * queries.mean(-1) / (keys * queries).mean(-1)).sqrt()
    return float(ratio.nan_to_num(1.0).max())


def _of_keys(x: torch.Tensor, name: str, heads: int, head_dim: int) -> torch.Tensor:
    """The part `[heads, head_dim]` of a projection's outputs `[n]` that is keys."""
    if name == "qkv_proj":  # all queries, all keys, all values
        x = x[-2 * heads * head_dim : -heads * head_dim]
    elif name == "query_key_value":  # the queries of a KV head, its key, its value
        return x.view(heads, -1, head_dim)[:, -2]
    return x.view(heads, head_dim)


def _of_queries(x: torch.Tensor, name: str, heads: int, head_dim: int) -> torch.Tensor:
    """The mean `[heads, head_dim]` of the queries of each KV head, of a projection's outputs `[n]`."""
    if name == "qkv_proj":
        x = x[: -2 * heads * head_dim]
    queries = x.view(heads, -1, head_dim)
    return (queries[:, :-2] if name == "query_key_value" else queries).mean(1)


def _named(ratios: Mapping[int, float]) -> str:
    named = [f"{index} ({ratio:.{0 if ratio >= 10 else 1}f} times)" for index, ratio in sorted(ratios.items())]
    return f"layer{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _instead(spec: LayerSpec, key_format: Format) -> str:
    """The preset, or else the format, that stores keys in another way."""
    preset = preset_with(key_format, spec)
    return f"preset {preset!r}" if preset is not None else f"key_format={key_format.name!r}"
