"""The caches that `generate` keeps for a model. One call or one holder acquires a cache at a time."""

from __future__ import annotations

import contextlib
import copy
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.low_bit_cache import LowBitCache
from ..storage.content_digests import digest
from . import recording

#: number of caches kept per model. A cache is freed when it is the least recently used one, by `release`, or with the
#: model
KEPT_CACHES = 2


def kind(cache: LowBitCache) -> Hashable:
    """The kind of a new cache: what it stores, and how, including its calibration. Caches of one kind are interchangeable.

    Kinds are compared, not the options with which caches were made. So the spelling of an option does not matter, and no
    reference is kept to objects that the caller may change later.
    """
    layers = cache.packed_layers
    digests = [tuple((name, digest(x)) for name, x in sorted(layer.parameters.items())) for layer in layers]
    return cache.preset, tuple((layer.spec, layer.requested_backend, *digests[i]) for i, layer in enumerate(layers))


@torch.inference_mode(False)
def _own_parameters(cache: LowBitCache) -> None:
    """Replace the parameters of a new cache by copies. It reads them at its first tokens, and the caller may change the
    originals before."""
    for layer in cache.packed_layers:
        layer.parameters = {name: x.detach().clone() for name, x in layer.parameters.items()}


def ran_out_of_memory(error: BaseException) -> bool:
    # PyTorch's CPU allocator has no exception class
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


@dataclass(eq=False)
class _Entry:
    key: Hashable
    cache: LowBitCache
    holder: Callable[[], LowBitCache | None] = lambda: None
    #: whether this is its first use: its layers may not have allocated their memory yet
    new: bool = True

    def acquire(self) -> LowBitCache:
        """A new object that shares everything with the emptied cache. Dropping that object releases the cache."""
        self.cache.reset()
        acquired = copy.copy(self.cache)
        self.holder = weakref.ref(acquired)
        return acquired

    def drop(self) -> None:
        """Free the memory of the cache and of its recordings, even if a traceback still refers to it."""
        recording.forget(self.cache)
        self.cache.layers.clear()  # the acquired object has the same list


class KeptCaches:
    """The kept caches of one model. A call holds `lock` until it ends, so calls from several threads run one after the
    other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entries: list[_Entry] = []  # most recently used last
        self._guard = threading.Lock()

    def acquire(self, properties: Hashable, tokens: int, new: LowBitCache) -> LowBitCache:
        """An empty cache for `tokens` tokens per row: an unused kept cache of the same kind and properties that is large
        enough; otherwise `new`, which has allocated nothing yet.

        Args:
            properties: other properties in which caches differ: rows, dtype, device, ...
        """
        with self._guard:
            key = properties, kind(new)
            free = [entry for entry in self.entries if entry.key == key and entry.holder() is None]
            for entry in free:
                self.entries.remove(entry)
                if capacity(entry.cache) >= tokens:
                    acquired, entry.new = entry.acquire(), False
                    self.entries.append(entry)
                    return acquired
            # smaller and older caches free their memory before the new one allocates; caches in use stay
            del free
            entry = None  # type: ignore[assignment]
            self.entries = self.entries[max(len(self.entries) + 1 - KEPT_CACHES, 0) :]
            _own_parameters(new)
            entry = _Entry((properties, kind(new)), new)  # kind of the copies: the caller's tensors may have changed
            self.entries.append(entry)
            return entry.acquire()

    @contextlib.contextmanager
    def released_on_error(self, acquired: LowBitCache | None = None) -> Iterator[None]:
        """Wraps a call that uses this cache. If the call fails or is interrupted, the cache is released, even if a traceback
        still refers to it; a new cache is dropped. If memory ran out, all unused caches are dropped."""
        try:
            yield
        except BaseException as error:
            out_of_memory = ran_out_of_memory(error)
            with self._guard:
                for entry in list(self.entries):
                    failed = acquired is not None and entry.holder() is acquired
                    if failed:
                        entry.holder = lambda: None
                    if (failed and entry.new) or (out_of_memory and entry.holder() is None):
                        self.entries.remove(entry)
                        entry.drop()
            if out_of_memory:
                traceback.clear_frames(error.__traceback__)  # frames refer to memory that the call has allocated
            raise

    def release(self) -> None:
        """Drop all caches, and free the recordings of unused caches."""
        with self._guard:
            for entry in self.entries:
                if entry.holder() is None:
                    recording.forget(entry.cache)
            self.entries.clear()


_kept: weakref.WeakKeyDictionary[Any, KeptCaches] = weakref.WeakKeyDictionary()
_new = threading.Lock()


def kept_caches(model: Any) -> KeptCaches:
    with _new:
        return _kept.setdefault(model, KeptCaches())


def capacity(cache: LowBitCache) -> int:
    """Capacity in tokens per row; -1: no limit."""
    return cache.packed_layers[0].get_max_length()


def cache_length(tokens: int) -> int:
    """`tokens` rounded up to a multiple of 512, or by at most a sixteenth if that is more: similar lengths share a cache."""
    step = max(2 ** (tokens.bit_length() - 5), 512)
    return -(-tokens // step) * step
