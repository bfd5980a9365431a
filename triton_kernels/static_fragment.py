"""Reads pages of `formats.static` in the layouts `fragment-1` and `fragment-1t`. `fragment` does this for other formats."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..formats import static as static_fragment
from ..formats.fragment import LAYOUTS, vector
from . import static

_FIELDS = (
    *static.Params._fields,
    # whether rows of an operand are channels (values); a lane's words for a segment of 32 tokens; words of one load
    *("transposed", "lane_words", "vector"),
    # keys: for each group of channels, the offsets of its planes in a lane's data, in quarter words
    "plane_at",
)
Params = namedtuple("Params", _FIELDS)


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    plain = static.params(fmt, head_dim, page_size, dtype, ptx)
    planes = fmt.planes(head_dim)
    before, starts = 0, {}
    for plane in planes:
        starts[plane.width] = before
        before += plane.width * len(plane.channels) // static_fragment.OCTET
    count = static_fragment.words(planes, fmt.layout)
    return Params(
        *plain,
        transposed=fmt.layout == LAYOUTS[1],
        lane_words=count,
        vector=vector(count),
        plane_at=tuple(
            tuple(starts.get(width, 0) + width * (first // static_fragment.OCTET) for width, first in zip(*pair))
            for pair in zip(plain.plane_width, plain.plane_first, strict=True)
        ),
    )


@triton.jit
def _load(page, token, lane, word, bit, keep, P: tl.constexpr):
    position = ((token // 32) * P.lane_words + word // P.vector * P.vector) * 32 + lane * P.vector + word % P.vector
    return tl.load(page.to(tl.pointer_type(tl.int32)) + position, mask=keep, other=0) >> bit


@triton.jit
def _key_plane(page, token, channel, keep, i: tl.constexpr, which: tl.constexpr, P: tl.constexpr):
    """A plane's bits of group i's codes, at their place in the code, int32 `[N, padded]`; 0 in other groups."""
    WIDTH: tl.constexpr = P.plane_width[i][which]
    lane = 4 * ((token >> 2) & 7) + ((channel >> 1) & 3)
    field = 16 * (channel & 1) + 8 * (token & 1) + 4 * ((token >> 1) & 1)
    in_group = channel // P.group == i
    at = P.plane_at[i][which] + tl.where(in_group, (channel - i * P.group) // 8, 0) * WIDTH
    field_codes = _load(page, token, lane, at // 4, field + at % 4, keep & in_group, P) & ((1 << WIDTH) - 1)
    return tl.where(in_group, field_codes << P.plane_shift[i][which], 0)


@triton.jit
def _key_codes(page, token, channel, keep, P: tl.constexpr):
    """Codes, int32, of tokens `[N, 1]` and channels `[1, padded]`."""
    code = (token * 0 + channel * 0).to(tl.int32)
    for i in tl.static_range(len(P.bits)):
        for which in tl.static_range(2):
            if which < P.count[i]:
                code += _key_plane(page, token, channel, keep, i, which, P)
    return code


@triton.jit
def value_position(token, channel, P: tl.constexpr):
    """The positions of tokens `[N, 1]` and channels `[1, padded]` in a page of values: the tile, the lane, and the column of
    the tile, which with the channel determines the field."""
    rest = channel >= P.head_dim // 32 * 32
    tile = channel // 32 * 2 + tl.where(rest, 0, (channel >> 2) & 1)
    row = 2 * tl.where(rest, (channel >> 2) & 3, (channel >> 3) & 3) + (channel & 1)
    column = (token >> 2) & 7
    return tile, 4 * row + (column >> 1), column


@triton.jit
def _value_codes(page, token, channel, keep, P: tl.constexpr):
    """The same for pages of values, where all channels have one width."""
    tile, lane, column = value_position(token, channel, P)
    half, h = token & 1, (token >> 1) & 1
    field = 16 * (column & 1) + 8 * ((channel >> 1) & 1)
    if P.bits[0] == 4:
        return _load(page, token, lane, 2 * tile + h, field + 4 * half, keep, P) & 15
    else:
        field += 2 * half + 4 * h
        code = _load(page, token, lane, tile, field, keep, P) & 3
        if P.bits[0] == 3:
            low = _load(page, token, lane, P.head_dim // 16 + tile // 2, field + tile % 2, keep, P) & 1
            code = 2 * code + low
        return code


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    token, channel = (n0 + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, P.padded)[None, :]
    keep = valid[:, None] & (channel < P.width)
    if P.transposed:
        code = _value_codes(page, token, channel, keep, P)
    else:
        code = _key_codes(page, token, channel, keep, P)
    return static.numbers(page, record, code.to(tl.float32), token, valid, channel, P)
