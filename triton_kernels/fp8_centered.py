"""Device functions of `formats.fp8_centered`, layout `planar-1`: those of `fp8` and a center for each channel of a page.
The interface is described in `registry`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .common import load_plane, load_tokens, padded_width, query_dot, value_dot
from .dense import prepare as prepare
from .dense import weigh as weigh
from .fp8 import from_e4m3, load_tile, store_tile

FP16_MAX = tl.constexpr(65504.0)


class Params(NamedTuple):
    width: int
    padded: int
    page_size: int
    #: bytes of a page at which scales and centers begin
    scale_at: int
    center_at: int
    max_block: int
    encode_rows: int
    scaled: int = 1
    planes: int = 1
    units: tuple[float, ...] = (1.0,)
    offset: bool = False
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False
    gathers: bool = False
    core_matrices: int = 0


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    padded = padded_width(head_dim)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    rows = min(max(2048 // padded, 1), page_size)
    return Params(head_dim, padded, page_size, at["scale"], at["center"], page_size, rows)


@triton.jit
def _center(page, P: tl.constexpr):
    """A page's centers, float32 `[padded]`; 0 after the last channel."""
    channel = tl.arange(0, P.padded)
    pointers = (page + P.center_at).to(tl.pointer_type(tl.float16)) + channel
    return tl.load(pointers, mask=channel < P.width, other=0.0).to(tl.float32)


@triton.jit
def fetch(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """The scales of the tile's tokens, float32 `[BLOCK_N]`; 0 in unused slots, which may hold NaN."""
    pointers = (page + P.scale_at).to(tl.pointer_type(tl.float32)) + n0 + tl.arange(0, BLOCK_N)
    return (tl.load(pointers, mask=valid, other=0.0),)


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    token = n0 + tl.arange(0, BLOCK_N)
    # codes are exact in 16 bits; with the center they are not
    k = from_e4m3(load_plane(page + token * P.width, 1, valid, 0, P).to(tl.int16)).to(DOT)
    s = query_dot(prepared[0], tl.trans(k) if T == 1 else k, None, T) * tl.expand_dims(fetched[0], 1 - T)
    of_center = tl.sum(prepared[0].to(tl.float32) * tl.expand_dims(_center(page, P), 1 - T), T)
    return (s + tl.expand_dims(of_center, T)) * factor


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    v = decode(page, record, n0, valid, 0, BLOCK_N, P).to(DOT)
    return (value_dot(weights.to(DOT), v if T == 1 else tl.trans(v), acc[0] * tl.expand_dims(decay, T), T),)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return tl.where(valid[:, None], load_tile(page, n0, valid, BLOCK_N, P) + _center(page, P)[None, :], 0.0)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store a whole page; its token 0 has index `base`."""
    channel = tl.arange(0, P.padded)[None, :]
    low = tl.full((P.padded,), float("inf"), tl.float32)
    high = tl.full((P.padded,), float("-inf"), tl.float32)
    for t0 in range(0, P.page_size, ROWS):
        token = base + t0 + tl.arange(0, ROWS)[:, None]
        x = load_tokens(source, token, channel, channel < P.width, HAS_ORDER, TAIL)
        finite = tl.abs(x) < float("inf")
        low = tl.minimum(low, tl.min(tl.where(finite, x, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(finite, x, float("-inf")), 0))
    middle = tl.minimum(tl.maximum(low * 0.5 + high * 0.5, -FP16_MAX), FP16_MAX)
    # adding 0 turns -0 into +0
    center = tl.where(low <= high, middle, 0.0).to(tl.float16) + 0.0
    all_channels = tl.arange(0, P.padded)
    tl.store((page + P.center_at).to(tl.pointer_type(tl.float16)) + all_channels, center, mask=all_channels < P.width)
    for t0 in range(0, P.page_size, ROWS):
        row = t0 + tl.arange(0, ROWS)
        x = load_tokens(source, base + row[:, None], channel, channel < P.width, HAS_ORDER, TAIL)
        store_tile(page, x - center.to(tl.float32)[None, :], row, row < P.page_size, channel, P)
