"""Stamps: cheap tests for changes within this process. A result is read, computed or recorded again only if its stamp differs.

- The stamp of a file (`FileStamp`) has its inode, size and times.
- The stamp of a tensor has the object, its address and PyTorch's count of in-place changes. That count misses changes through
  `.data` or NumPy.
- The stamp of a module (`ModuleStamp`) has the stamps of its tensors, and its plain values.
- A recorded step depends on `model_stamp`, `cache_stamp` and `settings_stamp`. A graph reads weights at their addresses, so
  in-place changes do not matter there.

`content_digests` compares contents, also across processes.
"""

from __future__ import annotations

import enum
import os
import threading
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .paged_store import PagedStore

T = TypeVar("T")
#: nanoseconds. The clock of a file system advances in steps; a file that is written twice within one step looks unchanged
CLOCK_STEP = 20_000_000


class FileStamp(NamedTuple):
    """Numbers that show whether a file was replaced or changed, without reading it. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @staticmethod
    def of(path: Path) -> FileStamp:
        """Raises `OSError` if there is no such file."""
        at = path.stat()
        return FileStamp(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a later change would show in the stamp."""
        return abs(time.time_ns() - max(self.modified, self.changed)) >= CLOCK_STEP


class ReadOnce(Generic[T]):
    """Results of reading files. A file is read again only after its stamp has changed.

    Args:
        size: how many files to remember; the least recently used one is forgotten first.
    """

    def __init__(self, size: int):
        self.size = size
        self._lock = threading.RLock()
        self._entries: OrderedDict[Path, tuple[FileStamp, T]] = OrderedDict()

    def get(self, path: Path, read: Callable[[], T]) -> T:
        """The result of `read` for this file. If `read` raises, nothing is remembered."""
        with self._lock:
            stamp = FileStamp.of(path)  # before reading: a file replaced meanwhile is read again
            entry = self._entries.pop(path, None)
            if entry is None or entry[0] != stamp:
                settled, entry = stamp.settled, (stamp, read())
                if not settled:
                    return entry[1]
            self._entries[path] = entry
            if len(self._entries) > self.size:
                self._entries.popitem(last=False)
            return entry[1]


#: tensor -> its state when it was checked, and the results computed from it, by name
_computed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_computing = threading.Lock()


def computed_once(tensor: torch.Tensor, name: Hashable, compute: Callable[[], Any]) -> Any:
    """The result of `compute` for this tensor, kept under `name`. It is computed again after the tensor has changed."""
    if tensor.is_inference():  # PyTorch does not count changes of these
        return compute()
    stamp = tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    with _computing:
        last_stamp, values = _computed.get(tensor, (None, {}))
        if last_stamp == stamp and name in values:
            return values[name]
    value = compute()
    with _computing:
        last_stamp, values = _computed.get(tensor, (None, {}))
        if last_stamp != stamp:
            values = {}
        _computed[tensor] = stamp, {**values, name: value}
    return value


