"""The record with which a format describes itself to the CUDA kernels: names of its C++ structs, and what they need of
a multiprocessor.

A format's module (`affine`, `boosted`, ...) makes these records; `geometry` plans with them and knows no format by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: channels that a warp takes at most; wider heads are divided among warps that share tokens (`exchange.cuh`)
WIDEST = 256


def slices(head_dim: int) -> int:
    """Into how many slices a head is divided."""
    return -(-head_dim // WIDEST)


class Needs(NamedTuple):
    """The needs of one format on one side (keys or values), for one head size and page size; with `slices`, those of a warp
    for its channels."""

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
    """tokens of a piece -> bytes of their scales, zero points, maps"""
    bits: int = 16
    """of a number, rounded up"""
    table: int = 0
    """bytes of a codebook in shared memory"""
    grouped: bool = False
    """whether scales change inside a page or a head, which takes registers"""
    longer: bool = False
    """whether registers allow pieces of 64 tokens with two tiles of query rows, too"""
    same_for: int = 0
    """keys: tokens that share their scales; a second piece in flight need not bring them again (`SECOND` in
    affine_keys.cuh)"""
    again: int = 0
    """keys with `same_for`: bytes for each token that a second piece brings all the same"""
    scratch: int = 0
    """values: bytes a token that scales are made into (`SCRATCH` in affine_values.cuh)"""
    queries: int = 2
    """keys: forms in which queries are kept: as they are, normalised (`NORMALISED`), and without `LIFT`
    (affine_keys.cuh)"""
    sums: int = 1
    """keys: groups of channels over which queries are summed up (`GROUPS`)"""
    by_thread: bool = False
    """whether packing takes a thread for every channel"""
