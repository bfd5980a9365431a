"""Codes in the order of tensor-core (mma) fragments: layouts `fragment-1` (keys) and `fragment-1t` (values, transposed).

The left operand of `mma.m16n8k16`, 16 rows by 16 columns, is four registers in each lane. Lane `4 g + t` (`g` 0..7, `t`
0..3) holds in register `i` the columns `2 t` and `2 t + 1` (plus 8 for `i >= 2`) of row `g` (plus 8 for odd `i`). Pages
are stored as 32-bit words. A lane reads a word, masks it, and passes it to that instruction, so no data crosses lanes.

    page    = segments of 32 tokens
    segment = [words / V][32 lanes][V words]: `V` consecutive words of a lane are one load (`V` is 4, or 2 or 1)
    words   = for each 16 channels `c`: `bits / 2` words, which hold two operands `h` = 0, 1 (16 tokens each)
    word    = its fields, for element e (0: low 16 bits, 1: high 16 bits), register i, operand h, at bit
              2 bits: 16 e + 8 (i & 1) + 2 (i >> 1) + 4 h         one word
              4 bits: 16 e + 8 (i & 1) + 4 (i >> 1)               word h
              8 bits: 16 e + 8 (i & 1)                            word 2 h + (i >> 1)
              e4m3:   8 e + 16 (i & 1)                            word 2 h + (i >> 1)

Numbers of e4m3 (`pairs`) are not masked but converted, two at a time: half of a word becomes a register.

Keys: rows are tokens, columns channels. Values: rows are channels, columns tokens. Row or column `8 j + x` (`j` = 0, 1)
of an operand is

    token   4 x + 2 h + j                           of the segment
    channel 8 (x >> 1) + 4 (c & 1) + 2 j + (x & 1)  of the 32 channels of `c`
            4 (x >> 1) + 2 j + (x & 1)              of the last 16 channels, if 16 are left over

A lane then has four neighbouring tokens, whose metadata is one load. And it has eight neighbouring channels, the order in
which unpacked tokens are loaded, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: the layout of keys, and that of values
LAYOUTS = ("fragment-1", "fragment-1t")
#: tokens of a segment
SEGMENT = 32
LANES = 32


def shape(bits: int, head_dim: int, page_size: int) -> tuple[int, ...]:
    """Shape of the array of words: `[segments, words / V, lanes, V]`."""
    return shape_of_words(head_dim // 16 * bits // 2, page_size)


def vector(count: int) -> int:
    """`V`: number of consecutive words of a lane that one load reads. count: words of the lane."""
    return next(v for v in (4, 2, 1) if count % v == 0)


def shape_of_words(count: int, page_size: int) -> tuple[int, ...]:
    """`[segments, words / V, lanes, V]` for lanes that have `count` words of a segment."""
    return page_size // SEGMENT, count // vector(count), LANES, vector(count)


def field_positions(
    bits: int, layout: str, head_dim: int, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The word of its lane, the lane, and the lowest bit of each token and channel of a segment, int64 `[32, D]` or `[D]`."""
    token, channel = torch.arange(SEGMENT)[:, None], torch.arange(head_dim)
    rest = channel >= head_dim // 32 * 32
    c = channel // 32 * 2 + torch.where(rest, 0, channel >> 2 & 1)
    of_channel = channel >> 1 & 1, 2 * torch.where(rest, channel >> 2 & 3, channel >> 3 & 3) + (channel & 1)
    of_token, h = (token & 1, token >> 2), token >> 1 & 1
    (row_j, row_x), (column_j, column_x) = (of_token, of_channel) if layout == LAYOUTS[0] else (of_channel, of_token)
    word = {2: c, 4: 2 * c + h, 8: 4 * c + 2 * h + column_j}[bits]
    field = {2: 2 * column_j + 4 * h, 4: 4 * column_j, 8: 0 * h}[bits]
    bit = 8 * (column_x & 1) + 16 * row_j if pairs else 16 * (column_x & 1) + 8 * row_j + field
    return word, 4 * row_x + (column_x >> 1), bit


