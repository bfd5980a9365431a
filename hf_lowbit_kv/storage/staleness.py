"""Whether files and tensors have changed. A cheap check comes first, and only what it reports as changed is read again.

For a file the check compares its `Stamp`. For a tensor it compares the object, its memory and PyTorch's count of
in-place changes. That count does not see changes through `.data` or NumPy.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
#: nanoseconds. Clocks of file systems advance in steps, and a file that is written twice within one step looks unchanged
CLOCK_STEP = 20_000_000


class Stamp(NamedTuple):
    """Numbers that show whether a file was replaced or changed, without reading it. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @staticmethod
    def of(path: Path) -> Stamp:
        """Raises `OSError` if there is no such file."""
        at = path.stat()
        return Stamp(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a later change would show in the stamp."""
        return abs(time.time_ns() - max(self.modified, self.changed)) >= CLOCK_STEP


class ReadOnce(Generic[T]):
    """Results of reading files. A file is read again only after its stamp has changed.

    Args:
        most: how many files to remember; the least recently used one is forgotten first.
    """

    def __init__(self, most: int):
        self.most = most
        self._lock = threading.RLock()
        self._entries: OrderedDict[Path, tuple[Stamp, T]] = OrderedDict()

    def get(self, path: Path, read: Callable[[], T]) -> T:
        """The result of `read` for this file. If `read` raises, nothing is remembered."""
        with self._lock:
            stamp = Stamp.of(path)  # before reading: a file replaced meanwhile is read again
            entry = self._entries.pop(path, None)
            if entry is None or entry[0] != stamp:
                settled, entry = stamp.settled, (stamp, read())
                if not settled:
                    return entry[1]
            self._entries[path] = entry
            if len(self._entries) > self.most:
                self._entries.popitem(last=False)
            return entry[1]


#: tensor -> its state when it was checked, and the results computed from it, by name
_computed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_computing = threading.Lock()


def computed_once(tensor: torch.Tensor, name: Hashable, compute: Callable[[], Any]) -> Any:
    """The result of `compute` for this tensor, kept under `name`. It is computed again after the tensor has changed."""
    if tensor.is_inference():  # PyTorch does not count changes of these
        return compute()
    look = tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    with _computing:
        last_look, values = _computed.get(tensor, (None, {}))
        if last_look == look and name in values:
            return values[name]
    value = compute()
    with _computing:
        last_look, values = _computed.get(tensor, (None, {}))
        if last_look != look:
            values = {}
        _computed[tensor] = look, {**values, name: value}
    return value


@torch.inference_mode(False)
def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype. It is the same object as last time, if the tensor has not changed. Callers must not
    change it."""
    return tensor if tensor.dtype == dtype else computed_once(tensor, dtype, lambda: tensor.to(dtype))


def digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that identify the tensor's numbers, shape and dtype."""

    def compute() -> bytes:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        described = repr((tensor.dtype, tuple(tensor.shape))).encode()
        return hashlib.blake2b(content, digest_size=16, key=hashlib.blake2b(described).digest()).digest()

    return computed_once(tensor, "digest", compute)


class Seen:
    """The state of a module when it was checked: its plain values, and for each tensor the object, its address, and how
    often it was changed."""

    def __init__(self, module: torch.nn.Module):
        self._looks = [
            (weakref.ref(x), _look(x)) if isinstance(x, torch.Tensor) else x
            for x in _parts_of(vars(module), _DEPTH, [])
        ]

    def unchanged(self, module: torch.nn.Module) -> bool:
        """Whether the module is unchanged. Always false if PyTorch does not count changes of one of its tensors
        (tensors made in inference mode)."""
        now = list(_parts_of(vars(module), _DEPTH, []))
        return len(now) == len(self._looks) and all(map(_same, self._looks, now))


#: how deep attributes are followed: numbers for reading quantized weights may be in objects attached to a weight
_DEPTH = 6
_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device}


def _look(tensor: torch.Tensor) -> tuple | None:
    if tensor.is_inference():
        return None
    # a tensor that consists of others has no memory itself
    address = 0 if hasattr(tensor, "__tensor_flatten__") else tensor.data_ptr()
    return tensor._version, address, tensor.shape, tensor.dtype, tensor.device


def _same(before: Any, now: Any) -> bool:
    if not isinstance(now, torch.Tensor):
        return type(before) is type(now) and before == now
    if not isinstance(before, tuple):
        return False
    ref, look = before
    return ref() is now and look is not None and look == _look(now)  # new tensors may lie where others were


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
