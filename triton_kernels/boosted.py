"""Device functions of `formats.boosted`, layout `planar-1`. The interface is described in `registry`.

The plane of low codes is read like 2-bit codes per channel in `affine`. For keys, the boosted channels' high codes are
additional columns: S = low . q' + high . (4 q')[map] + zero . q. For values, which is a rare choice, codes are combined
first.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..formats.affine import Affine
from ..formats.base import FIELD_ALIGNMENT
from . import affine
from .affine import _extract, _key_plane, _words, quantize, store_codes
from .affine import prepare as _prepare_low
from .affine import scores as _low_scores
from .common import as_operand, load_tokens, padded_width, query_dot, value_dot

TWO_24 = affine.TWO_24

#: fields in addition to those of `affine.Params`. count: boosted channels; rows: their number, padded; words: int16 words of
#: a boosted channel; high_at, map_at, ends: offsets in bytes of the two arrays, and of their ends; gaps: unused bytes after
#: each; folds, score, seed: how channels are chosen
_OWN = ("count", "rows", "words", "high_at", "map_at", "ends", "gaps", "folds", "score", "seed")
Params = namedtuple("Params", (*affine.Params._fields, *_OWN))


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    fields = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    ends = [
        field.offset + field.nbytes for field in fmt.fields(head_dim, page_size, dtype) if field.name in ("high", "map")
    ]
    count = fmt.boosted(head_dim)
    low = affine.params(Affine(fmt.bits, "channel"), head_dim, page_size, dtype, ptx)
    return Params(
        **low._asdict() | {"scale_at": fields["scale"], "zero_at": fields["zero"]},
        count=count,
        rows=padded_width(max(count, 1)),
        words=page_size // 8,
        high_at=fields["high"],
        map_at=fields["map"],
        ends=tuple(ends),
        gaps=tuple(-end % FIELD_ALIGNMENT for end in ends),
        folds=page_size.bit_length() - 1,
        score=fmt.score,
        seed=fmt.seed * 0x27D4EB2F & 0xFFFFFFFF,
    )


@triton.jit
def mapped(page, row, P: tl.constexpr):
    """The channels of rows of the second plane, int32. Pages without tokens may give any number."""
    if P.head_dim > 256:
        channel = tl.load((page + P.map_at).to(tl.pointer_type(tl.int16)) + row, mask=row < P.count, other=0)
    else:
        channel = tl.load(page + P.map_at + row, mask=row < P.count, other=0)
    return channel.to(tl.int32)


@triton.jit
def fetch(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """The boosted channels, int32 `[rows]`. Unused rows, and pages without tokens, give an arbitrary valid channel."""
    if P.count > 0:
        row = tl.arange(0, P.rows)
        channel = tl.minimum(mapped(page, row, P), P.head_dim - 1)
        if P.head_dim > 256:
            channel = tl.maximum(channel, 0)
        return (channel,)
    else:
        return ()


@triton.jit
def prepare(q_rows, stride, rows_valid, DOT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """The queries as `affine` prepares them, and their addresses: each page has other boosted channels."""
    # a stride of 1 is a compile-time constant, which a function cannot return
    return _prepare_low(q_rows, stride, rows_valid, DOT, T, P) + (q_rows, tl.full((1,), stride, tl.int32), rows_valid)


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.count > 0:
        s = _mixed_scores(page, prepared, fetched[0], n0, valid, factor, BLOCK_N, T, P)
    else:
        s = _low_scores(page, record, prepared, fetched, n0, valid, factor, DOT, BLOCK_N, T, P)
    return s


@triton.jit
def _mixed_scores(page, prepared, channel, n0, valid, factor, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """Both planes' products. channel: the boosted channels `[rows]`."""
    TYPE: tl.constexpr = prepared[2].dtype
    # the loads that depend on a page's map begin first; their results are used after the low codes' products
    size, row = prepared[0], tl.arange(0, P.rows)
    q_rows, stride, rows_valid = prepared[2 + P.planes], prepared[3 + P.planes], prepared[4 + P.planes]
    keep = rows_valid[:, None] & (row < P.count)[None, :]
    q = tl.load(q_rows[:, None] + (channel * stride)[None, :], mask=keep, other=0.0).to(tl.float32)
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float16)) + channel).to(tl.float32)
    low = _words(page, n0, valid, T == 1, BLOCK_N, P)
    s = query_dot(prepared[2], _key_plane(page, low, n0, 0, TYPE, T, P), None, T)
    for j in tl.static_range(1, P.planes - 1):
        s = query_dot(prepared[2 + j], _key_plane(page, low, n0, j, TYPE, T, P), s, T)
    # size is a power of two, or 0 if all of q is 0
    inverse = tl.where(size > 0, (0x7F000000 - size.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True), 0.0)
    # Small keys have small scales, which are subnormal in float16 and lose bits. So the scales are multiplied by a power of
    # two, and the products divided by it. The largest scale becomes about 2^14, near the limit of float16, so that much
    # smaller scales keep their bits.
    exponent = tl.max(tl.where(row < P.count, scale, 0.0), 0).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.where(exponent > 0, exponent - (14 << 23), 0)
    unit = exponent.to(tl.float32, bitcast=True)
    scale = tl.where(exponent > 0, scale * (0x7F000000 - exponent).to(tl.float32, bitcast=True), 0.0)
    q = as_operand((q * inverse[:, None] * scale[None, :]).to(TYPE), T)
    if P.words < 16:  # pages of less than 128 tokens: a plane of them is too small for a product
        token = tl.expand_dims(n0 + tl.arange(0, BLOCK_N), 1 - T)
        high = _high(page, tl.expand_dims(row, T), token, tl.expand_dims(row < P.count, T), P)
        products = query_dot(q, high.to(q.dtype), None, T) * unit
    else:
        products = _high_products(page, q, unit, n0, BLOCK_N, T, P)
    # `products`, joined from planes, has another layout than s. Adding it to a product restores the layout
    LAST: tl.constexpr = P.planes - 1
    s += query_dot(prepared[2 + LAST], _key_plane(page, low, n0, LAST, TYPE, T, P), products, T)
    return s * tl.expand_dims(size * (4.0 * factor), T)