def word_index(word: torch.Tensor, lane: torch.Tensor, count: int) -> torch.Tensor:
    """Where a lane's words are in a segment, `[words / V, lanes, V]` flattened. count: a lane's words of a segment."""
    wide = vector(count)
    return word // wide * (LANES * wide) + lane * wide + word % wide


@functools.cache
def _fields(bits: int, layout: str, head_dim: int, pairs: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For one segment: the position of each field among the segment's tokens and channels, `[words / V, lanes, V, fields]`;
    the bit of each field; and the field of each position, `[32 * head_dim]`."""
    word, lane, bit = field_positions(bits, layout, head_dim, pairs)
    sizes = shape(bits, head_dim, SEGMENT)[1:]
    order = (word_index(word, lane, sizes[0] * sizes[2]) * 32 + bit).flatten().argsort()
    return order.view(*sizes, 32 // bits), torch.arange(32 // bits) * bits, order.argsort()


def pack(codes: torch.Tensor, bits: int, layout: str, pairs: bool = False) -> torch.Tensor:
    """int `[..., page, D]` -> int32 words `[..., segments, words / V, lanes, V]`. pairs: e4m3 codes, of 8 bits."""
    order, shift, _ = (x.to(codes.device) for x in _fields(bits, layout, codes.shape[-1], pairs))
    segments = codes.long().unflatten(-2, (-1, SEGMENT)).flatten(-2, -1)
    return (segments[..., order] << shift).sum(-1).to(torch.int32)


def unpack(words: torch.Tensor, bits: int, layout: str, head_dim: int, pairs: bool = False) -> torch.Tensor:
    """The inverse of `pack`."""
    _, shift, order = (x.to(words.device) for x in _fields(bits, layout, head_dim, pairs))
    fields = (words.long().unsqueeze(-1) >> shift) & (2**bits - 1)
    return fields.flatten(-4, -1)[..., order].unflatten(-1, (SEGMENT, head_dim)).flatten(-3, -2)


class Plane(NamedTuple):
    """Bits `shift` to `shift + width - 1` of the codes of some channels. channels: int64 `[n]`. shifts: int32 `[n]`, the shift
    of each channel."""

    width: int
    channels: torch.Tensor
    shifts: torch.Tensor


#: for each plane: the word of each token and column of a segment, and the lowest bit of its field; int64 `[32, n]` both
Positions = Sequence[tuple[torch.Tensor, torch.Tensor]]


def pack_planes(codes: torch.Tensor, planes: Sequence[Plane], positions: Positions, count: int) -> torch.Tensor:
    """int `[..., page, D]` -> int32 words `[..., segments, words / V, lanes, V]`. count: a lane's words of a segment."""
    *lead, page_size, _ = codes.shape
    words = codes.new_zeros(*lead, page_size // SEGMENT, LANES * count, dtype=torch.int64)
    segments = codes.long().unflatten(-2, (-1, SEGMENT))
    for plane, (position, bit) in zip(planes, positions, strict=True):
        fields = (segments[..., plane.channels] >> plane.shifts.to(codes.device)) & (2**plane.width - 1)
        fields = fields << bit.to(codes.device)
        words.index_add_(-1, position.flatten().to(codes.device), fields.flatten(-2))  # fields do not overlap
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).unflatten(-1, shape_of_words(count, page_size)[1:])


def unpack_planes(words: torch.Tensor, planes: Sequence[Plane], positions: Positions, head_dim: int) -> torch.Tensor:
    """The inverse of `pack_planes`: int32 `[..., page, D]`."""
    wide = words.long().flatten(-3)
    codes = words.new_zeros(*wide.shape[:-1], SEGMENT, head_dim)
    for plane, (position, bit) in zip(planes, positions, strict=True):
        fields = (wide[..., position.to(words.device)] >> bit.to(words.device)) & (2**plane.width - 1)
        fields = fields.int() << plane.shifts.to(words.device)
        codes.index_add_(-1, plane.channels.to(words.device), fields)
    return codes.flatten(-3, -2)
