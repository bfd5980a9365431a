"""Device functions of `codebook.Codebook`: `encode` and `decode`, as `triton_kernels.registry` describes them."""

from typing import NamedTuple

import triton
import triton.language as tl

from hf_lowbit_kv.triton_kernels.common import load_tokens, padded_width


class Params(NamedTuple):
    pairs: int
    centroids: int
    width: int
    padded: int
    max_block: int
    encode_rows: int = 16
    planes: int = 1
    interleaved: bool = False


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    return Params(head_dim // 2, 16, head_dim, padded_width(head_dim), page_size)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    book = record.to(tl.pointer_type(tl.float32))
    pair = tl.arange(0, P.padded // 2)[None, :]
    for t0 in range(start, stop, ROWS):
        token = (t0 + tl.arange(0, ROWS))[:, None]
        keep = (token < stop) & (pair < P.pairs)
        x = load_tokens(source, base + token, 2 * pair, keep, HAS_ORDER, TAIL)
        y = load_tokens(source, base + token, 2 * pair + 1, keep, HAS_ORDER, TAIL)
        best = tl.full(x.shape, float("inf"), tl.float32)
        code = tl.zeros(x.shape, tl.int32)
        for c in range(P.centroids):
            dx, dy = x - tl.load(book + 2 * c), y - tl.load(book + 2 * c + 1)
            off = dx * dx + dy * dy
            code = tl.where(off < best, c, code)
            best = tl.minimum(off, best)
        tl.store(page + token * P.pairs + pair, code.to(tl.uint8), mask=keep)


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    book = record.to(tl.pointer_type(tl.float32))
    channel = tl.arange(0, P.padded)[None, :]
    keep = valid[:, None] & (channel < P.width)
    code = tl.load(page + (n0 + tl.arange(0, BLOCK_N))[:, None] * P.pairs + channel // 2, mask=keep, other=0)
    return tl.load(book + 2 * code.to(tl.int32) + channel % 2, mask=keep, other=0.0)