@triton.jit
def _high_products(page, q, unit, n0, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """Products of a tile's high codes with unit * q. A field of the words is a plane of tokens, so it is an operand
    already."""
    PLANES: tl.constexpr = BLOCK_N // P.words
    row, word = tl.arange(0, P.rows), tl.arange(0, P.words)
    position = tl.expand_dims(row, T) * P.words + tl.expand_dims(word, 1 - T)
    words = (page + P.high_at).to(tl.pointer_type(tl.int16)) + position
    if P.count == P.rows:
        words = tl.load(words)
    else:
        words = tl.load(words, mask=tl.expand_dims(row < P.count, T), other=0)
    products = ()
    for j in tl.static_range(PLANES):
        # Which fields belong to the tile is known only at run time. All fields of a page are multiplied, those of other
        # tiles by 0. Shifting words by a variable would move them through shared memory, a plane at a time.
        product, value = None, 0.0  # of a code's lowest bit
        for tile in tl.static_range(P.page_size // BLOCK_N):
            in_tile = n0 == tile * BLOCK_N
            code = _extract(words, tile * PLANES + j, P).to(q.dtype)
            product = query_dot(tl.where(in_tile, q, 0.0), code, product, T)
            value = tl.where(in_tile, TWO_24 / P.factors[tile * PLANES + j], value)
        products = products + (product * (value * unit),)
    return _side_by_side(products, PLANES, T)


@triton.jit
def _side_by_side(products, COUNT: tl.constexpr, T: tl.constexpr):
    """Join COUNT (a power of two, at most 8) tiles of equal size, in order."""
    for i in tl.static_range(3):
        if COUNT >> i > 1:
            pairs = ()
            for j in tl.static_range(COUNT >> (i + 1)):
                pairs = pairs + (_pair(products[2 * j], products[2 * j + 1], T),)
            products = pairs
    return products[0]


@triton.jit
def _pair(a, b, T: tl.constexpr):
    pair = tl.join(a, b)
    if T == 1:
        pair = tl.reshape(tl.permute(pair, (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))
    else:
        pair = tl.reshape(tl.permute(pair, (2, 0, 1)), (2 * a.shape[0], a.shape[1]))
    return pair


@triton.jit
def _high(page, row, token, keep, P: tl.constexpr):
    """High codes (0 to 3, int32) of boosted channels `row` and tokens; the two broadcast. 0 where `keep` is false."""
    position = row * P.words + token % P.words
    words = tl.load((page + P.high_at).to(tl.pointer_type(tl.int16)) + position, mask=keep, other=0)
    return (words.to(tl.int32) >> (token // P.words * 2)) & 3


@triton.jit
def _tokens(page, n0, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """Plane `j` of a tile: codes, float32 `[BLOCK_N, padded]`, scale and zero, float32 `[padded]`."""
    words = _words(page, n0, n0, False, BLOCK_N, P)
    code = _extract(words, j, P).to(tl.float32) * (TWO_24 / P.factors[j])
    word = tl.arange(0, P.padded)
    channel = j * P.width + word
    if P.count > 0:
        row = tl.arange(0, P.rows)[None, :]
        same = ((mapped(page, row, P) == channel[:, None]) & (row < P.count) & (word < P.width)[:, None]).to(tl.int32)
        boosted = tl.sum(same, 1)
        token = n0 + tl.arange(0, BLOCK_N)[:, None]
        high = _high(page, tl.sum(same * row, 1)[None, :], token, (boosted > 0)[None, :], P)
        code += 4.0 * high.to(tl.float32)
    keep = word < P.width
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
    zero = tl.load((page + P.zero_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
    return code, scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def weigh(page, fetched, s, n0, valid, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    return s, 1.0, 0.0


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    p = weights.to(tl.float32 if DOT == tl.float32 else tl.float16)
    total = tl.expand_dims(tl.sum(p.to(tl.float32), T), T)
    out = ()
    for j in tl.static_range(P.planes):
        code, scale, zero = _tokens(page, n0, j, BLOCK_N, P)
        code = code.to(p.dtype)
        product = value_dot(p, code if T == 1 else tl.trans(code), None, T)
        product = product * tl.expand_dims(scale, 1 - T) + total * tl.expand_dims(zero, 1 - T)
        out = out + (acc[j] * tl.expand_dims(decay, T) + product,)
    return out


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    code, scale, zero = _tokens(page, n0, j, BLOCK_N, P)
    return code * scale[None, :] + zero[None, :]


@triton.jit
def _fold_sum(x, P: tl.constexpr):
    """`formats.boosted.fold_sum`: x `[page_size, planes, padded]` -> `[planes, padded]`."""
    for i in tl.static_range(P.folds):
        x = tl.sum(tl.reshape(x, (2, P.page_size >> (i + 1), P.planes, P.padded)), 0)
    return tl.reshape(x, (P.planes, P.padded))


@triton.jit
def _squared(x, P: tl.constexpr):
    """x * x, rounded: the multiplication must not be fused with a following addition."""
    if P.ptx:
        y = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = x * x
    return y


@triton.jit
def _scores(x, low, high, channel, P: tl.constexpr):
    """`Boosted.scores`: x float32 `[page_size, planes, padded]` -> `[planes, padded]`."""
    if P.score == "magnitude":
        score = _fold_sum(tl.abs(x), P)
    elif P.score == "variance":
        mean = _fold_sum(x, P) * (1.0 / P.page_size)
        score = _fold_sum(_squared(x - mean[None, :, :], P), P)
    elif P.score == "range":
        score = high - low
    else:
        mixed = (low + 0.0).to(tl.uint32, bitcast=True) ^ (channel.to(tl.uint32) * 0x9E3779B1) ^ P.seed
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
        score = ((mixed ^ (mixed >> 16)) >> 8).to(tl.float32)
    return score + 0.0  # turns -0 into +0


@triton.jit
def _largest(keys, COUNT: tl.constexpr):
    """1 for the COUNT largest of `keys` (int32 `[n]`), 0 for the others. The first of equal keys wins; a negative key is
    never chosen."""
    threshold = 0  # find, bit by bit, the largest number that COUNT keys reach
    for i in range(31):
        candidate = threshold | (1 << (30 - i))
        reached = tl.sum((keys >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= COUNT, candidate, threshold)
    above = (keys > threshold).to(tl.int32)
    equal = (keys == threshold).to(tl.int32)
    room = COUNT - tl.sum(above, 0)
    return tl.where(tl.cumsum(equal, 0) <= room, above | equal, above)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Score, choose, quantize and pack a whole page, in one tile; its token 0 has index `base`."""
    token = tl.arange(0, P.page_size)
    word = tl.arange(0, P.padded)[None, :]
    keep = word < P.width
    channel = tl.arange(0, P.planes)[:, None] * P.width + word
    x = load_tokens(source, base + token[:, None, None], channel[None, :, :], keep[None, :, :], HAS_ORDER, TAIL)
    low, high = tl.min(x, 0), tl.max(x, 0)
    levels = tl.full((P.planes, P.padded), 3.0, tl.float32)
    if P.count > 0:
        # floats of 0 or more have the order of their bits
        keys = tl.where(keep, _scores(x, low, high, channel, P).to(tl.int32, bitcast=True), -1)
        chosen = _largest(tl.reshape(keys, (P.planes * P.padded,)), P.count)
        row = tl.reshape(tl.cumsum(chosen, 0) - chosen, (P.planes, P.padded))
        boosted = tl.reshape(chosen, (P.planes, P.padded)) > 0
        levels = tl.where(boosted, 15.0, levels)
    scale, zero, code = quantize(x, low[None, :, :], high[None, :, :], levels[None, :, :])
    tl.store((page + P.scale_at).to(tl.pointer_type(tl.float16)) + channel[None, :, :], scale, mask=keep[None, :, :])
    tl.store((page + P.zero_at).to(tl.pointer_type(tl.float16)) + channel[None, :, :], zero, mask=keep[None, :, :])
    store_codes(page, code & 3, token[:, None], word, keep, P)
    if P.count > 0:
        if P.head_dim > 256:
            tl.store((page + P.map_at).to(tl.pointer_type(tl.int16)) + row, channel.to(tl.int16), mask=boosted)
        else:
            tl.store(page + P.map_at + row, channel.to(tl.uint8), mask=boosted)
        shift = tl.arange(0, 8)[:, None, None, None] * 2
        words = tl.sum(tl.reshape(code >> 2, (8, P.words, P.planes, P.padded)) << shift, 0)
        position = row[None, :, :] * P.words + tl.arange(0, P.words)[:, None, None]
        target = (page + P.high_at).to(tl.pointer_type(tl.int16))
        tl.store(target + position, words.to(tl.int16), mask=boosted[None, :, :])
        for i in tl.static_range(2):
            gap = tl.arange(0, 16)
            tl.store(page + P.ends[i] + gap, tl.zeros((16,), tl.uint8), mask=gap < P.gaps[i])
