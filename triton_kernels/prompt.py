"""Attention of many query tokens to all stored tokens and, causally, to each other.

Decoding a page for every tile of query rows would cost more than the products. So `read.unpack` writes the row, stored
tokens first and then the new ones, to a temporary 16-bit buffer. The buffer has a bounded size (`config.BUFFER_BYTES`), so a
long row is written in *stretches*, one after the other. An ordinary attention reads the buffer. From one stretch to the
next each query row carries its output so far and the log-sum-exp of its scores. If these do not fit into
`config.CARRY_BYTES`, the queries are divided, and each part unpacks the row again.

This file does not depend on formats. It also supports latents (MLA; SHARED in kernels): the first stream is both the values
and the first channels of the keys, and the second stream is the remaining channels of the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..storage.paged_store import PagedStore
from ..storage.step import StepInputs
from .attend import _capped, merge_kernel
from .common import LOG2E, LOWEST, cdiv, dot_type, next_power_of_2, padded_width
from .common import launch as _launch
from .config import (
    BUFFER_BYTES,
    CARRY_BYTES,
    MERGE_CHANNELS,
    MERGE_SPLITS,
    PromptConfig,
    processors,
    prompt_config,
    split_count,
)
from .read import NewTokens, unpack


@triton.jit
def _load(rows, valid, D: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Load channels of tokens: pointers `[N]` -> `[N, PADDED]`; zero where not valid."""
    channel = tl.arange(0, PADDED)[None, :]
    if MASKED:
        x = tl.load(rows[:, None] + channel, mask=valid[:, None] & (channel < D), other=0.0)
    elif D != PADDED:
        x = tl.load(rows[:, None] + channel, mask=channel < D, other=0.0)
    else:
        x = tl.load(rows[:, None] + channel)
    return x


