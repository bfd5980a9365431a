"""Products with codebooks of up to 256 entries: a faster path of `codebook` for decode steps.

A number of 32 bits is loaded once. It holds a sub-vector's indices of four neighbouring tokens. One `tl.gather` looks up
all indices of a tile: it stores the codebook in shared memory, in every tile, and reads the entries there. Entries in
L1 would cost a cache line for nearly every lane.

Tensor cores use entries in place, because the indices are loaded in the order of an operand
(`_positions`). Another order would give the same result, but Triton would move entries between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import padded_width, query_dot, value_dot

#: largest number of bits of an index: four indices must fit into a number, and the codebook into the registers of two
#: warps
MAX_BITS = 8


def planes(dim: int, head_dim: int) -> int:
    """The number of channels per look-up: a word of 32 or 64 bits. Two warps need at least 32 words per token; otherwise both
    would compute the same product."""
    max_planes = min(dim, 4)
    return max_planes if padded_width(head_dim // max_planes) >= 32 else 2


def pairs_asm(planes: int) -> tuple[str, ...]:
    """For each plane, PTX that extracts its channels from two words. ptxas would shift both words first."""
    orders = ("0x5410", "0x7632")
    if planes == 2:
        return tuple(f"prmt.b32 $0, $1, $2, {order};" for order in orders)
    halves = "{ .reg .b32 a<2>, b<2>; mov.b64 {a0, a1}, $1; mov.b64 {b0, b1}, $2; "
    return tuple(halves + f"prmt.b32 $0, a{half}, b{half}, {order}; }}" for half in range(2) for order in orders)


@triton.jit
def _positions(R: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr):
    """Row and column of each number of a tile `[R, C]`, int32 `[R * C]`, in the order that `_tile` expects.

    Neighbouring threads get neighbouring numbers of a one-dimensional tensor. As in the left operand of a product, lane
    `4 g + t` holds rows `g` and `g + 8`, and RUN columns from `RUN * t` on. The second warp holds the next 16 rows.
    """
    WARPS: tl.constexpr = 2 if R >= 32 else 1
    position = tl.arange(0, R * C)
    t, g, warp = position % 4, position // 4 % 8, position // 32 % WARPS
    position = position // (32 * WARPS)
    run, below, rest = position % RUN, position // RUN % 2, position // (2 * RUN)
    ACROSS: tl.constexpr = C // (4 * RUN)
    return rest // ACROSS * (16 * WARPS) + warp * 16 + below * 8 + g, rest % ACROSS * (4 * RUN) + t * RUN + run


@triton.jit
def _tile(x, R: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr):
    """Numbers in the order of `_positions` as `[R, C]`."""
    WARPS: tl.constexpr = 2 if R >= 32 else 1
    x = tl.reshape(x, (R // (16 * WARPS), C // (4 * RUN), 2, RUN, WARPS, 8, 4))
    return tl.reshape(tl.permute(x, (0, 4, 2, 5, 1, 6, 3)), (R, C))


@triton.jit
def _packed(page, token, vector, COUNT: tl.constexpr, P: tl.constexpr):
    """Numbers that hold the indices of COUNT tokens, from `token`, a multiple of COUNT, on."""
    # a sub-vector's indices for 32 tokens are a stream of `bits` words (`formats.codebook`)
    first = (token // 32 * P.vectors + vector) * P.bits
    bit = token % 32 * P.bits
    words = page.to(tl.pointer_type(tl.int32)) + first + bit // 32
    keep = vector < P.vectors
    bit = bit % 32
    x = tl.load(words, mask=keep, other=0)
    if 32 % (COUNT * P.bits):  # a number may end in the next word
        above = tl.load(words + 1, mask=keep & (bit + COUNT * P.bits > 32), other=0)
        x = (x.to(tl.uint32, bitcast=True) >> bit).to(tl.int32, bitcast=True) | (above << ((32 - bit) % 32))
    elif COUNT * P.bits < 32:
        x = x >> bit
    return x


@triton.jit
def _table(record, TYPE: tl.constexpr, P: tl.constexpr):
    """The codebook as words of `planes` channels, int32 or int64, padded with zeros to 256 entries. Triton would gather
    from a smaller table by shuffles."""
    WORD: tl.constexpr = tl.int32 if P.planes == 2 else tl.int64
    number = tl.arange(0, P.words)
    keep = number < P.vector_words << P.bits
    if TYPE == tl.float16:
        table = tl.load(record.to(tl.pointer_type(WORD)) + number, mask=keep, other=0)
    else:
        table = tl.zeros((P.words,), WORD)
        for j in tl.static_range(P.planes):
            x = tl.load(record.to(tl.pointer_type(tl.float16)) + number * P.planes + j, mask=keep, other=0.0)
            table = table | (x.to(TYPE).to(tl.uint16, bitcast=True).to(WORD) << (16 * j))
    return table


@triton.jit
def _entries(
    page, record, n0, VECTORS_FIRST: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """A tuple of words of a tile of `COUNT * N` tokens. The `i`-th has the words of tokens `i`, `i + COUNT`, ..., `[N,
    padded]` or transposed."""
    # after `_in_order` Triton gives a lane four neighbouring tokens
    RUN: tl.constexpr = 4 if VECTORS_FIRST else 2
    R: tl.constexpr = P.padded if VECTORS_FIRST else N
    C: tl.constexpr = N if VECTORS_FIRST else P.padded
    if VECTORS_FIRST:
        vector, token = _positions(R, C, RUN)
    else:
        token, vector = _positions(R, C, RUN)
    x = _packed(page, n0 + token * COUNT, vector // P.vector_words, COUNT, P)
    table, vector_word = _table(record, TYPE, P), vector % P.vector_words
    indices = ()
    for i in tl.static_range(COUNT):
        indices = indices + (((x >> (i * P.bits)) & ((1 << P.bits) - 1)) * P.vector_words + vector_word,)
    if COUNT == 1:
        entries = (tl.gather(table, indices[0], 0),)
    else:
        entries = tl.gather(table, tl.reshape(_joined(indices, COUNT), (COUNT * R * C,)), 0)
        entries = _separate(tl.reshape(entries, (R * C, 2) if COUNT == 2 else (R * C, 2, 2)), COUNT)
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (_tile(entries[i], R, C, RUN),)
    return out


@triton.jit
def _joined(tensors, COUNT: tl.constexpr):
    """Join 2 or 4 tensors, in order, along new last axes of size 2."""
    if COUNT == 2:
        x = tl.join(tensors[0], tensors[1])
    else:
        x = tl.join(tl.join(tensors[0], tensors[2]), tl.join(tensors[1], tensors[3]))
    return x


@triton.jit
def _separate(x, COUNT: tl.constexpr):
    """Undo `_joined`."""
    if COUNT == 2:
        tensors = tl.split(x)
    else:
        even, odd = tl.split(x)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        tensors = (a, b, c, d)
    return tensors


@triton.jit
def _plane(words, j: tl.constexpr, TYPE: tl.constexpr, P: tl.constexpr):
    """Channel `j` of each word."""
    if P.ptx:
        x = tl.inline_asm_elementwise(P.pairs[j], P.constraints, [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        x = (words >> (16 * j)).to(tl.int16)
    return x.to(TYPE, bitcast=True)


@triton.jit
def scores(
    page, record, prepared, n0, DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """COUNT products of a tile of keys with the queries. Each has at least 32 tokens, because two warps share 32 rows."""
    COUNT: tl.constexpr = min(4, BLOCK_N // 32)
    TYPE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float16
    words = _entries(page, record, n0, T == 1, COUNT, BLOCK_N // COUNT, TYPE, P)
    tensors = ()
    for i in tl.static_range(COUNT):
        s = query_dot(prepared[0], _plane(words[i], 0, TYPE, P).to(DOT), None, T)
        for j in tl.static_range(1, P.planes):
            s = query_dot(prepared[j], _plane(words[i], j, TYPE, P).to(DOT), s, T)
        tensors = tensors + (s,)
    return _in_order(tensors, COUNT, T)


@triton.jit
def _in_order(tensors, COUNT: tl.constexpr, T: tl.constexpr):
    """Join the scores of tokens `i`, `i + COUNT`, ... for all `i`, in the order of tokens."""
    A: tl.constexpr = tensors[0].shape[0]
    B: tl.constexpr = tensors[0].shape[1]
    if COUNT == 1:
        s = tensors[0]
    elif T == 1:
        s = tl.reshape(_joined(tensors, COUNT), (A, COUNT * B))
    else:
        s = tl.permute(_joined(tensors, COUNT), (0, 2, 1) if COUNT == 2 else (0, 2, 3, 1))
        s = tl.reshape(s, (COUNT * A, B))
    return s


@triton.jit
def _apart(weights, COUNT: tl.constexpr, T: tl.constexpr):
    """Split the weights of all tokens into a tuple: the `i`-th has those of tokens `i`, `i + COUNT`, ..."""
    A: tl.constexpr = weights.shape[0]
    B: tl.constexpr = weights.shape[1]
    if COUNT == 1:
        tensors = (weights,)
    elif T == 1:
        tensors = _separate(tl.reshape(weights, (A, B // 2, 2) if COUNT == 2 else (A, B // 4, 2, 2)), COUNT)
    else:
        x = tl.reshape(weights, (A // 2, 2, B) if COUNT == 2 else (A // 4, 2, 2, B))
        tensors = _separate(tl.permute(x, (0, 2, 1) if COUNT == 2 else (0, 3, 1, 2)), COUNT)
    return tensors


@triton.jit
def add(
    page, record, weights, decay, acc, n0, DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """`acc * decay` plus a tile of weighted values."""
    COUNT: tl.constexpr = min(4, BLOCK_N // 32)
    TYPE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float16
    # weights first: their registers are reused by the entries
    tensors = _apart(weights.to(DOT), COUNT, T)
    out = ()
    for j in tl.static_range(P.planes):
        out = out + (acc[j] * tl.expand_dims(decay, T),)
    words = _entries(page, record, n0, T == 0, COUNT, BLOCK_N // COUNT, TYPE, P)
    for i in tl.static_range(COUNT):
        sums = ()
        for j in tl.static_range(P.planes):
            sums = sums + (value_dot(tensors[i], _plane(words[i], j, TYPE, P).to(DOT), out[j], T),)
        out = sums
    return out
