"""Codes of `static` in the order in which tensor cores take them: layouts `fragment-1` (keys) and `fragment-1t` (values).

Words, lanes and rows are those of `fragment`: a page is blocks of 32 tokens, a block is `[words / V][32 lanes][V words]`, lane
`4 g + t`, and a word's two halves are the elements e = 0, 1 of a register. What differs is how widths share words.

Keys. Eight neighbouring channels of one plane are an *octet*, half of an operand's columns: lane `t` has channels `2 t + e` of
it. Octets stand in the order of the planes (4 bits, 2, 1), and a word has four bits for them: one octet of 4 bits, two of 2,
or four of 1. A field of an octet that begins at bit `at` (of 4) is

    token 4 g + 2 h + j of the block: bits 16 e + 8 j + 4 h + at and up

So a token's place is the same in every plane, and a channel's place is a power of two that goes into the query.

Values. The plane of 4 or 2 bits is as in `fragment`. A plane of 1 bit (3 bits are 2 + 1) stands behind it: word `c / 2` holds
what belongs to the 16 channels `c`, each field one bit at the place that `fragment` gives to two, odd `c` one bit higher.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .fragment import BLOCK, LANES, LAYOUTS

#: channels of an octet
OCTET = 8
#: bits of a number, of values
VALUE_BITS = (2, 3, 4)


class Plane(NamedTuple):
    """Columns of one width: `channels` int64 `[n]`, and what a code's bits there are shifted by, int32 `[n]`."""

    width: int
    channels: torch.Tensor
    shifts: torch.Tensor


def validate(pattern: str, token_scale: bool, head_dim: int, layout: str) -> None:
    """Raise `ValueError` where the layout does not take this pattern."""
    if layout == LAYOUTS[0]:
        if token_scale:
            raise ValueError(f"layout={layout!r} is for keys, whose tokens have no scales ('-t')")
        if head_dim // len(pattern) % OCTET:
            raise ValueError(
                f"pattern={pattern!r} has groups of {head_dim // len(pattern)} channels with head_dim={head_dim}; "
                f"layout={layout!r} takes multiples of {OCTET}"
            )
        return
    bits = set(map(int, pattern))
    if len(bits) > 1 or not bits <= set(VALUE_BITS):
        raise ValueError(f"pattern={pattern!r} in layout={layout!r} must be one of {VALUE_BITS} bits for all channels")
    if 3 in bits and head_dim % 32:
        raise ValueError(f"layout={layout!r} takes 3 bits with multiples of 32 channels, not with head_dim={head_dim}")


def words(planes: Sequence[Plane], layout: str) -> int:
    """32-bit words of a lane, for a block of 32 tokens."""
    if layout == LAYOUTS[0]:
        return -(-sum(len(plane.channels) * plane.width for plane in planes) // (4 * OCTET))
    return sum(len(plane.channels) * plane.width for plane in planes) // 32


def vector(count: int) -> int:
    """Consecutive words of a lane that are one load."""
    return next(v for v in (4, 2, 1) if count % v == 0)


def shape(planes: Sequence[Plane], layout: str, page_size: int) -> tuple[int, ...]:
    """Shape of the array of words: `[blocks, words / V, lanes, V]`."""
    count = words(planes, layout)
    return page_size // BLOCK, count // vector(count), LANES, vector(count)


def pack(codes: torch.Tensor, planes: Sequence[Plane], layout: str) -> torch.Tensor:
    """int `[..., page, D]` -> int32 words `[..., blocks, words / V, lanes, V]`."""
    *lead, page_size, head_dim = codes.shape
    sizes = shape(planes, layout, page_size)
    found = codes.new_zeros(*lead, sizes[0], sizes[1] * sizes[2] * sizes[3], dtype=torch.int64)
    blocks = codes.long().unflatten(-2, (-1, BLOCK))
    for plane, (place, bit) in zip(planes, _places(_key(planes), layout, head_dim), strict=True):
        fields = (blocks[..., plane.channels] >> plane.shifts.to(codes.device)) & (2**plane.width - 1)
        fields = fields << bit.to(codes.device)
        found.index_add_(-1, place.flatten().to(codes.device), fields.flatten(-2))  # fields do not overlap
    found = torch.where(found >= 2**31, found - 2**32, found)
    return found.to(torch.int32).unflatten(-1, sizes[1:])


def unpack(found: torch.Tensor, planes: Sequence[Plane], layout: str, head_dim: int) -> torch.Tensor:
    """The inverse of `pack`: int32 `[..., page, D]`."""
    wide = found.long().flatten(-3)
    codes = found.new_zeros(*wide.shape[:-1], BLOCK, head_dim)
    for plane, (place, bit) in zip(planes, _places(_key(planes), layout, head_dim), strict=True):
        fields = (wide[..., place.to(found.device)] >> bit.to(found.device)) & (2**plane.width - 1)
        fields = fields.int() << plane.shifts.to(found.device)
        codes.index_add_(-1, plane.channels.to(found.device), fields)
    return codes.flatten(-3, -2)


def _key(planes: Sequence[Plane]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((plane.width, tuple(plane.channels.tolist())) for plane in planes)


@functools.cache
def _places(planes: tuple[tuple[int, tuple[int, ...]], ...], layout: str, head_dim: int):
    """Of each plane, for the tokens of a block and its columns, int64 `[32, n]` both: the word, and the field's lowest bit."""
    count = sum(len(channels) * width for width, channels in planes)
    count = -(-count // 32)
    wide = vector(count)
    token, found, before = torch.arange(BLOCK)[:, None], [], 0
    for width, channels in planes:
        column, channel = torch.arange(len(channels)), torch.tensor(channels)
        g, h, j = token >> 2, token >> 1 & 1, token & 1
        if layout == LAYOUTS[0]:
            at = before + width * (column // OCTET)
            word, lane = at // 4, 4 * g + (column % OCTET >> 1)
            bit = 16 * (column & 1) + 8 * j + 4 * h + at % 4
        else:
            # g is the row of the operand's columns, of which a lane has two
            tile, row_half, row = _row(channel, head_dim)
            lane, e = 4 * row + (g >> 1), g & 1
            bit = 16 * e + 8 * row_half
            if width == 4:
                word, bit = 2 * tile + h, bit + 4 * j
            elif width == 2:
                word, bit = tile, bit + 2 * j + 4 * h
            else:
                word, bit = head_dim // 16 + tile // 2, bit + 2 * j + 4 * h + (tile & 1)
        place = word // wide * (LANES * wide) + lane * wide + word % wide
        found.append(tuple(x.expand(BLOCK, len(channels)).contiguous() for x in (place, bit)))
        before += width * -(-len(channels) // OCTET)
    return tuple(found)


def _row(channel: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which 16 channels a channel is in, which half of their rows, and which row of it: the inverse of `fragment.channel`."""
    rest = channel >= head_dim // 32 * 32
    tile = channel // 32 * 2 + torch.where(rest, 0, channel >> 2 & 1)
    row = 2 * torch.where(rest, channel >> 2 & 3, channel >> 3 & 3) + (channel & 1)
    return tile, channel >> 1 & 1, row
