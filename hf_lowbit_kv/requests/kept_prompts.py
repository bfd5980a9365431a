"""Prompts that a `PrefixStore` keeps from call to call, for the rows of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from ..cache.low_bit_cache import LowBitCache
from .pool_steps import PoolSteps
from .row_pool import Row, RowPool


@runtime_checkable
class PromptStore(Protocol):
    """What is asked of a `PrefixStore`."""

    def restore(self, cache: LowBitCache, rows: list[torch.Tensor]) -> Any:
        """Let an empty cache hold the longest kept prefix of these texts. Its `tokens`: how many of each it holds."""

    def add(self, cache: LowBitCache, rows: list[torch.Tensor]) -> None:
        """Keep what a cache holds, the tokens of these texts."""


class KeptPrompts:
    """A store, and how a prompt gets from there into a row and back. The bytes of the store are its own.

    Args:
        make_cache: makes an empty cache of the pool's kind for so many tokens.
    """

    def __init__(self, store: PromptStore, make_cache: Callable[[int], LowBitCache]):
        self._store, self._make_cache = store, make_cache

    def restore(self, pool: RowPool, row: Row, ids: list[int]) -> None:
        """Let an empty row begin with the longest prefix of these tokens that is kept. Waits for the device."""
        cache = self._make_cache(len(ids))
        match = self._store.restore(cache, [torch.tensor(ids)])
        if match.tokens:
            pool.load(row, [layer.store for layer in cache.packed_layers if layer.store is not None], match.tokens)

    def add(self, steps: PoolSteps, row: Row, ids: list[int]) -> None:
        """Keep a row that holds these tokens. Waits for the device."""
        self._store.add(steps.as_cache(row), [torch.tensor(ids)])
