"""Runs a model on windows of texts, and passes keys, values and the tokens' attention weights to a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ..cache.cache_argument import as_argument
from ..cache.implementation import selected
from ..cache.low_bit_cache import LowBitCache
from ..cache.preset_cache import cache_of_preset
from ..storage.model_sides import causal_attention
from ..storage.reference import plain_attention
from ..storage.step import StepInputs
from .attention_weights import QUERY_BLOCK, PageGrid, weights_of
from .calibration_windows import positions

#: called with the number of the window, the layer, (keys, values) `[1, H, S, D]`, and token weights `[H, S]` by grid
See = Callable[[int, int, tuple, Mapping[PageGrid, torch.Tensor]], None]


class WindowCache(DynamicCache):
    """A cache that passes keys and values to `see(layer, keys, values)` and stores none."""

    def __init__(self, config: Any, see: Callable[[int, torch.Tensor, torch.Tensor], None]):
        super().__init__(config=config)
        self._see = see

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self._see(layer_idx, key_states, value_states)
        return key_states, value_states


@torch.no_grad()
def run_windows(
    model: Any,
    windows: Sequence[torch.Tensor],
    see: See,
    progress: Callable[[int], None] | None = None,
    grids: Collection[PageGrid] = (),
    firsts: Sequence[int] | None = None,
) -> None:
    """Run the model on each window.

    Args:
        windows: token ids, int64 `[S]` each.
        firsts: the position of each window's first token; `None`: 0.
        see: called with keys and values of each layer and window.
        grids: page grids for which tokens are weighted. Without grids, `see` gets keys and values of all layers and no
            weights. With grids, it gets packed layers only.

    Raises:
        ValueError: weights are requested, but a layer stores no keys and values (MLA).
    """
    for number, window in enumerate(windows):
        ids = window[None].to(model.device)
        arguments = positions(firsts[number] if firsts else 0, len(window), model.device)
        if grids:
            cache = _observed_cache(model, functools.partial(see, number), grids)
            with selected(model):
                model(ids, **arguments, **as_argument(cache), use_cache=True, logits_to_keep=1)
        else:
            observer = WindowCache(model.config, lambda layer, *x, number=number: see(number, layer, x, {}))
            model(ids, **arguments, **as_argument(observer), use_cache=True, logits_to_keep=1)
        if progress is not None:
            progress(number + 1)


def _observed_cache(
    model: Any, see: Callable[[int, tuple, Mapping[PageGrid, torch.Tensor]], None], grids: Collection[PageGrid]
) -> LowBitCache:
    """A low-bit cache for one forward pass. Its packed layers store nothing: they pass on keys and values, and attend in
    full precision. Native layers (sliding windows) do not change."""
    cache = cache_of_preset("dense", model, backend="torch")
    for index, layer in enumerate(cache.layers):
        if layer not in cache.packed_layers:
            continue
        if layer.spec.attention_kind.name != "separate":
            raise ValueError(
                f"layer {index} stores a {layer.spec.attention_kind.name}, but attention weights need keys and values: pass "
                "attention=False (--no-attention)"
            )
        layer.step = layer.attend = _Step(functools.partial(see, index), grids)  # type: ignore[method-assign]
    return cache


class _Step:
    """`LowBitLayer.step` and `attend` for a whole window: `[1, n, Hq, Dv]`. If several layers attend to the same keys, the
    queries of the first count: later layers may have queries of the last tokens only."""

    def __init__(self, see: Callable[[tuple, Mapping[PageGrid, torch.Tensor]], None], grids: Collection[PageGrid]):
        self._see, self._grids, self._seen = see, grids, False

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        if not self._seen:
            self._seen = True
            scaling, softcap, sinks = inputs.scaling, inputs.softcap, inputs.sinks
            weights = weights_of(inputs.queries, inputs.k, self._grids, scaling, softcap, sinks)
            self._see((inputs.k, inputs.v), weights)
        return attend_in_full(inputs)


def attend_in_full(inputs: StepInputs) -> torch.Tensor:
    """Causal attention of a whole window to itself, in full precision: `[1, n, Hq, Dv]`."""
    query, key, value, scaling = inputs.queries, inputs.k, inputs.v, inputs.scaling
    softcap, sinks = inputs.softcap, inputs.sinks
    if softcap is None and sinks is None:
        return causal_attention(query, key, value, scaling)
    position, before = torch.arange(key.shape[2], device=key.device), inputs.tokens_before
    outputs = []
    for low in range(before, key.shape[2], QUERY_BLOCK):
        high = min(low + QUERY_BLOCK, key.shape[2])
        allowed = position[:high] <= position[low:high, None]
        arguments = query[:, :, low - before : high - before], key[:, :, :high], value[:, :, :high]
        outputs.append(plain_attention(*arguments, allowed, scaling, softcap, sinks))
    return torch.cat(outputs, 1)
