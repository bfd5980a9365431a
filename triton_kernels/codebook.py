"""Device functions of `formats.codebook`, in all its layouts. The interface is described in `registry`.

Plane `j` of a tile is channel `j` of every sub-vector. So an entry of the codebook is looked up once for all its
channels. The codebook stays in the L1 cache; decode steps copy a codebook of at most 256 entries to shared memory
(`lookup`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import fragment
from . import lookup
from .common import as_operand, load_plane, load_tokens, padded_width, query_dot, value_dot

#: sub-vectors of a token that `encode` takes at a time
ENCODE_VECTORS = 16
#: tokens whose indices are packed together
SEGMENT = tl.constexpr(32)


class Params(NamedTuple):
    dim: int
    bits: int
    #: whether `lookup` is used to attend
    gathers: bool
    #: sub-vectors of a token; words of `planes` channels of each
    vectors: int
    vector_words: int
    width: int
    padded: int
    planes: int
    units: tuple[float, ...]
    max_block: int
    #: 0: `planar-1`; 1, 2: `fragment-1`, `fragment-1t`, a lane's words in `loads` loads of `vector`
    order: int
    loads: int
    vector: int
    encode_vectors: int
    encode_rows: int = 32
    offset: bool = False
    interleaved: bool = True
    ptx: bool = False
    #: words of a table of 256 entries, and inline PTX, of `lookup`
    words: int = 0
    pairs: tuple[str, ...] = ()
    constraints: str = ""


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    count = head_dim // fmt.dim
    order = ("planar-1", *fragment.LAYOUTS).index(fmt.layout)
    loads = vector = 1
    if order:
        ((_, _, (_, loads, _, vector)),) = fmt.arrays(head_dim, page_size, dtype)
    gathers = order == 0 and fmt.bits <= lookup.MAX_BITS
    planes = lookup.planes(fmt.dim, head_dim) if gathers else fmt.dim
    width = head_dim // planes
    return Params(
        dim=fmt.dim,
        bits=fmt.bits,
        gathers=gathers,
        vectors=count,
        vector_words=fmt.dim // planes,
        width=width,
        padded=padded_width(width),
        planes=planes,
        units=(1.0,) * planes,
        max_block=page_size,
        order=order,
        loads=loads,
        vector=vector,
        encode_vectors=min(ENCODE_VECTORS, triton.next_power_of_2(count)),
        ptx=ptx,
        words=2**lookup.MAX_BITS * (fmt.dim // planes),
        pairs=lookup.pairs_asm(planes),
        constraints="=r,r,r" if planes == 2 else "=r,l,l",
    )


@triton.jit
def _indices(page, token, vector, keep, P: tl.constexpr):
    """Indices (int32) of the page's tokens and their sub-vectors; the shapes broadcast. 0 where `keep` is false."""
    words = page.to(tl.pointer_type(tl.int32))
    segment, token = token // SEGMENT, token % SEGMENT
    if P.order == 0:
        number = token
        first = (segment * P.vectors + vector) * P.bits
    elif P.order == 1:
        channel = vector * P.dim
        number = (channel // 32 * 8 + channel % 8) // P.dim * 4 + token % 4
        lane = token // 4 * 4 + channel % 32 // 8
        first = segment * (P.loads * 32 * P.vector) + lane * P.vector
    else:
        number = vector // 8 * 8 + (token >> 1 & 1) * 4 + (token & 1) * 2 + (token >> 2 & 1)
        lane = vector % 8 * 4 + token // 8
        first = segment * (P.loads * 32 * P.vector) + lane * P.vector
    bit = number * P.bits
    word, bit = bit // 32, bit % 32
    x = tl.load(words + first + _word(word, P), mask=keep, other=0).to(tl.uint32, bitcast=True) >> bit
    if 32 % P.bits:  # an index may end in the next word
        more = keep & (bit + P.bits > 32)
        above = tl.load(words + first + _word(word + 1, P), mask=more, other=0).to(tl.uint32, bitcast=True)
        x = x | (above << ((32 - bit) % 32))
    return (x & ((1 << P.bits) - 1)).to(tl.int32)


@triton.jit
def _word(word, P: tl.constexpr):
    if P.order == 0:
        return word
    else:
        return word // P.vector * (32 * P.vector) + word % P.vector


@triton.jit
def _tile(page, n0, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """Indices of a tile of tokens, `[BLOCK_N, padded]` or transposed, for every word. Indices of unused tokens are
    harmless."""
    token, vector = n0 + tl.arange(0, BLOCK_N), tl.arange(0, P.padded) // P.vector_words
    if TRANSPOSED:
        x = _indices(page, token[None, :], vector[:, None], (vector < P.vectors)[:, None] & (token >= 0)[None, :], P)
    else:
        x = _indices(page, token[:, None], vector[None, :], (vector < P.vectors)[None, :] & (token >= 0)[:, None], P)
    return x


@triton.jit
def _entries(table, index, P: tl.constexpr):
    """The entries of a tile of indices, as words of two channels, or of four."""
    if P.dim == 2:
        return (tl.load(table.to(tl.pointer_type(tl.int32)) + index),)
    elif P.dim == 4:
        return (tl.load(table.to(tl.pointer_type(tl.int64)) + index),)
    else:
        words = table.to(tl.pointer_type(tl.int64)) + 2 * index
        return (tl.load(words), tl.load(words + 1))


@triton.jit
def _plane(words, j: tl.constexpr, P: tl.constexpr):
    """Channel `j` of each entry, float16."""
    each: tl.constexpr = min(P.dim, 4)
    return (words[j // each] >> (16 * (j % each))).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def prepare(q_rows, stride, rows_valid, DOT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    out = ()
    for j in tl.static_range(P.planes):
        out = out + (as_operand(load_plane(q_rows, stride, rows_valid, j, P).to(DOT), T),)
    return out


@triton.jit
def fetch(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    return ()


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.gathers:
        s = lookup.scores(page, record, prepared, n0, DOT, BLOCK_N, T, P)
    else:
        words = _entries(record, _tile(page, n0, T == 1, BLOCK_N, P), P)
        s = query_dot(prepared[0], _plane(words, 0, P).to(DOT), None, T)
        for j in tl.static_range(1, P.planes):
            s = query_dot(prepared[j], _plane(words, j, P).to(DOT), s, T)
    return s * factor


@triton.jit
def weigh(page, fetched, s, n0, valid, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    return s, 1.0, 0.0


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    if P.gathers:
        out = lookup.add(page, record, weights, decay, acc, n0, DOT, BLOCK_N, T, P)
    else:
        words = _entries(record, _tile(page, n0, T == 0, BLOCK_N, P), P)
        p = weights.to(DOT)
        out = ()
        for j in tl.static_range(P.planes):
            out = out + (value_dot(p, _plane(words, j, P).to(DOT), acc[j] * tl.expand_dims(decay, T), T),)
    return out


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    index = _tile(page, n0, False, BLOCK_N, P)
    channel = tl.arange(0, P.padded) % P.vector_words * P.planes + j
    return tl.load(record.to(tl.pointer_type(tl.float16)) + index * P.dim + channel[None, :]).to(tl.float32)


@triton.jit
def _square(x, y, P: tl.constexpr):
    """(x - y)^2, rounded twice: it must not be fused with the following addition."""
    if P.ptx:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; sub.rn.f32 t, $1, $2; mul.rn.f32 $0, t, t; }", "=f,f,f", [x, y], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (x - y) * (x - y)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store a whole page; its token 0 has index `base`."""
    table = record.to(tl.pointer_type(tl.float16))
    words = page.to(tl.pointer_type(tl.int32))
    token = tl.arange(0, SEGMENT)
    STEPS: tl.constexpr = (P.vectors + P.encode_vectors - 1) // P.encode_vectors
    for i in range(stop // SEGMENT * STEPS):
        segment = i // STEPS
        vector = i % STEPS * P.encode_vectors + tl.arange(0, P.encode_vectors)
        index = base + segment * SEGMENT + token[:, None]
        keep = (vector < P.vectors)[None, :] & (token >= 0)[:, None]
        x = ()
        for c in tl.static_range(P.dim):
            x = x + (load_tokens(source, index, (vector * P.dim + c)[None, :], keep, HAS_ORDER, TAIL),)
        smallest = tl.full((SEGMENT, P.encode_vectors), float("inf"), tl.float32)
        code = tl.zeros((SEGMENT, P.encode_vectors), tl.int32)
        for entry in range(2**P.bits):
            distance = _square(x[0], tl.load(table + entry * P.dim).to(tl.float32), P)
            for c in tl.static_range(1, P.dim):
                distance += _square(x[c], tl.load(table + entry * P.dim + c).to(tl.float32), P)
            nearer = distance < smallest  # false for NaN
            smallest = tl.where(nearer, distance, smallest)
            code = tl.where(nearer, entry, code)
        for w in tl.static_range(P.bits):
            at = (token * P.bits - 32 * w)[:, None]
            field = tl.where(at < 0, code >> tl.minimum(-at, 31), code << (tl.maximum(at, 0) & 31))
            word = tl.sum(tl.where(at < 32, field, 0), 0)  # fields do not overlap: the sum is the union
            tl.store(words + (segment * P.vectors + vector) * P.bits + w, word, mask=vector < P.vectors)