@triton.jit
def _walk_buffer(
    carried, q, more, keys, values, start, stop, last, factor, score_bias, softcap,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, DOT: tl.constexpr,
    SHARED: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to tokens `start` to `stop` of the buffer. Returns `carried` with these tokens: running maximum `[M]`, sum of
    weights `[M]`, weighted sum of values `[M, DV]`.

    MASKED: each query row attends up to its token `last` `[M]`. Otherwise to all, in whole tiles.
    SHARED: `q` has the queries' channels for the first stream, `more` those for the second.
    HAS_SCORE_BIAS: `score_bias` `[M]` is added to all products of a row (`StepInputs.score_bias`).
    factor, above 0: product times `factor` is a score to base 2. With HAS_SOFTCAP it is a natural score, before the softcap.
    """
    m, l, acc = carried
    for n0 in range(start, stop, BLOCK_N):
        index = n0 + tl.arange(0, BLOCK_N)
        valid = index < stop
        k = _load(keys + index * DK, valid, DK, DK_PADDED, MASKED).to(DOT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = k
        if SHARED:
            rest = _load(values + index * DV, valid, DV, DV_PADDED, MASKED).to(DOT)
            s = tl.dot(more, tl.trans(rest), s, input_precision="ieee")
        if HAS_SCORE_BIAS:
            s += score_bias[:, None]
        scale = factor
        if HAS_SOFTCAP:
            s = _capped(s * factor, softcap, True)
            scale = 1.0
        if MASKED:
            s = tl.where(valid[None, :] & (index[None, :] <= last[:, None]), s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * scale)
        weights = tl.exp2(s * scale - new_m[:, None])
        decay = tl.exp2(m - new_m)
        l = l * decay + tl.sum(weights, 1)
        if not SHARED:
            v = _load(values + index * DV, valid, DV, DV_PADDED, MASKED).to(DOT)
        acc = tl.dot(weights.to(DOT), v, acc * decay[:, None], input_precision="ieee")
        m = new_m
    return m, l, acc


@triton.jit(do_not_specialize=["position_stride_b", "tokens", "before", "first", "count", "splits", "final"])
def prompt_kernel(
    q, keys, values, position, sinks, score_bias, length, partial, lse, out,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, position_stride_b,
    bias_stride_b, bias_stride_h, heads, tokens, before, first, count, splits, final, scaling, softcap,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attend to one stretch. Grid (sequence * KV head, split, block of BLOCK_M query rows). A KV head has `tokens` times
    GROUPS query rows.

    keys, values: tokens `first` to `first + count` of every sequence, `[B, H, count, D]`. SHARED: queries have channels for
    both streams, and keys serve as values.
    before: number of new tokens before the first query. New tokens follow the `length` stored ones.
    HAS_POSITION: the new tokens have padding; `position` `[B, tokens]` counts the real tokens before each query.
    final: divide, add sink logits, and write out `[B, tokens, H * GROUPS, DO]`, where DO is DV, or DK if SHARED. Otherwise
    results go to partial, float32 `[B * H, splits, GROUPS * tokens, DO]`, and log-sum-exps to base 2 to lse, the same
    shape without DO.
    """
    DO: tl.constexpr = DK if SHARED else DV
    DO_PADDED: tl.constexpr = DK_PADDED if SHARED else DV_PADDED
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    split = tl.program_id(1)
    # the last query rows come first: they attend to most tokens and take longest
    row = (tl.num_programs(2) - 1 - tl.program_id(2)) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_valid = row < GROUPS * tokens
    token, group = tl.minimum(row // GROUPS, tokens - 1), row % GROUPS
    q_head = h * GROUPS + group
    number = before + token
    if HAS_POSITION:
        number = tl.load(position + b * position_stride_b + token)
    last = tl.load(length + bh) + number - first  # the last token of this stretch that a query attends to
    full_end = tl.maximum(tl.minimum(tl.min(last, 0) + 1, count), 0) // BLOCK_N * BLOCK_N
    end = tl.maximum(tl.minimum(tl.max(last, 0) + 1, count), 0)
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    start = (tiles * split // splits) * BLOCK_N
    stop = tl.minimum((tiles * (split + 1) // splits) * BLOCK_N, end)
    if (first == 0) | (final != 0) | (start < stop):
        carry = (bh * splits + split) * (GROUPS * tokens) + row
        channel = tl.arange(0, DO_PADDED)
        keep = rows_valid[:, None] & (channel < DO)[None, :]
        # the result so far acts as one token: its value is the output, its score the log-sum-exp
        has_carry = row < tl.where(first > 0, GROUPS * tokens, 0)
        m = tl.load(lse + carry, mask=has_carry, other=float("-inf"))
        l = tl.where(m == float("-inf"), 0.0, 1.0)
        m = tl.maximum(m, LOWEST)
        acc = tl.load(partial + carry[:, None] * DO + channel[None, :], mask=keep & has_carry[:, None], other=0.0)
        factor = scaling if HAS_SOFTCAP else scaling * LOG2E
        q_rows = q + b * q_stride_b + q_head * q_stride_h + token.to(tl.int64) * q_stride_s
        q_channel = tl.arange(0, DK_PADDED)[None, :]
        queries = tl.load(
            q_rows[:, None] + q_channel * q_stride_d, mask=rows_valid[:, None] & (q_channel < DK), other=0.0
        ).to(DOT)
        more = queries
        if SHARED:
            rest = tl.arange(0, DV_PADDED)[None, :]
            more = tl.load(
                q_rows[:, None] + (DK + rest) * q_stride_d, mask=rows_valid[:, None] & (rest < DV), other=0.0
            ).to(DOT)
        added = tl.zeros((BLOCK_M,), tl.float32)
        if HAS_SCORE_BIAS:
            pointers = score_bias + b * bias_stride_b + q_head * bias_stride_h + token
            added = tl.load(pointers, mask=rows_valid, other=0.0)
        keys += bh * count * DK
        values += bh * count * DV
        middle = tl.maximum(tl.minimum(full_end, stop), start)
        m, l, acc = _walk_buffer(
            (m, l, acc), queries, more, keys, values, start, middle, last, factor, added, softcap,
            DK, DV, DK_PADDED, DV_PADDED, DOT, SHARED, HAS_SCORE_BIAS, HAS_SOFTCAP, BLOCK_N, False,
        )  # fmt: skip
        m, l, acc = _walk_buffer(
            (m, l, acc), queries, more, keys, values, middle, stop, last, factor, added, softcap,
            DK, DV, DK_PADDED, DV_PADDED, DOT, SHARED, HAS_SCORE_BIAS, HAS_SOFTCAP, BLOCK_N, True,
        )  # fmt: skip
        if final != 0:
            if HAS_SINKS:
                logit = tl.load(sinks + q_head, mask=rows_valid, other=0.0).to(tl.float32) * LOG2E
                new_m = tl.maximum(m, logit)
                decay = tl.exp2(m - new_m)
                l = l * decay + tl.exp2(logit - new_m)
                acc = acc * decay[:, None]
            x = acc / tl.where(l > 0, l, 1.0)[:, None]  # rows without any token get zeros
            rows = out + ((b * tokens + token) * (heads * GROUPS) + q_head) * DO
            tl.store(rows[:, None] + channel[None, :], x.to(out.dtype.element_ty), mask=keep)
        else:
            total = tl.where(l > 0, l, 1.0)
            tl.store(partial + carry[:, None] * DO + channel[None, :], acc / total[:, None], mask=keep)
            tl.store(lse + carry, tl.where(l > 0, m + tl.log2(total), float("-inf")), mask=rows_valid)


def attend(inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """`Operations.attend` for transformed inputs with many query rows. It does not wait for the GPU."""
    (q, k, v, mask, scaling), state, spec = (inputs.queries, *inputs[1:5]), store.state, store.spec
    score_bias = inputs.score_bias
    batch, q_heads, tokens, _ = q.shape
    heads, head_dim_k, head_dim_v = k.shape[1], k.shape[-1], v.shape[-1]
    if scaling <= 0:  # the kernel takes the maximum before it scales
        q, scaling, score_bias = q * scaling, 1.0, None if score_bias is None else score_bias * scaling
    order = real = position = None
    if mask is not None:
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True).to(torch.int32)
        position = mask.cumsum(1, dtype=torch.int32) - 1
        real = position[:, -1] + 1
    capacity = spec.room(state.page_address.shape[1])
    history = capacity if inputs.seen is None else min(capacity, inputs.seen)
    width = spec.attention_kind.widths(head_dim_k, head_dim_v)[1]
    out = q.new_empty(batch, tokens, q_heads, width)
    total = history + tokens
    token_bytes = heads * (head_dim_k + head_dim_v) * q.element_size()
    # several sequences at a time if the buffer has room; otherwise one at a time, in stretches if necessary
    max_sequences = min(max(BUFFER_BYTES // (token_bytes * total), 1), batch)
    max_stretch = total if token_bytes * total <= BUFFER_BYTES else max(BUFFER_BYTES // token_bytes // 128 * 128, 128)
    buffer = q.new_empty(max_sequences * max_stretch * heads * (head_dim_k + head_dim_v))
    max_queries = tokens
    if max_stretch < total:  # results are carried from stretch to stretch
        max_queries = min(max(CARRY_BYTES // (q_heads * (width + 1) * 4), 1), tokens)
    for low in range(0, batch, max_sequences):
        rows = slice(low, min(low + max_sequences, batch))
        sequences = rows.stop - low
        group, new = store, NewTokens(k, v, order, real)
        if sequences < batch:
            group = store.rows(rows)
            new = NewTokens(k[rows], v[rows], *(None if x is None else x[rows] for x in (order, real)))
        for start in range(0, tokens, max_queries):
            stop = min(start + max_queries, tokens)
            added = None if score_bias is None else score_bias[rows, :, start:stop]
            query_chunk = inputs._replace(q=q[rows, :, start:stop], scaling=scaling, score_bias=added)
            positions = None if position is None else position[rows, start:stop]
            queries = _Queries(query_chunk, positions, start, group, out[rows, start:stop])
            for first in range(0, history + stop, max_stretch):
                length = min(max_stretch, history + stop - first)
                split_at = sequences * heads * length * head_dim_k
                end = split_at + sequences * heads * length * head_dim_v
                keys = buffer[:split_at].view(sequences, heads, length, head_dim_k)
                values = buffer[split_at:end].view(sequences, heads, length, head_dim_v)
                unpack(group, (keys, values), first, new)
                queries.attend(keys, values, first, first + length == history + stop)
    return out


class _Queries:
    """Consecutive query tokens, which attend to one stretch after the other.

    inputs: q `[B, Hq, S, D]` are these queries. position `[B, S]`: with padding, the number of real tokens before
    each. before: the number of new tokens before them. out: `[B, S, Hq, Dv]`.
    """

    def __init__(
        self, inputs: StepInputs, position: torch.Tensor | None, before: int, store: PagedStore, out: torch.Tensor
    ):
        q, state = inputs.queries, store.state
        self.q, self.sinks, self.scaling, self.softcap = q, inputs.sinks, inputs.scaling, inputs.softcap
        self.score_bias = inputs.score_bias
        self.position, self.before, self.state, self.out = position, before, state, out
        self.shared = store.spec.attention_kind.shares_values
        self.batch, self.heads = state.length.shape
        self.groups = q.shape[1] // self.heads
        self.rows = self.groups * q.shape[2]
        self.config: PromptConfig
        self.splits = 0  # 0: not started
        self.partial = self.lse = q.new_empty(1, dtype=torch.float32)  # unused if no results are carried

    def _begin(self, length: int, final: bool) -> None:
        """Choose the configuration of all launches by the first stretch, which is the longest."""
        programs = self.batch * self.heads
        widest = max(self.q.shape[-1], self.out.shape[-1])
        self.config = prompt_config(self.rows, programs, widest, self.q.dtype == torch.float32, self.q.device)
        programs *= cdiv(self.rows, self.config.block_m)
        target_programs = self.config.programs * processors(self.q.device)
        self.splits = split_count(programs, cdiv(length, 256), target_programs)
        if self.splits > 1 or not final:
            sizes = self.batch * self.heads, self.splits, self.rows
            self.partial = self.q.new_empty(*sizes, self.out.shape[-1], dtype=torch.float32)
            self.lse = self.q.new_empty(*sizes, dtype=torch.float32)

    def attend(self, keys: torch.Tensor, values: torch.Tensor, first: int, final: bool) -> None:
        """Attend to the stretch that begins at token `first`, `[B, H, count, D]`. final: it is the last one, and writes
        `out`."""
        if self.splits == 0:
            self._begin(keys.shape[2], final)
        config, q, out = self.config, self.q, self.out
        head_dim_k, head_dim_v = keys.shape[-1], values.shape[-1]
        sinks, score_bias = (q if x is None else x for x in (self.sinks, self.score_bias))
        _launch(
            prompt_kernel,
            (self.batch * self.heads, self.splits, cdiv(self.rows, config.block_m)),
            *(q, keys, values, self.state.length if self.position is None else self.position, sinks, score_bias),
            self.state.length,
            *(self.partial, self.lse, out, *q.stride(), 0 if self.position is None else self.position.stride(0)),
            *score_bias.stride()[:2],
            *(self.heads, q.shape[2], self.before, first, keys.shape[2], self.splits, int(final and self.splits == 1)),
            *(self.scaling, 1.0 if self.softcap is None else self.softcap),
            device=q.device,
            DK=head_dim_k,
            DV=head_dim_v,
            DK_PADDED=padded_width(head_dim_k),
            DV_PADDED=padded_width(head_dim_v),
            GROUPS=self.groups,
            HAS_POSITION=self.position is not None,
            HAS_SINKS=self.sinks is not None,
            HAS_SCORE_BIAS=self.score_bias is not None,
            HAS_SOFTCAP=self.softcap is not None,
            DOT=dot_type(q.dtype),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SHARED=self.shared,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if final and self.splits > 1:
            _launch(
                merge_kernel,
                (self.batch * self.heads, self.rows, cdiv(out.shape[-1], MERGE_CHANNELS)),
                *(self.partial, self.lse, sinks, out, self.heads, self.rows, self.splits),
                device=q.device,
                DV=out.shape[-1],
                GROUPS=self.groups,
                HAS_SINKS=self.sinks is not None,
                BLOCK=min(next_power_of_2(self.splits), MERGE_SPLITS),
                CHANNELS=MERGE_CHANNELS,
                PDL=False,
                num_warps=4,
            )
