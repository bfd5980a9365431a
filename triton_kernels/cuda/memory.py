"""How the attend kernel divides its shared memory.

`warp.cuh` computes the same sizes from the same numbers. Both sides check that they agree: it asserts `SHARED_BYTES`, and
`modules.attend_module` asks the compiled kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from .needs import Needs, slices


class Memory(NamedTuple):
    """Sizes in bytes. A warp's ring, window and result use the same memory, one after the other."""

    queries: int
    """of a team and slice: queries in every form that keys ask for, their sizes and sums (`HEAD_BYTES`)"""
    ring: int
    """of a warp: pieces of pages on their way, and what values are made into (`SLOTS_BYTES`)"""
    window: int
    """of a warp: 32 tokens of the window, keys and values, or one after the other (`WINDOW_BYTES`)"""
    result: int
    """of a warp: what it hands over to be merged (`MERGE_BYTES`)"""
    tables: int
    """of a block: codebooks (`TABLES`)"""
    exchange: int = 0
    """of a warp, beside all that: scores for the other warps of a divided head (`EXCHANGE_BYTES`)"""
    slices: int = 1
    """warps among which a head is divided"""

    @property
    def warp(self) -> int:
        return _rounded(max(self.ring, self.window, self.result)) + self.exchange

    def team(self, warps: int) -> int:
        return self.slices * self.queries + warps * self.warp

    def block(self, warps: int, teams: int) -> int:
        return teams * self.team(warps) + self.tables


def memory(
    keys: Needs,
    values: Needs,
    head_dim_k: int,
    head_dim_v: int,
    piece: int,
    row_tiles: int,
    narrow: bool,
) -> Memory:
    """piece: tokens of a piece. row_tiles: groups of eight query rows. narrow: keys and values of the window take
    turns."""
    rows, parts = 8 * row_tiles, slices(max(head_dim_k, head_dim_v))
    head_dim_k, head_dim_v = head_dim_k // parts, head_dim_v // parts
    ring = 2 * sum(side.codes * piece // 32 + side.meta(piece) for side in (keys, values)) + values.scratch * piece
    if keys.same_for >= 2 * piece:
        ring -= keys.meta(piece) - keys.again * piece
    return Memory(
        queries=_rounded(keys.queries * rows * (2 * head_dim_k + 16) + 4 * rows * (1 + keys.sums)),
        ring=ring,
        window=64 * (max(head_dim_k, head_dim_v) if narrow else head_dim_k + head_dim_v),
        result=4 * rows * (head_dim_v + 3),
        tables=keys.table + values.table,
        exchange=1024 * row_tiles if parts > 1 else 0,
        slices=parts,
    )


def _rounded(size: int) -> int:
    return -(-size // 128) * 128
