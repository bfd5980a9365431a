"""Codes of 5 and 6 bits in the order of tensor-core fragments: a plane of their high 4 bits, and a plane of their low
bits.

Words, lanes, rows and columns are those of `fragment`. A block of 32 tokens is `[words / V][32 lanes][V words]`. Its
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
from .fragment import BLOCK, LANES, LAYOUTS

#: bits of the first plane
HIGH = 4


def words(bits: int, head_dim: int) -> tuple[int, int]:
    """32-bit words of a lane for a block of 32 tokens: those of the first plane, and those of both."""
    first = head_dim // 16 * (HIGH // 2)
    return first, first + head_dim // (16 if bits - HIGH == 2 else 32)


def vector(count: int) -> int:
    """Number of consecutive words of a lane that are one load."""
    return next(v for v in (4, 2, 1) if count % v == 0)


def shape(bits: int, head_dim: int, page_size: int) -> tuple[int, ...]:
    """Shape of the array of words: `[blocks, words / V, lanes, V]`."""
    _, count = words(bits, head_dim)
    return page_size // BLOCK, count // vector(count), LANES, vector(count)


@functools.cache
def _positions(bits: int, layout: str, head_dim: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For each plane, int64 `[32, head_dim]` for the tokens and channels of a block: the position of the word, and the
    lowest bit in it."""
    token, channel = torch.arange(BLOCK)[:, None], torch.arange(head_dim)[None, :]
    token_x, token_j, h = token >> 2, token & 1, token >> 1 & 1
    rest = channel >= head_dim // 32 * 32
    c = channel // 32 * 2 + torch.where(rest, 0, channel >> 2 & 1)
    channel_x, channel_j = 2 * torch.where(rest, channel >> 2 & 3, channel >> 3 & 3) + (channel & 1), channel >> 1 & 1
    of_token, of_channel = (token_j, token_x), (channel_j, channel_x)
    (row_j, row_x), (column_j, column_x) = (of_token, of_channel) if layout == LAYOUTS[0] else (of_channel, of_token)
    lane, bit = 4 * row_x + (column_x >> 1), 16 * (column_x & 1) + 8 * row_j + 4 * column_j
    first, count = words(bits, head_dim)
    low = (first + c, bit + 2 * h) if bits - HIGH == 2 else (first + c // 2, bit + 2 * h + (c & 1))
    wide, positions = vector(count), []
    for word, at in ((2 * c + h, bit), low):
        position = word // wide * (LANES * wide) + lane * wide + word % wide
        positions.append(tuple(x.expand(BLOCK, head_dim).contiguous() for x in (position, at)))
    return tuple(positions)  # type: ignore[arg-type]


def _split(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of codes (int64) that are in each plane."""
    return codes >> bits - HIGH, codes & (1 << bits - HIGH) - 1


def pack(codes: torch.Tensor, bits: int, layout: str) -> torch.Tensor:
    """int `[..., page, D]` -> int32 words `[..., blocks, words / V, lanes, V]`."""
    *lead, page_size, head_dim = codes.shape
    sizes = shape(bits, head_dim, page_size)
    words = codes.new_zeros(*lead, sizes[0], sizes[1] * sizes[2] * sizes[3], dtype=torch.int64)
    blocks = codes.long().unflatten(-2, (-1, BLOCK))
    for plane_codes, (position, at) in zip(_split(blocks, bits), _positions(bits, layout, head_dim), strict=True):
        fields = (plane_codes << at.to(codes.device)).flatten(-2)
        words.index_add_(-1, position.flatten().to(codes.device), fields)  # fields do not overlap
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).unflatten(-1, sizes[1:])


def unpack(array: torch.Tensor, bits: int, layout: str, head_dim: int) -> torch.Tensor:
    """The inverse of `pack`: int64 `[..., page, D]`."""
    flat, planes = array.long().flatten(-3), []
    for width, (position, at) in zip((HIGH, bits - HIGH), _positions(bits, layout, head_dim), strict=True):
        planes.append(flat[..., position.to(array.device)] >> at.to(array.device) & (1 << width) - 1)
    return (planes[0] << bits - HIGH | planes[1]).flatten(-3, -2)


def merge_tokens(old: torch.Tensor, new: torch.Tensor, at: int, count: int, bits: int, layout: str) -> None:
    """Like `fragment.merge_tokens`."""
    tokens, head_dim = old.shape[-4] * BLOCK, fragment.head_dim(old.shape, bits)
    taken = torch.zeros(tokens, head_dim, dtype=torch.int32, device=old.device)
    taken[at : at + count] = 2**bits - 1
    mask = pack(taken, bits, layout)
    old.copy_((old & ~mask) | (new & mask))
