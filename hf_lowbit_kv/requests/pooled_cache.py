"""Some rows of a pool as a cache, with which a model can be called.

The model and the attention function see an ordinary preallocated cache. But its rows have different lengths, which the
pool knows. So nothing is counted on the device, and the pool checks for room.
"""

from __future__ import annotations

from typing import Any

import torch

from ..backends import operations as ops
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.overrun import OverrunWatch
from ..cache.pass_guard import PassGuard
from ..cache.token_counts import Length
from ..storage.paged_store import LayerStore
from ..storage.step import Chunk
from .row_pool import RowPool


class PooledLayer(LowBitLayer):
    """A layer whose rows belong to a pool.

    Args:
        like: the layer of a cache that has read tokens. store: a `LayerStore` of the rows.
    """

    def __init__(self, like: LowBitLayer, store: Any, capacity: int):
        vars(self).update(vars(like))
        self.store, self.batch_size, self.length = store, store.batch_size, Length(capacity)
        self._forget()
        self.first_packed = False  # the pool knows which texts its rows hold
        self.expected: list[int] = []

    def _expect_steps(self, chunk: Chunk) -> None:
        """Steps of a pool have a mask, and other numbers of rows than this chunk of a prompt."""
        assert self.store is not None
        for rows in self.expected:
            queries, k, v = (x[:1, :, :1].expand(rows, -1, -1, -1) for x in (chunk.queries, chunk.k, chunk.v))
            alike = chunk._replace(q=queries, k=k, v=v, mask=None, seen=None)
            ops.expect_steps(alike, self.store, self.backend, masked=True)
        self.expected = []  # once

    def begin(self, length: int) -> None:
        """A pass over rows of `length` tokens begins, no matter how the last one ended."""
        self.length.set(length)

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Does nothing: rows of a pool are not cropped, so their padding need not be remembered."""

    def crop(self, tokens_to_remove: int) -> None:
        if self.check_crop(tokens_to_remove):
            raise ValueError("rows of a pool cannot be cropped")


class PooledCache(LowBitCache):
    """Some consecutive rows of a pool.

    Args:
        template: a cache of the same model that has read tokens.
        rows: number of rows.
    """

    def __init__(self, template: LowBitCache, pool: RowPool, rows: int):
        vars(self).update(vars(template))
        self._pool, self._rows = pool, rows
        stores = [
            LayerStore(state.rows(slice(0, rows)), layer.spec)
            for layer, state in zip(template.packed_layers, pool.memory.states, strict=True)
        ]
        self.layers: Any = [
            PooledLayer(layer, store, pool.max_length)
            for layer, store in zip(template.packed_layers, stores, strict=True)
        ]
        self._overrun, self.guard = OverrunWatch(), PassGuard()
        for layer in self.layers:
            layer.guard = self.guard

    def place(self, slot: int) -> None:
        """Use the rows from this slot on."""
        for layer, state in zip(self.packed_layers, self._pool.memory.states, strict=True):
            assert layer.store is not None
            layer.store.state = state.rows(slice(slot, slot + self._rows))

    def expect_steps(self, rows: list[int]) -> None:
        """Kernels of decode steps with these numbers of rows are compiled while the next prompt is read."""
        for layer in self.packed_layers:
            layer.expected = list(rows)  # type: ignore[attr-defined]

    def begin(self, length: int) -> None:
        """A pass over rows of `length` tokens begins. If rows differ in length, any length will do."""
        self.guard.forget()
        for layer in self.layers:
            layer.begin(length)

    def check_overrun(self, wait: bool = True) -> None:
        """Does nothing: the pool gives every row its pages before a token comes, so no check of the device is needed."""
