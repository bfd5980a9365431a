"""Reads pages in the layouts of `formats.fragment`. CUDA kernels attend to such pages; this
module has only `decode`, as `registry` describes it.

The position of a code, in words and in bits, is the sum of a number for its token and a number for its channel. So each
position of a tile costs one addition.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import fragment, fragment_planes
from .common import padded_width


class Params(NamedTuple):
    bits: int
    head_dim: int
    #: whether rows of an operand are channels (values), or tokens (keys)
    transposed: bool
    per_channel: bool
    #: tokens of a group (per channel), or channels of a group (per token)
    group: int
    #: groups of a token
    groups: int
    #: loads of `vector` words for a lane's words of a segment
    loads: int
    vector: int
    scale_at: int
    zero_at: int
    width: int
    padded: int
    max_block: int
    #: bits of the codes' second field (`formats.fragment_planes`), and the first of a lane's words that hold them
    low_bits: int
    low_at: int
    planes: int = 1
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    split = len(fmt.widths) > 1
    _, loads, _, vector = (fragment_planes if split else fragment).shape(fmt.bits, head_dim, page_size)
    per_channel = fmt.axis == "channel"
    group = fmt.group_size or (page_size if per_channel else head_dim)
    fields = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    return Params(
        bits=fmt.widths[0],
        head_dim=head_dim,
        transposed=fmt.layout == fragment.LAYOUTS[1],
        per_channel=per_channel,
        group=group,
        groups=1 if per_channel else head_dim // group,
        loads=loads,
        vector=vector,
        scale_at=fields["scale"],
        zero_at=fields["zero"],
        width=head_dim,
        padded=padded_width(head_dim),
        max_block=group if per_channel else page_size,
        low_bits=fmt.widths[1] if split else 0,
        low_at=fragment_planes.words(fmt.bits, head_dim)[0] if split else 0,
    )


@triton.jit
def _position(
    x, j, c, h, segment,
    IS_ROW: tl.constexpr, BITS: tl.constexpr, LOADS: tl.constexpr, VECTOR: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The contribution of row or column `8 j + x` of an operand to (word, bit). c: index of 16 channels, h: of the operand,
    segment: of 32 tokens. Each of these is passed for one of the two sides, and is 0 for the other."""
    word = c * (BITS // 2)
    if BITS == 8 and not IS_ROW:
        word += j
    if BITS == 4:
        word += h
    if BITS == 8:
        word += 2 * h
    lane = 4 * x if IS_ROW else x >> 1
    position = (segment * LOADS + word // VECTOR) * (32 * VECTOR) + lane * VECTOR + word % VECTOR
    if IS_ROW:
        bit = (16 if PAIRS else 8) * j
    else:
        bit = (8 if PAIRS else 16) * (x & 1)
        if BITS < 8:
            bit += BITS * j
    if BITS == 2:
        bit += 4 * h
    return position, bit


@triton.jit
def load_codes(
    array, token, channel, keep,
    CHANNELS: tl.constexpr, BITS: tl.constexpr, LOADS: tl.constexpr, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Codes (int32 `[N, M]`) of tokens `[N]` and channels `[M]` of an array of CHANNELS channels. 0 where `keep` `[M]`
    is false. PAIRS: the codes are e4m3."""
    WHOLE: tl.constexpr = CHANNELS // 32 * 32
    row, row_bit = _position(
        (token >> 2) & 7, token & 1, 0, (token >> 1) & 1, token // 32, not TRANSPOSED, BITS, LOADS, VECTOR, PAIRS
    )
    rest = channel >= WHOLE
    of_channel = 2 * tl.where(rest, (channel >> 2) & 3, (channel >> 3) & 3) + (channel & 1)
    tile = channel // 32 * 2 + tl.where(rest, 0, (channel >> 2) & 1)
    column, column_bit = _position(of_channel, (channel >> 1) & 1, tile, 0, 0, TRANSPOSED, BITS, LOADS, VECTOR, PAIRS)
    words = array.to(tl.pointer_type(tl.int32))
    code = tl.load(words + (row[:, None] + column[None, :]), mask=keep[None, :], other=0)
    return (code >> (row_bit[:, None] + column_bit[None, :])) & ((1 << BITS) - 1)


@triton.jit
def _low_codes(page, token, channel, keep, P: tl.constexpr):
    """The second fields of codes, int32 `[N, M]`, as `formats.fragment_planes` describes them."""
    rest = channel >= P.head_dim // 32 * 32
    of_channel = 2 * tl.where(rest, (channel >> 2) & 3, (channel >> 3) & 3) + (channel & 1)
    tile = channel // 32 * 2 + tl.where(rest, 0, (channel >> 2) & 1)
    of_token, token_j, channel_j = (token >> 2) & 7, token & 1, (channel >> 1) & 1
    if P.transposed:
        lane = 4 * of_channel[None, :] + (of_token >> 1)[:, None]
        bit = (16 * (of_token & 1) + 4 * token_j)[:, None] + (8 * channel_j)[None, :]
    else:
        lane = (4 * of_token)[:, None] + (of_channel >> 1)[None, :]
        bit = (8 * token_j)[:, None] + (16 * (of_channel & 1) + 4 * channel_j)[None, :]
    bit += (2 * ((token >> 1) & 1))[:, None]
    if P.low_bits == 1:
        bit += (tile & 1)[None, :]
        word = P.low_at + tile // 2
    else:
        word = P.low_at + tile
    position = (token // 32 * P.loads)[:, None] + (word // P.vector)[None, :]
    position = position * (32 * P.vector) + lane * P.vector + (word % P.vector)[None, :]
    words = tl.load(page.to(tl.pointer_type(tl.int32)) + position, mask=keep[None, :], other=0)
    return (words >> bit) & ((1 << P.low_bits) - 1)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    token = n0 + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, P.padded)
    keep = channel < P.head_dim
    code = load_codes(page, token, channel, keep, P.head_dim, P.bits, P.loads, P.vector, P.transposed)
    if P.low_bits > 0:
        code = (code << P.low_bits) | _low_codes(page, token, channel, keep, P)
    if P.per_channel:
        at = (n0 // P.group * P.head_dim + channel)[None, :]
    elif P.groups == 1:
        at = token[:, None]
    else:
        at = token[:, None] * P.groups + channel[None, :] // P.group
    mask = keep[None, :] if P.per_channel or P.groups > 1 else token[:, None] >= 0
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load((page + P.zero_at).to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)
    return code.to(tl.float32) * scale + zero
