"""Device functions of `formats.fp8`: e4m3 codes, with a float32 scale per token or none. The interface is
described in `registry`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats.core_matrices import LAYOUT
from ..formats.fp8 import E4M3_MAX, MIN_SCALE
from .common import load_core_matrices, load_plane, load_tokens, padded_width, query_dot, value_dot
from .dense import fetch as fetch
from .dense import prepare as prepare
from .dense import weigh as weigh

MAX = tl.constexpr(E4M3_MAX)
SMALLEST_SCALE = tl.constexpr(MIN_SCALE)


class Params(NamedTuple):
    width: int
    padded: int
    #: whether tokens have a scale, and the byte of a page at which scales begin
    scaled: int
    scale_at: int
    planes: int = 1
    units: tuple[float, ...] = (1.0,)
    max_block: int = 256
    encode_rows: int = 32
    offset: bool = False
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False
    gathers: bool = False
    #: whether pages are in layout `core-1`, which is read only
    core_matrices: int = 0


def covers(fmt) -> bool:
    """All formats except those with a scale per block."""
    return fmt.granularity != "block"


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    """Raises `ValueError` for formats with a scale per block."""
    if not covers(fmt):
        raise ValueError(f"format {fmt.name!r} has no Triton kernels; use backend='torch' (slow reference)")
    padded, last = padded_width(head_dim), fmt.fields(head_dim, page_size, dtype)[-1]
    scaled = int(fmt.granularity == "token")
    rows, core_matrices = max(2048 // padded, 1), int(fmt.layout == LAYOUT)
    return Params(head_dim, padded, scaled, last.offset * scaled, encode_rows=rows, core_matrices=core_matrices)


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    k = load_tile(page, n0, valid, BLOCK_N, P).to(DOT)
    return query_dot(prepared[0], tl.trans(k) if T == 1 else k, None, T) * factor


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    v = load_tile(page, n0, valid, BLOCK_N, P).to(DOT)
    return (value_dot(weights.to(DOT), v if T == 1 else tl.trans(v), acc[0] * tl.expand_dims(decay, T), T),)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return load_tile(page, n0, valid, BLOCK_N, P)


@triton.jit
def load_tile(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """A tile of tokens, float32 `[BLOCK_N, padded]`; zero where not valid."""
    token = n0 + tl.arange(0, BLOCK_N)
    if P.core_matrices:
        code = load_core_matrices(page, token, valid, 16, P).to(tl.int16)
    else:
        code = load_plane(page + token * P.width, 1, valid, 0, P).to(tl.int16)
    x = from_e4m3(code)
    if P.scaled:
        scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float32)) + token, mask=valid, other=0.0)
        x = x * scale[:, None]
    return x


@triton.jit
def from_e4m3(code):
    """Codes (int16) -> float32. Sign, exponent and mantissa in the fields of float16 are the number times 2^-8, subnormals
    included."""
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _to_e4m3(x):
    """float32 -> codes, to nearest even, saturated, NaN without a sign: `formats.fp8.to_e4m3`."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # below 2^-6 steps are 2^-9: those of float32 between 2^14 and 2^15
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # exponents: 127 - 7, above 3 bits
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(large, 0x7E))
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, P.padded)[None, :]
    for t0 in range(start, stop, ROWS):
        row = t0 + tl.arange(0, ROWS)
        keep = (row < stop)[:, None] & (channel < P.width)
        x = load_tokens(source, base + row[:, None], channel, keep, HAS_ORDER, TAIL)
        store_tile(page, x, row, row < stop, channel, P)


@triton.jit
def store_tile(page, x, row, valid, channel, P: tl.constexpr):
    """Encode a tile of tokens, float32 `[ROWS, padded]`, as the page's tokens `row` `[ROWS]`. channel: `[1, padded]`."""
    if P.scaled:
        # a maximum ignores NaN, but not Inf
        largest = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), 1)
        # div_rn, because `/` on float32 is approximate on a GPU
        scale = tl.maximum(tl.math.div_rn(largest, tl.zeros_like(largest) + MAX), SMALLEST_SCALE)
        nan = tl.full(scale.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        scale = tl.where(largest < float("inf"), scale, nan)
        tl.store((page + P.scale_at).to(tl.pointer_type(tl.float32)) + row, scale, mask=valid)
        x = tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None])
    keep = valid[:, None] & (channel < P.width)
    tl.store(page + row[:, None] * P.width + channel, _to_e4m3(x), mask=keep)
