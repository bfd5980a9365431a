"""The layout of the attend kernel's shared memory.

`warp.cuh` computes the same sizes from the same numbers. Both check that they agree: it asserts `SHARED_BYTES`, and
`modules.attend_module` reads the size from the compiled kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from .needs import Needs, slices


class Memory(NamedTuple):
    """Sizes in bytes. A warp uses the same memory for its ring, then for its window, then for its result."""

    queries: int
    """per warp group and slice: queries in every form that keys need, their sizes and sums (`HEAD_BYTES`)"""
    ring: int
    """per warp: pipeline stages, and scratch memory of values (`STAGES_BYTES`)"""
    window: int
    """per warp: 32 tokens of the window, keys and values; or (narrow) the larger of the two (`WINDOW_BYTES`)"""
    result: int
    """per warp: its partial result (`MERGE_BYTES`)"""
    tables: int
    """per CTA: codebooks (`TABLES`)"""
    exchange: int = 0
    """per warp, in addition: scores for the other warps of a divided head (`EXCHANGE_BYTES`)"""
    slices: int = 1
    """number of warps that divide a head"""

    @property
    def warp(self) -> int:
        return _rounded(max(self.ring, self.window, self.result)) + self.exchange

    def warp_group(self, warps: int) -> int:
        return self.slices * self.queries + warps * self.warp

    def cta(self, warps: int, warp_groups: int) -> int:
        return warp_groups * self.warp_group(warps) + self.tables


def memory(
    keys: Needs,
    values: Needs,
    head_dim_k: int,
    head_dim_v: int,
    kv_tile: int,
    row_tiles: int,
    narrow: bool,
) -> Memory:
    """The memory of one kernel shape (`geometry.KernelShape`)."""
    rows, slice_count = 8 * row_tiles, slices(max(head_dim_k, head_dim_v))
    head_dim_k, head_dim_v = head_dim_k // slice_count, head_dim_v // slice_count
    ring = (
        2 * sum(side.codes * kv_tile // 32 + side.meta(kv_tile) for side in (keys, values)) + values.scratch * kv_tile
    )
    if keys.same_for >= 2 * kv_tile:
        ring -= keys.meta(kv_tile) - keys.again * kv_tile
    return Memory(
        queries=_rounded(keys.queries * rows * (2 * head_dim_k + 16) + 4 * rows * (1 + keys.sums)),
        ring=ring,
        window=64 * (max(head_dim_k, head_dim_v) if narrow else head_dim_k + head_dim_v),
        result=4 * rows * (head_dim_v + 3),
        tables=keys.table + values.table,
        exchange=1024 * row_tiles if slice_count > 1 else 0,
        slices=slice_count,
    )


def _rounded(size: int) -> int:
    return -(-size // 128) * 128
