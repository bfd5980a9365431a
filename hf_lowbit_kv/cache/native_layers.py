"""Native layers: the layers of a cache that are transformers' own (sliding-window, linear, recurrent)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticSlidingWindowLayer,
)


class RecordableSlidingLayer(StaticSlidingWindowLayer):
    """transformers' layer, but a CUDA graph can contain its update. transformers copies an index from the CPU to the GPU to
    store a token in a full window; this class writes to the last slot by a slice."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store keys and values `[B, H, S, D]` of new tokens. Returns all keys and values to which they attend."""
        full = self.is_initialized and self.cumulative_length_int >= self.max_cache_len
        if not full or key_states.shape[-2] > 1 or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        kept: list[tuple[Any, torch.Tensor]] = [(self.keys, key_states), (self.values, value_states)]
        for window, new in kept:
            window.copy_(window.roll(-1, dims=-2))
            window[:, :, -1:] = new
        return self.keys, self.values


#: transformers' layers that count their tokens, and those that keep a state instead of tokens
SLIDING = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
RECURRENT = LinearAttentionCacheLayerMixin
#: layers that store nothing: they attend to another layer's keys and values, or not at all. transformers has them since 5.24
STORES_NOTHING: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


@torch.inference_mode(False)  # their counters must be writable outside it
def native_layers(config: PreTrainedConfig, max_cache_len: int | None) -> list:
    """The cache layers that transformers would create for this model."""
    if max_cache_len is None:
        return list(DynamicCache(config=config).layers)
    layers = list(StaticCache(config=config, max_cache_len=max_cache_len).layers)
    for layer in layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = RecordableSlidingLayer
    return layers


def can_hold(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether memory for `old` `[B, ...]` can hold `new`: the same rows, dtype and device."""
    return (old.shape[0], old.dtype, old.device) == (new.shape[0], new.dtype, new.device)


def replace_for_others(layer: Any, new: torch.Tensor) -> None:
    """Make an empty native layer allocate again if its memory does not fit these new states `[B, ...]`, as packed layers do."""
    if isinstance(layer, RECURRENT):
        states, empty = layer.conv_states[0], not any(layer.has_previous_state.values())
        if states is not None and empty and not can_hold(states, new):
            layer.device = None  # else it keeps its first one
            for initialized in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
                initialized.update(dict.fromkeys(initialized, False))
    elif layer.is_initialized and not can_hold(layer.keys, new) and int(layer.get_seq_length()) == 0:
        layer.is_initialized = False


def can_crop(layer: Any) -> bool:
    """Whether a layer can forget its newest tokens."""
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window:
        return layer.record_past
    if isinstance(layer, RECURRENT):
        return layer.is_croppable and layer.record_past
    return layer.is_croppable


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of one of transformers' layers. Recurrent layers keep them in dictionaries."""
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def writable_anywhere() -> AbstractContextManager[Any]:
    """A context in which a native layer makes tensors that can be written outside inference mode too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
