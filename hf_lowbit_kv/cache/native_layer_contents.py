"""The contents of a native layer: taken out of it, and put into one of another capacity or kind
(growing, preallocated)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from .native_layers import RECURRENT, SLIDING, STORES_NOTHING, can_hold, native_layers
from .ring_layer import RingLayer

_TOKENS = ("keys", "values")
#: the dictionaries of a recurrent layer's tensors, and the names under which `lazy_initialization` takes them
_STATES = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}


def contents_of(layer: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """How many tokens a layer has read, if it keeps tokens, and its tensors or views of them. Waits for the device.

    `keys` and `values` `[B, H, n, D]` are those of the newest tokens, in order. A recurrent layer has `conv_states.<i>` and
    `recurrent_states.<i>`.
    """
    if isinstance(layer, STORES_NOTHING):
        return 0, {}
    if isinstance(layer, RingLayer):
        newest = layer.newest(layer.window - 1) if layer.length else ()
        return layer.length, dict(zip(_TOKENS, newest, strict=False))
    seen, tensors, native_layer = 0, dict[str, torch.Tensor](), layer
    if getattr(native_layer, "is_initialized", False) and (seen := int(native_layer.get_seq_length())):
        static, slots = isinstance(layer, StaticLayer), native_layer.keys.shape[-2]
        count = min(seen, slots if static or not isinstance(layer, SLIDING) else native_layer.sliding_window - 1)
        # a preallocated layer fills its slots from the front until it is full
        place = slice(count) if static and seen < slots else slice(slots - count, None)
        tensors = {name: getattr(native_layer, name)[:, :, place] for name in _TOKENS}
    if isinstance(layer, RECURRENT):
        for name, initialized in _STATES.items():
            tensors |= {
                f"{name}.{i}": tensor
                for i, tensor in getattr(layer, name).items()
                if getattr(layer, initialized)[i] and layer.has_previous_state[i]
            }
    return seen, tensors


@torch.inference_mode(False)
def put_contents(layer: Any, seen: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy these contents into an empty layer, into its memory if it has any."""
    tensors = dict(tensors)
    if "keys" in tensors:
        _put_tokens(layer, seen, tensors.pop("keys"), tensors.pop("values"))
    for full_name, tensor in tensors.items():
        name, number = full_name.split(".")
        index, states = int(number), getattr(layer, name)
        known = getattr(layer, _STATES[name])[index] and states[index].shape == tensor.shape
        if not known or not can_hold(states[index], tensor):
            layer.lazy_initialization(**{name: tensor}, state_idx=index)
        states[index].copy_(tensor)
        layer.has_previous_state[index] = True


def _put_tokens(layer: Any, seen: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    static, sliding = isinstance(layer, StaticLayer), isinstance(layer, SLIDING)
    if not static:
        layer.lazy_initialization(keys, values)
        if sliding:
            keys, values = (x[:, :, -layer.sliding_window + 1 :] for x in (keys, values))
            layer.cumulative_length = seen
        layer.keys, layer.values = keys.clone(), values.clone()
        return
    if not layer.is_initialized or not can_hold(layer.keys, keys):
        layer.is_initialized = False
        layer.lazy_initialization(keys, values)
    size = layer.keys.shape[-2]
    count = min(keys.shape[-2], size)
    place = slice(size - count, None) if seen >= size else slice(count)
    layer.keys[:, :, place], layer.values[:, :, place] = keys[:, :, -count:], values[:, :, -count:]
    layer.cumulative_length.fill_(min(seen, size))
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = seen


def resized(layer: Any, config: Any, index: int, max_cache_len: int | None) -> Any:
    """A copy of the cache's layer `index`, for this many tokens (`None`: growing)."""
    new = native_layers(config, max_cache_len)[index]
    put_contents(new, *contents_of(layer))
    return new
