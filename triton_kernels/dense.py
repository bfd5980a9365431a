"""Device functions of `formats.dense`: tokens in the model's dtype. The interface is described in `registry`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats.core_matrices import LAYOUT
from .common import DTYPES, as_operand, load_core_matrices, load_plane, load_tokens, padded_width, query_dot, value_dot


class Params(NamedTuple):
    dtype: tl.dtype
    width: int
    padded: int
    planes: int = 1
    units: tuple[float, ...] = (1.0,)
    max_block: int = 256
    encode_rows: int = 32
    offset: bool = False
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False
    gathers: bool = False
    #: numbers in 16 bytes of layout `core-1`, which these kernels only read; 0: token after token
    core_matrix: int = 0


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    padded = padded_width(head_dim)
    core_matrix = 16 // dtype.itemsize if fmt is not None and fmt.layout == LAYOUT else 0
    return Params(DTYPES[dtype], head_dim, padded, encode_rows=max(4096 // padded, 1), core_matrix=core_matrix)


@triton.jit
def prepare(q_rows, stride, rows_valid, DOT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    return (as_operand(load_plane(q_rows, stride, rows_valid, 0, P).to(DOT), T),)


@triton.jit
def fetch(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return ()


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    k = _load(page, n0, valid, BLOCK_N, P).to(DOT)
    return query_dot(prepared[0], tl.trans(k) if T == 1 else k, None, T) * factor


@triton.jit
def weigh(page, fetched, s, n0, valid, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    return s, 1.0, 0.0


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    v = _load(page, n0, valid, BLOCK_N, P).to(DOT)
    return (value_dot(weights.to(DOT), v if T == 1 else tl.trans(v), acc[0] * tl.expand_dims(decay, T), T),)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return _load(page, n0, valid, BLOCK_N, P).to(tl.float32)


@triton.jit
def _load(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """A tile of tokens, `[BLOCK_N, padded]`. Invalid rows become zero, because they may hold NaN."""
    token, data = n0 + tl.arange(0, BLOCK_N), page.to(tl.pointer_type(P.dtype))
    if P.core_matrix:
        x = load_core_matrices(data, token, valid, P.core_matrix, P)
    else:
        x = load_plane(data + token * P.width, 1, valid, 0, P)
    return x


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, P.padded)[None, :]
    target = page.to(tl.pointer_type(P.dtype))
    for t0 in range(start, stop, ROWS):
        token = (t0 + tl.arange(0, ROWS))[:, None]
        keep = (token < stop) & (channel < P.width)
        x = load_tokens(source, base + token, channel, keep, HAS_ORDER, TAIL)
        tl.store(target + token * P.width + channel, x.to(P.dtype), mask=keep)
