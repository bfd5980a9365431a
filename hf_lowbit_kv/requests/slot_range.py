"""Consecutive slots of a pool, and the cache with which the model runs on their rows.

The model and the attention function see a preallocated cache. But its rows have different lengths, which the pool knows. So
nothing is counted on the device, and the pool checks for room.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.native_layers import SLIDING
from ..cache.token_counts import PoolLength
from .row_pool import Row, RowPool


class SlotRange:
    """Consecutive slots of a pool, the first ones at the beginning.

    Args:
        template: an initialized cache of the same model.
        rows: number of slots.
        steps_on: for decode steps, the device of the model's inputs; `None`: for prefill chunks of one row.

    Attributes:
        cache: the cache of their rows.
    """

    def __init__(self, template: LowBitCache, pool: RowPool, rows: int, steps_on: torch.device | None = None):
        self._pool, self._rows, self._length = pool, rows, PoolLength(pool.max_length)
        rings = pool.memory.rings
        with torch.inference_mode(False):
            #: the tensor that `begin_step` returns
            self._numbers = torch.zeros(3 + len(rings.ring_slots), rows, dtype=torch.long, device=steps_on)
        self._rings = rings.layers(slice(0, rows), self._numbers[2:] if steps_on is not None else None)
        stores, sliding = iter(pool.memory.stores), iter(self._rings)
        self.cache = template.over(
            [
                layer.over(next(stores).rows(slice(0, rows)), self._length)
                if isinstance(layer, LowBitLayer)
                else next(sliding)
                if isinstance(layer, SLIDING)
                else layer
                for layer in template.layers
            ]
        )

    def place(self, slot: int) -> None:
        """Use the slots from this one on."""
        slots = slice(slot, slot + self._rows)
        for layer, store in zip(self.cache.packed_layers, self._pool.memory.stores, strict=True):
            assert layer.store is not None
            layer.store.state = store.state.rows(slots)
        for ring, there in zip(self._rings, self._pool.memory.rings.layers(slots), strict=True):
            ring.keys, ring.values = there.keys, there.values

    def expect_steps(self, rows: Sequence[int]) -> None:
        """Compile the kernels of decode steps with these numbers of rows during the next prefill."""
        for layer in self.cache.packed_layers:
            layer.step_rows = rows

    def begin(self, length: int) -> None:
        """Begin a pass over rows of `length` tokens, see `PoolLength`. An interruption of the last pass is ignored."""
        self.cache.guard.forget()
        self._length.set(length)
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

    def free(self) -> None:
        """Free the memory of the pool, even if something still refers to the cache."""
        for layer in self.cache.packed_layers:
            layer.store = None
