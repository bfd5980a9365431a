"""The caches that `generate` keeps for a model, lent to one call or one holder at a time."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from . import recording
from .cache import LowBitCache

#: caches kept per model: each holds its memory until it is the one used longest ago, `release` is called, or the model goes
KEPT_CACHES = 2


class Same:
    """A value that equals itself alone: tensors and the like among the options of a cache."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def option(value: Any) -> Hashable:
    """An option of a cache as part of a key."""
    if isinstance(value, (list, tuple)):
        return tuple(option(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else Same(value)


@dataclass(eq=False)
class _Entry:
    key: Hashable
    cache: LowBitCache
    holder: Callable[[], LowBitCache | None] = lambda: None

    def lend(self) -> LowBitCache:
        """The cache as a new object that shares everything with it: the cache is free again once that one is dropped."""
        self.cache.reset()
        lent = copy.copy(self.cache)
        self.holder = weakref.ref(lent)
        return lent


class KeptCaches:
    """Of one model. `lock` is held for the length of a call: calls of several threads follow each other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entries: list[_Entry] = []  # the one used last stands last
        self._guard = threading.Lock()

    def take(self, key: Hashable, tokens: int, make: Callable[[], LowBitCache]) -> LowBitCache:
        """An empty cache of this kind for rows of `tokens` tokens: one that nobody holds, if it is large enough, or a
        new one from `make`."""
        with self._guard:
            free = [entry for entry in self.entries if entry.key == key and entry.holder() is None]
            for entry in free:
                self.entries.remove(entry)
                if capacity(entry.cache) >= tokens:
                    self.entries.append(entry)
                    return entry.lend()
            # smaller and older ones give back their memory before the new one takes its own; a holder keeps what it holds
            del free
            entry = None  # type: ignore[assignment]
            self.entries = self.entries[max(len(self.entries) + 1 - KEPT_CACHES, 0) :]
            entry = _Entry(key, make())
            self.entries.append(entry)
            return entry.lend()

    def give_back(self, lent: LowBitCache) -> None:
        """The holder's call has failed, and the cache is free although a traceback may still refer to it."""
        with self._guard:
            for entry in self.entries:
                if entry.holder() is lent:
                    entry.holder = lambda: None

    def release(self) -> None:
        """Drop all caches, and free the recordings of those that nobody holds."""
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
    """Tokens that a row can hold; -1: no limit."""
    return cache.packed_layers[0].get_max_length()


def cache_length(tokens: int) -> int:
    """`tokens` rounded up, to a multiple of 512 and by a quarter at most beyond that: similar lengths share a cache."""
    step = max(2 ** (tokens.bit_length() - 3), 512)
    return -(-tokens // step) * step
