"""Dependencies of a recorded step: everything in Python that decides which kernels run on which addresses.

`fingerprint` describes the model, `memory` the cache, and `switches` the settings of torch and of this package. A
recording is valid while all three are unchanged.
"""

from __future__ import annotations

import enum
import os
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..cache.filled_by import Look
from ..cache.token_counts import Padding
from ..storage.paged_store import LayerStore
from .fusing import Substitute
from .overriding import STATE

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
#: attributes of a model that do not affect its forward pass
_IGNORED = {"generation_config", "_modules", "_compiled_call", "_last_compile_config", "_lowbit_enabled", STATE}
_IGNORED |= {"generate", "_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call"}
_IGNORED |= {"generate_batch", "init_continuous_batching", "_cached_continuous_batching_manager"}
#: how deep attributes of other objects than modules and tensors are followed (quantization states, hooks)
_DEPTH = 2


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """For each module name: addresses of parameters and buffers, hooks, the training flag, and every plain attribute
    (active or merged adapters, scaling, implementations of attention and experts)."""
    seen: set[int] = set()
    return {name: (id(module), _attributes(module, _DEPTH, seen)) for name, module in model.named_modules()}


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Name of a module whose fingerprint changed, or `None`."""
    if old == new:
        return None
    return next((name or "the model" for name in [*old, *new] if old.get(name) != new.get(name)), None)


def _attributes(thing: Any, depth: int, seen: set[int]) -> tuple:
    attributes = dict(vars(thing))  # as it is now: calls of other threads put overrides on and take them off
    # nor do pieces count that another thread has fused for a moment
    kept = {name: x for name, x in attributes.items() if name not in _IGNORED and not isinstance(x, Substitute)}
    return tuple((name, _described(value, depth, seen)) for name, value in kept.items())


def _described(value: Any, depth: int, seen: set[int]) -> Any:
    """`value` in a form that can be compared: plain values unchanged, tensors by address, functions by identity."""
    if isinstance(value, _PLAIN):
        return value
    # most attributes of a module are empty containers, such as its hooks, and a model has thousands of modules
    if type(value) in _CONTAINERS and not value:
        return ()
    if isinstance(value, torch.Tensor):
        extra = _attributes(value, depth - 1, seen) if depth > 0 and getattr(value, "__dict__", None) else ()
        return addresses([value]), value.requires_grad, extra
    if isinstance(value, torch.nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _described(item, depth, seen)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_described(item, depth, seen) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, types.MethodType):
        return id(value.__func__), id(value.__self__)
    if callable(value):
        return id(value)
    if id(value) in seen or depth == 0 or not hasattr(value, "__dict__"):
        return type(value).__name__
    seen.add(id(value))  # a configuration hangs on every module
    return type(value).__name__, _attributes(value, depth - 1, seen)


def addresses(tensors: Any) -> tuple:
    """Addresses and shapes of tensors. A tensor subclass that holds other tensors has their addresses."""
    places: list[Any] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = (getattr(tensor, name) for name in names)
            places.append(addresses(each for each in inner if isinstance(each, torch.Tensor)))  # not a device mesh
        elif tensor.device.type == "meta":
            places.append("meta")
        else:
            places.append((tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device))
    return tuple(places)


def memory(cache: Any) -> tuple:
    """Addresses of a cache's tensors."""
    return tuple(addresses(_tensors(vars(layer), _DEPTH + 1)) for layer in cache.layers)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, LayerStore):
        # kernels find pages by tables, from the first block on; a pool of rows attaches others and detaches them
        yield from value.state._replace(pool=value.state.pool[:1]).tensors()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth)
    elif depth > 0 and hasattr(value, "__dict__") and not isinstance(value, (Padding, Look, PreTrainedConfig, type)):
        yield from _tensors(vars(value), depth - 1)


def switches() -> tuple:
    """Settings of torch and of this package, of the process or thread, that decide which kernels run."""
    return (
        torch.is_autocast_enabled(),
        torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        *(os.environ.get(name) for name in sorted(os.environ) if name.startswith("HF_LOWBIT_KV_")),
    )
