"""Changes that a step makes in Python: attributes of the layers of a cache.

A replayed step runs no Python. So the counts that a step increases are found by comparing the state before and after an
eager step (`python_state`, `counted`). Changes made during capture are undone (`snapshot`, `restore`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from ..cache.low_bit_layer import LowBitLayer
from ..storage.process_stamps import addresses


def windows_full(cache: Any) -> Iterator[bool]:
    """For each sliding-window layer, whether its window is full: full windows launch other kernels."""
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            yield layer.cumulative_length_int >= layer.max_cache_len


def python_state(cache: Any) -> dict[tuple[int, str], Any]:
    """The Python state of native layers: plain values, and addresses of tensors."""
    state: dict[tuple[int, str], Any] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LowBitLayer):
            continue
        for name, value in vars(layer).items():
            tensors = [x for x in value.values() if x is not None] if isinstance(value, dict) else [value]
            if tensors and all(isinstance(x, torch.Tensor) for x in tensors):
                state[index, name] = addresses(tensors)
            else:
                state[index, name] = dict(value) if isinstance(value, dict) else value
    return state


def counted(before: dict, after: dict) -> tuple[dict[tuple[int, str], int], str | None]:
    """The increments of numbers between two states, and the reason why a replay cannot repeat the step, or `None`: another
    value changes."""
    counts: dict[tuple[int, str], int] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if type(old) is not int or type(new) is not int:
            return {}, f"layer {key[0]} of the cache changes its {key[1]!r} in every step"
        counts[key] = new - old
    return counts, None


def snapshot(cache: Any) -> tuple[list[dict[str, Any]], Any]:
    layers = [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers]
    return layers, {name: _copied(value) for name, value in vars(cache.guard).items()}


def _copied(value: Any) -> Any:
    """A shallow copy of a container, which a step may change in place. Tensors are not copied."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) or hasattr(type(value), "__copy__") else value


def restore(cache: Any, state: tuple[list[dict[str, Any]], Any]) -> None:
    layers, guard = state
    vars(cache.guard).update(guard)
    for layer, attributes in zip(cache.layers, layers, strict=True):
        vars(layer).clear()
        vars(layer).update(attributes)
