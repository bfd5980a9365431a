"""A format's description for the CUDA kernels: names of its C++ structs, and the resources that they need.

`format_structs` makes these records. `geometry` plans with them and depends on no particular format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: largest number of channels per warp; wider heads are divided among warps that process the same tokens (`exchange.cuh`)
WIDEST = 256


def slices(head_dim: int) -> int:
    """The number of slices of a head, one per warp."""
    return -(-head_dim // WIDEST)


class Needs(NamedTuple):
    """The needs of one format as keys or as values, for one head size and page size. If the head is divided into slices:
    those of a warp for its slice."""

    header: str
    """file with `struct`"""
    struct: str
    """C++ struct that attends"""
    encoder_header: str
    """file with `encoder`"""
    encoder: str
    """C++ struct that packs pages"""
    codes: int
    """bytes of 32 tokens' codes"""
    meta: Callable[[int], int]
    """tokens of a KV tile -> bytes of their scales, zero points, maps"""
    bits: int = 16
    """bits per value, rounded up"""
    table: int = 0
    """bytes of a codebook in shared memory"""
    grouped: bool = False
    """whether scales change inside a page or a head, which takes registers"""
    same_for: int = 0
    """keys: number of tokens that share scales. The second KV tile of a work tile then needs no copy of them
    (`SECOND_STAGE_BYTES` in affine_keys.cuh)"""
    again: int = 0
    """keys with `same_for`: bytes per token that the second KV tile needs in any case"""
    scratch: int = 0
    """values: bytes per token of numbers derived from scales (`SCRATCH_BYTES` in affine_values.cuh)"""
    queries: int = 2
    """keys: number of copies of the queries in shared memory: unchanged, normalised (`NORMALISED`), without `LIFT`
    (affine_keys.cuh)"""
    sums: int = 1
    """keys: number of groups of channels over which queries are summed (`GROUPS`)"""
    by_thread: bool = False
    """whether packing needs a thread per channel"""
