"""Codes of 5 and 6 bits in the order of tensor-core fragments: a plane of their high 4 bits, and a plane of their low
bits.

Words, lanes, rows and columns are those of `fragment`. A segment of 32 tokens is `[words / V][32 lanes][V words]`. Its
first words are those of `fragment` for 4 bits. The words of the low bits follow: for low parts of 2 bits, one
word for each 16 channels `c`; for low parts of 1 bit, one word for two times 16 channels (`c` even and odd). In this
word, the low part for element e, register i and operand h is at bit

    16 e + 8 (i & 1) + 4 (i >> 1) + 2 h    and up; the low bit of odd `c` one bit higher

So, apart from h, the distances between low parts are those between high parts.
"""

from __future__ import annotations

import functools

import torch

from . import fragment
from .fragment import Plane

#: bits of the first plane
HIGH = 4


def words(bits: int, head_dim: int) -> tuple[int, int]:
    """Number of 32-bit words of a lane for a segment of 32 tokens: in the first plane, and in both planes together."""
    first = head_dim // 16 * (HIGH // 2)
    return first, first + head_dim // (16 if bits - HIGH == 2 else 32)


def shape(bits: int, head_dim: int, page_size: int) -> tuple[int, ...]:
    """Shape of the array of words: `[segments, words / V, lanes, V]`."""
    return fragment.shape_of_words(words(bits, head_dim)[1], page_size)


@functools.cache
def _positions(bits: int, layout: str, head_dim: int) -> fragment.Positions:
    """Where the two planes are in the words of a segment."""
    word, lane, bit = fragment.field_positions(HIGH, layout, head_dim)
    c, h = word // 2, word & 1
    first, count = words(bits, head_dim)
    low = (first + c, bit + 2 * h) if bits - HIGH == 2 else (first + c // 2, bit + 2 * h + (c & 1))
    return tuple((fragment.word_index(word, lane, count), at) for word, at in ((word, bit), low))


@functools.cache
def _planes(bits: int, head_dim: int) -> tuple[Plane, ...]:
    channels, none = torch.arange(head_dim), torch.zeros(head_dim, dtype=torch.int32)
    return Plane(HIGH, channels, none + bits - HIGH), Plane(bits - HIGH, channels, none)


def pack(codes: torch.Tensor, bits: int, layout: str) -> torch.Tensor:
    """int `[..., page, D]` -> int32 words `[..., segments, words / V, lanes, V]`."""
    head_dim = codes.shape[-1]
    positions, count = _positions(bits, layout, head_dim), words(bits, head_dim)[1]
    return fragment.pack_planes(codes, _planes(bits, head_dim), positions, count)


def unpack(array: torch.Tensor, bits: int, layout: str, head_dim: int) -> torch.Tensor:
    """The inverse of `pack`: int32 `[..., page, D]`."""
    return fragment.unpack_planes(array, _planes(bits, head_dim), _positions(bits, layout, head_dim), head_dim)
