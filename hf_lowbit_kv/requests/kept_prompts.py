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
    """The methods of a `PrefixStore` that are used here."""

    def restore(self, cache: LowBitCache, rows: list[torch.Tensor]) -> Any:
        """Put the longest kept prefix of these texts into an empty cache. The result's `tokens`: how many tokens of
        each text."""

    def add(self, cache: LowBitCache, rows: list[torch.Tensor]) -> None:
        """Keep the contents of a cache, which are the tokens of these texts."""


class KeptPrompts:
    """Moves prompts between a store and rows. The memory of the store does not belong to the pool.

    Args:
        make_cache: makes an empty cache of the pool's kind for this many tokens.
    """

    def __init__(self, store: PromptStore, make_cache: Callable[[int], LowBitCache]):
        self._store, self._make_cache = store, make_cache

    def restore(self, pool: RowPool, row: Row, ids: list[int]) -> None:
        """Put the longest kept prefix of these tokens into an empty row. Waits for the device."""
        cache = self._make_cache(len(ids))
        match = self._store.restore(cache, [torch.tensor(ids)])
        if match.tokens:
            pool.load(row, [layer.store for layer in cache.packed_layers if layer.store is not None], match.tokens)

    def add(self, steps: PoolSteps, row: Row, ids: list[int]) -> None:
        """Keep the contents of a row that holds these tokens. Waits for the device."""
        self._store.add(steps.as_cache(row), [torch.tensor(ids)])
