"""Some rows of a pool as a cache, with which a model can be called.

The model and the attention function see an ordinary preallocated cache. But its rows have different lengths, which the
pool knows. So nothing is counted on the device, and the pool checks for room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backends import operations as ops
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.native_layers import SLIDING
from ..cache.overrun import OverrunWatch
from ..cache.pass_guard import PassGuard
from ..cache.token_counts import Length
from ..storage.paged_store import LayerStore
from ..storage.step import StepInputs
from .row_pool import Row, RowPool


class PooledLayer(LowBitLayer):
    """A layer whose rows belong to a pool.

    Args:
        like: the same layer of an initialized cache.
        store: a `LayerStore` of the rows.
    """

    def __init__(self, like: LowBitLayer, store: Any, capacity: int):
        vars(self).update(vars(like))
        self.store, self.batch_size, self.length = store, store.batch_size, Length(capacity)
        self._forget()
        self.first_packed = False  # the pool knows which texts its rows hold
        self.expected: list[int] = []

    def _expect_steps(self, inputs: StepInputs) -> None:
        """Steps of a pool have a mask, and other numbers of rows than this chunk of a prompt."""
        assert self.store is not None
        for rows in self.expected:
            queries, k, v = (x[:1, :, :1].expand(rows, -1, -1, -1) for x in (inputs.queries, inputs.k, inputs.v))
            alike = inputs._replace(q=queries, k=k, v=v, mask=None, seen=None)
            ops.expect_steps(alike, self.store, self.backend, masked=True)
        self.expected = []  # once

    def begin(self, length: int) -> None:
        """Begin a pass over rows of `length` tokens. An interruption of the last pass is ignored."""
        self.length.set(length)

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Does nothing: rows of a pool are not cropped, so their padding need not be remembered."""


class PooledCache(LowBitCache):
    """A view of consecutive rows of a pool as a cache.

    Args:
        template: an initialized cache of the same model.
        rows: number of rows.
        steps_on: for decode steps, the device of the model's inputs; `None`: for prefill chunks of one row.
    """

    def __init__(self, template: LowBitCache, pool: RowPool, rows: int, steps_on: torch.device | None = None):
        vars(self).update(vars(template))
        self._pool, self._rows = pool, rows
        rings = pool.memory.rings
        with torch.inference_mode(False):
            #: the tensor that `begin_step` returns
            self._numbers = torch.zeros(3 + len(rings.ring_slots), rows, dtype=torch.long, device=steps_on)
        stores = [
            LayerStore(state.rows(slice(0, rows)), layer.spec)
            for layer, state in zip(template.packed_layers, pool.memory.states, strict=True)
        ]
        packed = iter(stores)
        self._rings = rings.layers(slice(0, rows), self._numbers[2:] if steps_on is not None else None)
        sliding = iter(self._rings)
        self.layers: Any = [
            PooledLayer(layer, next(packed), pool.max_length)
            if isinstance(layer, LowBitLayer)
            else next(sliding)
            if isinstance(layer, SLIDING)
            else layer
            for layer in template.layers
        ]
        self._overrun, self.guard = OverrunWatch(), PassGuard(self._first_packed_index)
        self.facts = template.facts.fork()
        for layer in self.packed_layers:
            layer.guard, layer.facts = self.guard, self.facts

    def place(self, slot: int) -> None:
        """Use the rows from this slot on."""
        for layer, state in zip(self.packed_layers, self._pool.memory.states, strict=True):
            assert layer.store is not None
            layer.store.state = state.rows(slice(slot, slot + self._rows))
        placed = self._pool.memory.rings.layers(slice(slot, slot + self._rows))
        for ring, there in zip(self._rings, placed, strict=True):
            ring.keys, ring.values = there.keys, there.values

    def expect_steps(self, rows: list[int]) -> None:
        """Compile the kernels of decode steps with these numbers of rows during the next prefill."""
        for layer in self.packed_layers:
            layer.expected = list(rows)  # type: ignore[attr-defined]

    def begin(self, length: int) -> None:
        """Begin a pass over rows of `length` tokens. If rows differ in length, any of their lengths is correct."""
        self.guard.forget()
        for layer in self.packed_layers:
            layer.begin(length)  # type: ignore[attr-defined]
        for ring in self._rings:
            ring.begin(length)

    def begin_step(self, taking_part: Sequence[Row]) -> torch.Tensor:
        """Begin a decode step of the rows from slot 0 on.

        Returns:
            int64 `[3 + rings, rows]`, at the same address in each step: the position of the new token, 0 if the row takes no
            part; 1 if it takes part; its position in either case; and its slot in the rings of each length.
        """
        positions, part, lengths = ([0] * self._rows for _ in range(3))
        for row in self._pool.rows:
            lengths[row.slot] = row.length
        for row in taking_part:
            positions[row.slot], part[row.slot] = row.length, 1
        slots = [[length % count for length in lengths] for count in self._pool.memory.rings.ring_slots]
        host = torch.tensor([positions, part, lengths, *slots], pin_memory=self._numbers.device.type == "cuda")
        self._numbers.copy_(host, non_blocking=True)
        self.begin(max(positions))
        return self._numbers

    def check_overrun(self, wait: bool = True) -> None:
        """Does nothing: the pool assigns pages to a row before its tokens need them, so rows cannot overrun."""