@torch.inference_mode(False)
def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype. It is the same object as last time, if the tensor has not changed. Callers must not
    change it."""
    return tensor if tensor.dtype == dtype else computed_once(tensor, dtype, lambda: tensor.to(dtype))


class ModuleStamp:
    """The state of a module at one time: its plain values, and the stamps of its tensors."""

    def __init__(self, module: torch.nn.Module):
        self._stamps = [
            (weakref.ref(x), _stamp_of(x)) if isinstance(x, torch.Tensor) else x
            for x in _parts_of(vars(module), _DEPTH, [])
        ]

    def unchanged(self, module: torch.nn.Module) -> bool:
        """Whether the module is unchanged. Always false if PyTorch does not count changes of one of its tensors
        (tensors made in inference mode)."""
        now = list(_parts_of(vars(module), _DEPTH, []))
        return len(now) == len(self._stamps) and all(map(_same, self._stamps, now))


#: how deep attributes are followed: numbers for reading quantized weights may be in objects attached to a weight
_DEPTH = 6
_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device}


def _stamp_of(tensor: torch.Tensor) -> tuple | None:
    if tensor.is_inference():
        return None
    # a wrapper of other tensors has no memory of its own
    address = 0 if hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()
    return tensor._version, address, tensor.shape, tensor.dtype, tensor.device


def _same(before: Any, now: Any) -> bool:
    if not isinstance(now, torch.Tensor):
        return type(before) is type(now) and before == now
    if not isinstance(before, tuple):
        return False
    ref, stamp = before
    return (
        ref() is now and stamp is not None and stamp == _stamp_of(now)
    )  # a new tensor may have the address of an old one


def _parts_of(value: Any, depth: int, flat_parts: list[Any]) -> list[Any]:
    """Append the tensors and plain values in `value` to `flat_parts`."""
    if type(value) in _PLAIN:
        flat_parts.append(value)
        return flat_parts
    parts: Any = value
    if isinstance(value, torch.Tensor):
        flat_parts.append(value)
        flat = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        parts = {name: getattr(value, name) for name in flat} or getattr(value, "__dict__", None)
    elif not isinstance(value, (dict, list, tuple)):
        parts = None if callable(value) else getattr(value, "__dict__", None)
    if parts and depth:
        for part in parts.values() if isinstance(parts, dict) else parts:
            if type(part) not in (dict, OrderedDict) or part:  # most attributes of a module are empty
                _parts_of(part, depth - 1, flat_parts)
    return flat_parts


# ---- what a recorded step depends on ------------------------------------------------------------------------------------


class Unstamped:
    """Base of objects that stamps ignore: they may change while a recording stays valid."""


_COMPARED = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
#: attributes of a module that stamps ignore; names of submodules are in `model_stamp`
_IGNORED = {"_modules"}
#: how deep attributes of other objects than modules and tensors are followed (quantization states, hooks)
_DEPTH_OF_STEP = 2


def ignore_attributes(*names: str) -> None:
    """Leave attributes of these names out of stamps. Code that sets them on a model, or that knows that they do not affect
    its forward pass, calls this when it is imported."""
    _IGNORED.update(names)


def model_stamp(model: torch.nn.Module) -> dict[str, Any]:
    """For each module name: addresses of parameters and buffers, hooks, the training flag, and every plain attribute
    (active or merged adapters, scaling, implementations of attention and experts)."""
    seen: set[int] = set()
    return {name: (id(module), _attributes(module, _DEPTH_OF_STEP, seen)) for name, module in model.named_modules()}


def changed_module(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Name of a module whose stamp changed, or `None`."""
    if old == new:
        return None
    return next((name or "the model" for name in [*old, *new] if old.get(name) != new.get(name)), None)


def _attributes(thing: Any, depth: int, seen: set[int]) -> tuple:
    attributes = dict(vars(thing))  # a copy, because other threads add and remove overrides
    # fused pieces of other threads are ignored too
    kept = {name: x for name, x in attributes.items() if name not in _IGNORED and not isinstance(x, Unstamped)}
    return tuple((name, _described(value, depth, seen)) for name, value in kept.items())


def _described(value: Any, depth: int, seen: set[int]) -> Any:
    """`value` in a form that can be compared: plain values unchanged, tensors by address, functions by identity."""
    if isinstance(value, _COMPARED):
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
    seen.add(id(value))  # every module refers to the configuration
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


def cache_stamp(cache: Any) -> tuple:
    """Addresses of a cache's tensors."""
    from transformers import PreTrainedConfig

    ignored = Unstamped, PreTrainedConfig, type
    return tuple(addresses(_tensors(vars(layer), _DEPTH_OF_STEP + 1, ignored)) for layer in cache.layers)


def _tensors(value: Any, depth: int, ignored: tuple[type, ...]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PagedStore):
        # kernels find pages by tables, from the first slab on; a pool of rows adopts others and drops them
        yield from value.state._replace(pool=value.state.pool[:1]).tensors()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth, ignored)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth, ignored)
    elif depth > 0 and hasattr(value, "__dict__") and not isinstance(value, ignored):
        yield from _tensors(vars(value), depth - 1, ignored)


def settings_stamp() -> tuple:
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
