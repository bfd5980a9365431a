"""Device functions of `formats.static`, layout `planar-1`. The interface is described in `registry`.

Means and codes of a page are computed for one field of the words at a time, in the order of the words.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..formats.static import LOWEST_SCALE
from ..formats.static import MAX_MEAN as MEAN_LIMIT
from .boosted import _squared
from .common import load_tokens, padded_width, query_dot, value_dot
from .dense import fetch as fetch
from .dense import prepare as prepare
from .dense import weigh as weigh

LOWEST = tl.constexpr(LOWEST_SCALE)
MAX_MEAN = tl.constexpr(MEAN_LIMIT)

_FIELDS = (
    *("head_dim", "width", "padded", "planes", "units", "max_block", "encode_rows", "offset", "interleaved"),
    *("gathers", "ptx"),
    *("page_size", "folds", "group", "row_words", "mean_at", "scale_at", "token_scale", "thresholds"),
    # for each group of channels: bits, gain, number of planes; then, for each of its planes
    *("bits", "gain", "count", "plane_width", "plane_shift", "plane_first"),
    # for each width (4, 2, 1) in use: width, columns, words of a token, words before them
    *("widths", "columns", "words", "before"),
)
Params = namedtuple("Params", _FIELDS)


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    fields = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    group = head_dim // len(fmt.pattern)
    planes = fmt.planes(head_dim)
    words = [len(plane.channels) * plane.width // 16 for plane in planes]
    by_plane: list[list[tuple[int, int, int]]] = [[] for _ in fmt.pattern]
    for plane in planes:
        for first in range(0, len(plane.channels), group):
            group_index = int(plane.channels[first]) // group
            by_plane[group_index].append((plane.width, int(plane.shifts[first]), first))
    padded = [(x + [(1, 0, 0)] * 2)[:2] for x in by_plane]
    return Params(
        head_dim=head_dim,
        width=head_dim,
        padded=padded_width(head_dim),
        planes=1,
        units=(1.0,),
        max_block=page_size,
        encode_rows=page_size,
        offset=False,
        interleaved=False,
        gathers=False,
        ptx=ptx,
        page_size=page_size,
        folds=page_size.bit_length() - 1,
        group=group,
        row_words=sum(words),
        mean_at=fields.get("mean", 0),
        scale_at=fields.get("scale", 0),
        token_scale=fmt.token_scale,
        thresholds=tuple(fmt.thresholds(head_dim).tolist()),
        bits=tuple(map(int, fmt.pattern)),
        gain=tuple(fmt.gain(head_dim)[::group].tolist()),
        count=tuple(map(len, by_plane)),
        plane_width=tuple(tuple(plane[0] for plane in x) for x in padded),
        plane_shift=tuple(tuple(plane[1] for plane in x) for x in padded),
        plane_first=tuple(tuple(plane[2] for plane in x) for x in padded),
        widths=tuple(plane.width for plane in planes),
        columns=tuple(len(plane.channels) for plane in planes),
        words=tuple(words),
        before=tuple(sum(words[:i]) for i in range(len(words))),
    )


@triton.jit
def _gain(channel, P: tl.constexpr):
    """The gain of each channel's group, float32; 0 after the last."""
    x = tl.zeros_like(channel).to(tl.float32)
    for i in tl.static_range(len(P.bits)):
        x = tl.where(channel // P.group == i, P.gain[i], x)
    return x


@triton.jit
def _plane(words, valid, channel, i: tl.constexpr, which: tl.constexpr, P: tl.constexpr):
    """A plane's bits of group i's codes, at their place in the code, int32 `[N, padded]`; 0 in other groups."""
    WIDTH: tl.constexpr = P.plane_width[i][which]
    in_group = channel // P.group == i
    column = tl.where(in_group, channel - i * P.group + P.plane_first[i][which], 0)
    codes = (valid & in_group).to(tl.int32) * 0
    for n in tl.static_range(len(P.widths)):
        if P.widths[n] == WIDTH:
            word = tl.load(words + P.before[n] + column % P.words[n], mask=valid & in_group, other=0)
            field = (word.to(tl.int32) >> (column // P.words[n] * WIDTH)) & ((1 << WIDTH) - 1)
            codes += tl.where(in_group, field << P.plane_shift[i][which], 0)
    return codes


@triton.jit
def _codes(page, token, valid, channel, P: tl.constexpr):
    """Codes, float32, of tokens `[N, 1]` and channels `[1, padded]`."""
    words = page.to(tl.pointer_type(tl.int16)) + token * P.row_words
    code = (token * 0 + channel * 0).to(tl.int32)
    for i in tl.static_range(len(P.bits)):
        for which in tl.static_range(2):
            if which < P.count[i]:
                code += _plane(words, valid, channel, i, which, P)
    return code.to(tl.float32)


@triton.jit
def _tile(page, record, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """A tile of tokens, float32 `[BLOCK_N, padded]`; 0 where not valid."""
    token, channel = (n0 + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, P.padded)[None, :]
    return numbers(page, record, _codes(page, token, valid[:, None], channel, P), token, valid, channel, P)


@triton.jit
def numbers(page, record, code, token, valid, channel, P: tl.constexpr):
    """The decoded numbers, float32 `[N, padded]`; 0 where not valid. code: float32; token `[N, 1]`,
    channel `[1, padded]`."""
    keep = channel < P.width
    center = tl.load(record.to(tl.pointer_type(tl.float32)) + channel, mask=keep, other=0.0)
    step = tl.load(record.to(tl.pointer_type(tl.float32)) + P.head_dim + channel, mask=keep, other=0.0)
    middle = tl.zeros_like(step)
    for i in tl.static_range(len(P.bits)):
        middle = tl.where(channel // P.group == i, ((1 << P.bits[i]) - 1) * 0.5, middle)
    x = (code - middle) * _gain(channel, P)
    if P.token_scale:
        byte = tl.load(page + P.scale_at + token // 2, mask=valid[:, None], other=0).to(tl.int32)
        k = ((byte >> (token % 2 * 4)) & 15) + LOWEST
        x = x * _power(k)
    else:
        mean = tl.load((page + P.mean_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
        x += mean.to(tl.float32)
    x = x * step + center
    return tl.where(valid[:, None] & keep, x, 0.0)


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    k = _tile(page, record, n0, valid, BLOCK_N, P).to(DOT)
    return query_dot(prepared[0], tl.trans(k) if T == 1 else k, None, T) * factor


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    v = _tile(page, record, n0, valid, BLOCK_N, P).to(DOT)
    return (value_dot(weights.to(DOT), v if T == 1 else tl.trans(v), acc[0] * tl.expand_dims(decay, T), T),)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return _tile(page, record, n0, valid, BLOCK_N, P)


@triton.jit
def _rest(record, source, token, channel, keep, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr):
    """For some channels of a whole page: tokens minus the page's mean, in steps, `[page_size, n]`; and the stored means
    `[1, n]`, 0 if pages have none. channel, keep: `[1, n]`."""
    n: tl.constexpr = channel.shape[1]
    x = load_tokens(source, token, channel, keep, HAS_ORDER, TAIL)
    center = tl.load(record.to(tl.pointer_type(tl.float32)) + channel, mask=keep, other=0.0)
    step = tl.load(record.to(tl.pointer_type(tl.float32)) + P.head_dim + channel, mask=keep, other=1.0)
    x = x - center
    x = tl.math.div_rn(x, tl.zeros_like(x) + step)
    mean = tl.zeros((1, n), tl.float16)
    if not P.token_scale:
        total = x
        for i in tl.static_range(P.folds):
            total = tl.sum(tl.reshape(total, (2, P.page_size >> (i + 1), n)), 0)
        total = tl.reshape(total, (1, n)) * (1.0 / P.page_size)
        mean = tl.minimum(tl.maximum(total, -MAX_MEAN), MAX_MEAN).to(tl.float16)
        x = x - mean.to(tl.float32)
    return x, mean


@triton.jit
def _scales(rest, P: tl.constexpr):
    """k + 8 for each token, int32 `[page_size, 1]`: `Static.scale_of`. rest: `[page_size, padded]`, 0 in unused
    channels."""
    total = _squared(rest, P)
    for i in tl.static_range(10):
        if P.padded >> (i + 1) > 0:
            total = tl.sum(tl.reshape(total, (P.page_size, 2, P.padded >> (i + 1))), 1)
    total = tl.reshape(total, (P.page_size, 1))
    k = tl.zeros((P.page_size, 1), tl.int32)
    for i in tl.static_range(15):
        k += (total >= P.thresholds[i]).to(tl.int32)
    return k


@triton.jit
def _power(k):
    """2 ** (k / 4) for integers k, rounded once: a quarter's factor times a power of two."""
    quarter = k & 3
    factor = tl.where(quarter == 2, 1.4142135623730951, 1.681792830507429)
    factor = tl.where(quarter == 1, 1.189207115002721, factor)
    factor = tl.where(quarter == 0, 1.0, factor)
    return factor * ((127 + (k >> 2)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store a whole page; its token 0 has index `base`."""
    number = tl.arange(0, P.page_size)
    token = (base + number)[:, None]
    channel = tl.arange(0, P.padded)[None, :]
    keep = channel < P.width
    rest, mean = _rest(record, source, token, channel, keep, HAS_ORDER, TAIL, P)
    scale = tl.full((P.page_size, 1), 1.0, tl.float32)
    if not P.token_scale:
        tl.store((page + P.mean_at).to(tl.pointer_type(tl.float16)) + channel, mean, mask=keep)
    else:
        k = _scales(tl.where(keep, rest, 0.0), P)
        scale = _power(k + LOWEST)
        pairs = tl.reshape(k, (P.page_size // 2, 2)) << (tl.arange(0, 2) * 4)[None, :]
        tl.store(page + P.scale_at + tl.arange(0, P.page_size // 2), tl.sum(pairs, 1).to(tl.uint8))
    for n in tl.static_range(len(P.widths)):
        _store_plane(page, record, source, token, number, scale, n, HAS_ORDER, TAIL, P)


@triton.jit
def _store_plane(
    page, record, source, token, number, scale, n: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """The words of one width, of a whole page."""
    WIDTH: tl.constexpr = P.widths[n]
    word = tl.arange(0, triton.next_power_of_2(P.words[n]))[None, :]
    keep = word < P.words[n]
    packed = (number[:, None] * 0 + word * 0).to(tl.int32)
    for j in tl.static_range(16 // WIDTH):
        column = word + j * P.words[n]
        channel, shift = column * 0, column * 0
        for i in tl.static_range(len(P.bits)):
            for which in tl.static_range(2):
                if which < P.count[i] and P.plane_width[i][which] == WIDTH:
                    at = column - P.plane_first[i][which]
                    in_group = (at >= 0) & (at < P.group)
                    channel = tl.where(in_group, at + i * P.group, channel)
                    shift = tl.where(in_group, P.plane_shift[i][which], shift)
        rest, _ = _rest(record, source, token, channel, keep, HAS_ORDER, TAIL, P)
        if P.token_scale:
            rest = tl.math.div_rn(rest, tl.zeros_like(rest) + scale)
        half, max_code = channel.to(tl.float32) * 0.0, channel.to(tl.float32) * 0.0
        for i in tl.static_range(len(P.bits)):
            in_group = channel // P.group == i
            half = tl.where(in_group, (1 << P.bits[i]) * 0.5, half)
            max_code = tl.where(in_group, (1 << P.bits[i]) - 1.0, max_code)
        code = tl.minimum(tl.maximum(tl.floor(rest) + half, 0.0), max_code).to(tl.int32)
        packed = packed | (((code >> shift) & ((1 << WIDTH) - 1)) << (j * WIDTH))
    target = page.to(tl.pointer_type(tl.int16)) + number[:, None] * P.row_words + P.before[n] + word
    tl.store(target, packed.to(tl.int16), mask=keep)
