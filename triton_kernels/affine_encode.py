"""Codes, scales and zero points of `int<2,4,8>` pages, as the reference rounds them. Other formats pack words with it too."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import load_tokens

#: elements of a tile in `encode`
ENCODE_TILE = 8192
FP16_MAX = tl.constexpr(65504.0)
#: adding and subtracting it rounds a small float32 to an integer, half to even
ROUND = tl.constexpr(12582912.0)


@triton.jit
def quantize(x, low, high, levels):
    """Scale and zero (float16, shape of `low`) and codes (int32, shape of `x`), rounded as the reference rounds them.
    levels: the largest code, a number or the shape of `low`."""
    # div_rn, because `/` on float32 is approximate on a GPU
    scale = tl.minimum(tl.math.div_rn(high - low, tl.zeros_like(low) + levels), FP16_MAX).to(tl.float16)
    # adding 0 makes one of the two zeros: which of them a minimum picks is not defined
    zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16) + 0.0
    step = scale.to(tl.float32)
    offset = x - zero.to(tl.float32)
    code = tl.math.div_rn(offset, tl.zeros_like(offset) + tl.where(step > 0, step, 1.0))
    code = tl.minimum(tl.maximum(code, 0.0), levels)
    code = (code + ROUND) - ROUND
    code = tl.where(step > 0, code, 0.0).to(tl.int32)
    return scale, zero, code


@triton.jit
def store_codes(page, code, token, word, keep, P: tl.constexpr):
    """Codes `[T, planes, W]` of tokens `[T, 1]` -> words `[1, W]` of theirs."""
    shift = (tl.arange(0, P.planes) * P.bits)[None, :, None]
    words = tl.sum(code << shift, 1).to(tl.int16)  # fields do not overlap: the sum is the union
    tl.store(page.to(tl.pointer_type(tl.int16)) + token * P.width + word, words, mask=keep)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store tokens `start` to `stop` of a page (per channel: all of it); token 0 of the page has index `base`."""
    scales = (page + P.scale_at).to(tl.pointer_type(tl.float16))
    zeros = (page + P.zero_at).to(tl.pointer_type(tl.float16))
    plane = tl.arange(0, P.planes)
    if P.per_channel:
        CHUNKS: tl.constexpr = (P.width + P.encode_width - 1) // P.encode_width
        for i in range(P.groups * CHUNKS):
            group = i // CHUNKS
            word = (i % CHUNKS) * P.encode_width + tl.arange(0, P.encode_width)
            keep = word < P.width
            token = group * P.group + tl.arange(0, P.group)
            channel = plane[:, None] * P.width + word[None, :]
            x = load_tokens(
                source, base + token[:, None, None], channel[None, :, :], keep[None, None, :], HAS_ORDER, TAIL
            )
            scale, zero, code = quantize(x, tl.min(x, 0)[None, :, :], tl.max(x, 0)[None, :, :], 2.0**P.bits - 1.0)
            place = (group * P.head_dim + channel)[None, :, :]
            tl.store(scales + place, scale, mask=keep[None, None, :])
            tl.store(zeros + place, zero, mask=keep[None, None, :])
            store_codes(page, code, token[:, None], word[None, :], keep[None, :], P)
    else:
        word = tl.arange(0, P.padded)
        keep = word < P.width
        channel = (plane[:, None] * P.width + word[None, :])[None, :, :]
        for t0 in range(start, stop, ROWS):
            token = t0 + tl.arange(0, ROWS)
            mask = (token < stop)[:, None, None] & keep[None, None, :]
            x = load_tokens(source, base + token[:, None, None], channel, mask, HAS_ORDER, TAIL)
            low = tl.zeros_like(x)
            high = tl.zeros_like(x)
            for g in tl.static_range(P.groups):
                mine = (channel // P.group == g) & keep[None, None, :]
                low_g = tl.min(tl.min(tl.where(mine, x, float("inf")), 2), 1)
                high_g = tl.max(tl.max(tl.where(mine, x, float("-inf")), 2), 1)
                scale, zero, _ = quantize(low_g, low_g, high_g, 2.0**P.bits - 1.0)
                tl.store(scales + token * P.groups + g, scale, mask=token < stop)
                tl.store(zeros + token * P.groups + g, zero, mask=token < stop)
                low = tl.where(mine, low_g[:, None, None], low)
                high = tl.where(mine, high_g[:, None, None], high)
            scale, zero, code = quantize(x, low, high, 2.0**P.bits - 1.0)
            store_codes(page, code, token[:, None], word[None, :], (token < stop)[:, None] & keep[None, :], P)
