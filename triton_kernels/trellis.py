"""Device functions of `formats.trellis`, as `registry` describes them. Pages are in the order of the CUDA kernels.

To read a number, the kernel loads its own word and the words with the path bits of the three steps before it. To pack, it
searches all chains of 128 tokens in parallel. The eight states have their own axis, whose second half has the states with the
top bit.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..formats.trellis import CHAIN_TOKENS, FARTHEST, STATES, TWO_FIELDS, Trellis
from . import static, static_fragment
from .boosted import _squared
from .common import load_tokens, value_dot
from .dense import fetch as fetch
from .dense import weigh as weigh
from .static_fragment import _load

HALF_STATES = tl.constexpr(STATES // 2)
LIMIT = tl.constexpr(FARTHEST)

_FIELDS = (
    *static_fragment.Params._fields,
    # of a chain: tokens, fields of a word, steps; the number of chains of these tokens, and of those of a lane
    *("chain_tokens", "fields", "steps", "chains", "each"),
)
Params = namedtuple("Params", _FIELDS)


def params(fmt: Trellis, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    tokens, fields = min(page_size, CHAIN_TOKENS), 2 if head_dim <= TWO_FIELDS else 1
    return Params(
        *static_fragment.params(fmt, head_dim, page_size, dtype, ptx),
        chain_tokens=tokens,
        fields=fields,
        steps=tokens // 32 * (head_dim // 16) * fields,
        chains=512 // fields,
        each=16 // fields,
    )


@triton.jit
def _path(page, segment, lane, field, step, keep, P: tl.constexpr):
    """Path bits of one step of the chains that begin in this segment of 32 tokens; 0 before the first step.
    field: the first field of each chain."""
    word = step // P.fields
    token = 32 * (segment + word // P.lane_words)
    bit = 2 * (field + step % P.fields)
    return _load(page, token, lane, word % P.lane_words, bit, keep & (step >= 0), P) & 1


@triton.jit
def _levels(page, token, channel, keep, P: tl.constexpr):
    """Levels of tokens `[N, 1]` and channels `[1, padded]`, int32."""
    tile, lane, column = static_fragment.value_position(token, channel, P)
    field = 8 * (column & 1) + 4 * ((channel >> 1) & 1) + 2 * ((token >> 1) & 1) + (token & 1)
    code = _load(page, token, lane, tile, 2 * field, keep, P) & 3
    first = token // P.chain_tokens * (P.chain_tokens // 32)
    step = ((token // 32 - first) * P.lane_words + tile) * P.fields + field % P.fields
    begin = field // P.fields * P.fields
    one = _path(page, first, lane, begin, step - 1, keep, P)
    two = _path(page, first, lane, begin, step - 2, keep, P)
    three = _path(page, first, lane, begin, step - 3, keep, P)
    return 2 * (code ^ one ^ three) + two


@triton.jit
def _tile(page, record, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """A tile of tokens, float32 `[BLOCK_N, padded]`; 0 where not valid."""
    token, channel = (n0 + tl.arange(0, BLOCK_N))[:, None], tl.arange(0, P.padded)[None, :]
    level = _levels(page, token, channel, valid[:, None] & (channel < P.width), P)
    # `numbers` expects codes of 2 bits, with the middle 3 / 2; the middle of levels is 7 / 2
    return static.numbers(page, record, (level - 2).to(tl.float32), token, valid, channel, P)


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
def _nearest(x, lowest, P: tl.constexpr):
    """Compare the levels `lowest` `[4, 1]` with those four above. Returns whether the upper one is nearer to x `[1, n]`,
    and the square of the distance to the nearer one."""
    off = x - (lowest.to(tl.float32) - 3.5)
    upper = off > 2.0
    return upper.to(tl.int32), _squared(tl.where(upper, off - 4.0, off), P)


@triton.jit
def _halves(x):
    """Splits `[8, n]` into the states without and with the top bit, `[4, n]` each."""
    n: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (2, HALF_STATES, n)), (1, 2, 0)))


@triton.jit
def _joined(even, odd):
    """Joins the states with path bit 0 and those with path bit 1, `[4, n]` each, to `[8, n]`."""
    n: tl.constexpr = even.shape[1]
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (2 * HALF_STATES, n))


@triton.jit
def _number(record, source, base, scales, token, channel, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr):
    """The numbers of tokens and channels `[n]`, in half steps, float32 `[n]`. scales: those of the page's tokens."""
    parameters = record.to(tl.pointer_type(tl.float32))
    x = load_tokens(source, base + token, channel, token >= 0, HAS_ORDER, TAIL)
    x = tl.math.div_rn(x - tl.load(parameters + channel), tl.load(parameters + P.head_dim + channel))
    x = 2.0 * tl.math.div_rn(x, tl.gather(scales, token, 0))
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store a whole page; its token 0 has index `base`."""
    number, channels = tl.arange(0, P.page_size), tl.arange(0, P.padded)[None, :]
    keep = channels < P.width
    rest, _ = static._rest(record, source, (base + number)[:, None], channels, keep, HAS_ORDER, TAIL, P)
    k = static._scales(tl.where(keep, rest, 0.0), P)
    pairs = tl.reshape(k, (P.page_size // 2, 2)) << (tl.arange(0, 2) * 4)[None, :]
    tl.store(page + P.scale_at + tl.arange(0, P.page_size // 2), tl.sum(pairs, 1).to(tl.uint8))
    scales = tl.reshape(static._power(k + static.LOWEST), (P.page_size,))
    for index in range(P.page_size // P.chain_tokens):
        _encode_chains(page, record, source, base, scales, index * P.chain_tokens, HAS_ORDER, TAIL, P)


@triton.jit
def _encode_chains(
    page, record, source, base, scales, first, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr
):
    """The words of the chains that begin at token `first` of the page."""
    chain = tl.arange(0, P.chains)
    lane, begin = chain // P.each, chain % P.each * P.fields
    row = lane >> 2
    # the number of a state is 2 a + its path bit; the levels of a way into it begin at `lowest` or at `lowest ^ 2`
    a = tl.arange(0, HALF_STATES)[:, None]
    lowest = 2 * (a & 1) + ((a >> 1) & 1)
    state = tl.arange(0, 2 * HALF_STATES)[:, None] + tl.zeros((1, P.chains), tl.int32)
    cost = tl.where(state == 0, 0.0, float("inf"))
    own, upper = state.to(tl.int64) * 0, state.to(tl.int64) * 0
    for t in range(P.steps):
        field, word = begin + t % P.fields, t // P.fields % P.lane_words
        token = first + t // P.fields // P.lane_words * 32
        token += 4 * (2 * (lane & 3) + (field >> 3)) + 2 * ((field >> 1) & 1) + (field & 1)
        half = (field >> 2) & 1
        whole = word // 2 * 32 + 8 * (row >> 1) + 4 * (word & 1) + 2 * half + (row & 1)
        left = P.head_dim // 32 * 32 + 4 * (row >> 1) + 2 * half + (row & 1)
        channel = tl.where(word < P.head_dim // 32 * 2, whole, left)
        x = _number(record, source, base, scales, token, channel, HAS_ORDER, TAIL, P)[None, :]
        upper_a, square_a = _nearest(x, lowest, P)
        upper_b, square_b = _nearest(x, lowest ^ 2, P)
        low, high = _halves(cost)
        low_own, high_own = _halves(own)
        low_upper, high_upper = _halves(upper)
        # path bit 0: levels begin at `lowest` from state a, at `lowest ^ 2` from a + 4; path bit 1: vice versa
        way_0, way_1 = high + square_b < low + square_a, high + square_a < low + square_b
        cost = _joined(
            tl.where(way_0, high + square_b, low + square_a), tl.where(way_1, high + square_a, low + square_b)
        )
        own = _joined(tl.where(way_0, high_own, low_own) * 2, tl.where(way_1, high_own, low_own) * 2 + 1)
        upper = _joined(
            tl.where(way_0, high_upper, low_upper) * 2 + tl.where(way_0, upper_b, upper_a),
            tl.where(way_1, high_upper, low_upper) * 2 + tl.where(way_1, upper_a, upper_b),
        )
    best = tl.argmin(cost, 0, tie_break_left=True)[None, :]
    own = tl.sum(tl.where(state == best, own, 0), 0)
    upper = tl.sum(tl.where(state == best, upper, 0), 0)
    target = page.to(tl.pointer_type(tl.int32)) + first // 32 * P.lane_words * 32
    owner = tl.arange(0, 32)
    for word in range(P.steps // P.fields):
        value = tl.zeros((P.chains,), tl.int32)
        for f in tl.static_range(P.fields):
            at = P.steps - 1 - (word * P.fields + f)
            code = ((upper >> at) & 1) * 2 + ((own >> at) & 1)
            value += code.to(tl.int32) << (2 * (begin + f))
        value = tl.sum(tl.reshape(value, (32, P.each)), 1)
        tl.store(target + word // P.vector * P.vector * 32 + owner * P.vector + word % P.vector, value)
