"""The attend kernel: one template for every pair of formats, for decode and several query tokens (`prompt` takes many).

Rows of a tile are the query heads of one KV head times query tokens (token-major). For each row the loop carries:

- `m`, the running maximum of the scores, in binary logarithms;
- `l`, the sum of weights;
- `z`, an offset common to all channels;
- `acc`, the accumulator: one tensor `[M, padded]` for each plane of the value format, in that format's units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, LOWEST, as_operand, load_plane, plane_channels, query_dot, value_dot


@triton.jit
def _capped(s, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in binary logarithms. With a softcap they come in natural logarithms, without it they are binary already."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        power = tl.exp2(tl.minimum(s * (2.0 * LOG2E / softcap), 100.0))
        s = softcap * LOG2E * (1.0 - 2.0 / (power + 1.0))
    return s


@triton.jit
def _start(BLOCK_M: tl.constexpr, T: tl.constexpr, VP: tl.constexpr):
    acc = ()
    for _ in tl.static_range(VP.planes):
        if T == 1:
            acc = acc + (tl.zeros((BLOCK_M, VP.padded), tl.float32),)
        else:
            acc = acc + (tl.zeros((VP.padded, BLOCK_M), tl.float32),)
    return (
        tl.full((BLOCK_M,), LOWEST, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        acc,
    )


@triton.jit
def _walk_pages(
    carried, q_rows, q_stride_d, rows_valid, pool, table, head_offset, record_k, record_v, first, last, paged, factor,
    score_bias, softcap, PREPARE: tl.constexpr, FETCH_K: tl.constexpr, FETCH_V: tl.constexpr, SCORES: tl.constexpr, WEIGH:
    tl.constexpr,
    ADD: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, VALUE_AT: tl.constexpr, PAGE: tl.constexpr,
    OPEN_PAGES: tl.constexpr, DOT: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEFER: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attend to pages `first` to `last` of a row.

    score_bias `[M]`: HAS_SCORE_BIAS: added to the scores of each row.
    table: the row's page addresses. head_offset: bytes from a page's start to this head's data. record_k, record_v: the
    KV head's parameters. DEFER: sum `l` and `z` across the tile's columns once at the end, not in every tile.
    """
    TILES: tl.constexpr = PAGE // BLOCK_N
    m, l, z, acc = carried
    prepared = PREPARE(q_rows, q_stride_d, rows_valid, DOT, T, KP)
    column = tl.arange(0, BLOCK_N)
    end = tl.minimum(last * PAGE, paged)
    if DEFER:
        sum_l = tl.zeros((BLOCK_M, BLOCK_N) if T == 1 else (BLOCK_N, BLOCK_M), tl.float32)
    else:
        sum_l = tl.zeros((BLOCK_M,), tl.float32)
    sum_z = sum_l
    # data that a tile's other loads depend on is loaded one tile ahead, addresses two tiles ahead
    address = tl.load(table + first, mask=first < last, other=0)
    page = pool + tl.multiple_of(address + head_offset, 16)
    valid = first * PAGE + column < end
    keys = FETCH_K(page, 0, valid, BLOCK_N, KP)
    values = FETCH_V(page + VALUE_AT, 0, valid, BLOCK_N, VP)
    address = tl.load(table + (first * TILES + 1) // TILES, mask=(first * TILES + 1) // TILES < last, other=0)
    for i in range(first * TILES, last * TILES):
        n0 = (i % TILES) * BLOCK_N
        next_page = pool + tl.multiple_of(address + head_offset, 16)
        address = tl.load(table + (i + 2) // TILES, mask=(i + 2) // TILES < last, other=0)
        next_valid = (i + 1) * BLOCK_N + column < end
        next_n0 = ((i + 1) % TILES) * BLOCK_N
        next_keys = FETCH_K(next_page, next_n0, next_valid, BLOCK_N, KP)
        next_values = FETCH_V(next_page + VALUE_AT, next_n0, next_valid, BLOCK_N, VP)

        s = SCORES(page, record_k, prepared, keys, n0, valid, factor, DOT, BLOCK_N, T, KP)
        if HAS_SCORE_BIAS:
            s += tl.expand_dims(score_bias, T)
        s = _capped(s, softcap, HAS_SOFTCAP)
        s, inverse, offset = WEIGH(page + VALUE_AT, values, s, n0, valid, BLOCK_N, T, VP)
        if OPEN_PAGES:
            s = tl.where(tl.expand_dims(valid, 1 - T), s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, T))
        decay = tl.exp2(m - new_m)
        weights = tl.exp2(s - tl.expand_dims(new_m, T))
        if VP.offset and DOT != tl.float32:
            # codes and offsets nearly cancel if one channel of a token is far below the others. So offsets are weighted
            # like codes, by the eleven bits that float16 keeps. For weights with fewer bits, offsets keep all bits.
            weights = (weights.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        if DEFER:
            sum_l = sum_l * tl.expand_dims(decay, T) + weights * inverse
            if VP.offset:
                sum_z = sum_z * tl.expand_dims(decay, T) + weights * offset
        else:
            sum_l = sum_l * decay + tl.sum(weights * inverse, T)
            if VP.offset:
                sum_z = sum_z * decay + tl.sum(weights * offset, T)
        acc = ADD(page + VALUE_AT, record_v, weights, decay, acc, n0, valid, DOT, BLOCK_N, T, VP)
        m, page, valid, keys, values = new_m, next_page, next_valid, next_keys, next_values
    # pages come first, so there are no earlier sums
    if DEFER:
        l, z = tl.sum(sum_l, T), tl.sum(sum_z, T)
    else:
        l, z = sum_l, sum_z
    return m, l, z, acc


@triton.jit
def _window_tile(
    carried, q, k_rows, v_rows, k_stride, v_stride, tokens_valid, visible, factor, score_bias, softcap,
    DQ: tl.constexpr, VP: tl.constexpr, DOT: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of tokens in the model's dtype. Pointers `[N]`; tokens_valid `[N]`; visible broadcasts to the
    scores."""
    m, l, z, acc = carried
    k = load_plane(k_rows, k_stride, tokens_valid, 0, DQ).to(DOT)
    s = query_dot(q, tl.trans(k) if T == 1 else k, None, T) * factor
    if HAS_SCORE_BIAS:
        s += tl.expand_dims(score_bias, T)
    s = tl.where(visible, _capped(s, softcap, HAS_SOFTCAP), float("-inf"))
    new_m = tl.maximum(m, tl.max(s, T))
    decay = tl.exp2(m - new_m)
    weights = tl.exp2(s - tl.expand_dims(new_m, T))
    l = l * decay + tl.sum(weights, T)
    z = z * decay
    p = weights.to(DOT)
    out = ()
    for j in tl.static_range(VP.planes):
        v = load_plane(v_rows, v_stride, tokens_valid, j, VP).to(DOT)
        product = value_dot(p, v if T == 1 else tl.trans(v), None, T) * (1.0 / VP.units[j])
        out = out + (acc[j] * tl.expand_dims(decay, T) + product,)
    return new_m, l, z, out


@triton.jit
def _walk_window(
    carried, q, q_token, last_token, bh, length, paged, factor, score_bias, softcap,
    k, k_stride_s, k_stride_d, v, v_stride_s, v_stride_d, mask, mask_stride_s,
    sink_k, sink_v, tail_k, tail_v, tokens, split,
    DQ: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, TAIL_SPLIT: tl.constexpr, SINK: tl.constexpr,
    TAIL: tl.constexpr, HAS_MASK: tl.constexpr,
    DOT: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attend to sink, tail ring, and the new tokens up to the tile's `last_token`.

    TAIL_SPLIT: 0: this program takes everything. Otherwise split 0 takes sink and new tokens, and each further split this many
    tokens of the tail.
    """
    DK: tl.constexpr = DQ.width
    block = tl.arange(0, BLOCK_N)
    sink_end = tl.minimum(length, SINK)
    chunk_end = last_token + 1
    tail_first = paged
    tail_end = length - SINK
    if TAIL_SPLIT > 0:
        sink_end = tl.where(split == 0, sink_end, 0)
        chunk_end = tl.where(split == 0, chunk_end, 0)
        tail_first += (split - 1) * TAIL_SPLIT
        tail_end = tl.where(split == 0, tail_first, tl.minimum(tail_end, tail_first + TAIL_SPLIT))
    if SINK > 0:
        for n0 in tl.range(0, sink_end, BLOCK_N, num_stages=STAGES):
            index = n0 + block
            valid = index < sink_end
            position = bh * SINK + index
            carried = _window_tile(
                carried, q, sink_k + position * DK, sink_v + position * DV, 1, 1, valid, tl.expand_dims(valid, 1 - T),
                factor, score_bias, softcap, DQ, VP, DOT, HAS_SCORE_BIAS, HAS_SOFTCAP, T,
            )  # fmt: skip
    if TAIL > 0:
        for n0 in tl.range(tail_first, tail_end, BLOCK_N, num_stages=STAGES):
            index = n0 + block
            valid = index < tail_end
            position = bh * TAIL + index % TAIL
            carried = _window_tile(
                carried, q, tail_k + position * DK, tail_v + position * DV, 1, 1, valid, tl.expand_dims(valid, 1 - T),
                factor, score_bias, softcap, DQ, VP, DOT, HAS_SCORE_BIAS, HAS_SOFTCAP, T,
            )  # fmt: skip
    for n0 in tl.range(0, chunk_end, BLOCK_N, num_stages=STAGES):
        index = n0 + block
        valid = index < tokens
        if HAS_MASK:
            valid = valid & (tl.load(mask + index * mask_stride_s, mask=valid, other=0) != 0)
        position = index.to(tl.int64)
        carried = _window_tile(
            carried, q, k + position * k_stride_s, v + position * v_stride_s, k_stride_d, v_stride_d, valid,
            tl.expand_dims(valid, 1 - T) & (tl.expand_dims(index, 1 - T) <= tl.expand_dims(q_token, T)), factor, score_bias,
            softcap, DQ, VP, DOT, HAS_SCORE_BIAS, HAS_SOFTCAP, T,
        )  # fmt: skip
    return carried


@triton.jit
def _finish(carried, rows, rows_valid, lse_rows, out_type, SPLIT: tl.constexpr, T: tl.constexpr, VP: tl.constexpr):
    """Divide by the sum of weights and store. rows: pointers `[M]`. Rows without any token get zeros."""
    m, l, z, acc = carried
    total = tl.where(l > 0, l, 1.0)
    channel = tl.arange(0, VP.padded)
    for j in tl.static_range(VP.planes):
        x = (acc[j] * VP.units[j] + tl.expand_dims(z, T)) / tl.expand_dims(total, T)
        keep = tl.expand_dims(rows_valid, T) & tl.expand_dims(channel < VP.width, 1 - T)
        tl.store(tl.expand_dims(rows, T) + tl.expand_dims(plane_channels(j, VP), 1 - T), x.to(out_type), mask=keep)
    if SPLIT:
        tl.store(lse_rows, tl.where(l > 0, m + tl.log2(total), float("-inf")), mask=rows_valid)


@triton.jit(do_not_specialize=["tokens", "pages", "page_splits"])
def attend_kernel(
    q, k, v, mask, sinks, score_bias, pool, address, sink_k, sink_v, tail_k, tail_v, length, paged, out, lse,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d, mask_stride_b, mask_stride_s,
    record_k, record_v, record_stride_k, record_stride_v, heads, tokens, pages, page_splits, scaling, softcap,
    PREPARE: tl.constexpr, FETCH_K: tl.constexpr, FETCH_V: tl.constexpr, SCORES: tl.constexpr, WEIGH: tl.constexpr,
    ADD: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    DQ: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr, VALUE_AT: tl.constexpr, OPEN_PAGES: tl.constexpr, SPLIT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCORE_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW_N: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr, TAIL_SPLIT: tl.constexpr, DEFER: tl.constexpr, T: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (row * head, split, block of BLOCK_M query rows).

    SPLIT: the first WINDOW_SPLITS programs of axis 1 take the tokens that are not packed (`_walk_window`), and each of
    the other `page_splits` programs takes some of the row's pages. Then out is float32 `[B * H, WINDOW_SPLITS +
    page_splits, GROUPS * tokens, DV]`, and lse is the same without DV, in binary logarithms. Without SPLIT one program
    takes everything, and out is `[B, tokens, H * GROUPS, DV]`. KP, VP: constants of the two formats (`registry`); DQ:
    constants of dense tokens as wide as a key. PDL: see `entry_points`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_valid = row < GROUPS * tokens
    q_token, group = row // GROUPS, row % GROUPS
    q_head = h * GROUPS + group
    q_rows = q + b * q_stride_b + q_head * q_stride_h + q_token.to(tl.int64) * q_stride_s
    stored, packed = tl.load(length + bh), tl.load(paged + bh)
    factor = scaling if HAS_SOFTCAP else scaling * LOG2E
    added = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SCORE_BIAS:
        added = (
            tl.load(score_bias + (b * heads * GROUPS + q_head) * tokens + q_token, mask=rows_valid, other=0.0) * factor
        )

    split = tl.program_id(1)
    lse_rows = lse
    if SPLIT:
        partial_row = (bh * (WINDOW_SPLITS + page_splits) + split) * (GROUPS * tokens) + row
        out_rows = out + partial_row * DV
        lse_rows = lse + partial_row
    else:
        out_rows = out + ((b * tokens + q_token) * (heads * GROUPS) + q_head) * DV

    carried = _start(BLOCK_M, T, VP)
    if (not SPLIT) or split >= WINDOW_SPLITS:
        total_pages = (packed + PAGE - 1) // PAGE
        page_split = tl.maximum(split - WINDOW_SPLITS, 0)
        first = (total_pages * page_split // page_splits).to(tl.int32)
        last = (total_pages * (page_split + 1) // page_splits).to(tl.int32)
        carried = _walk_pages(
            carried, q_rows, q_stride_d, rows_valid, pool, address + b * pages, h * PAGE_BYTES,
            record_k + h * record_stride_k, record_v + h * record_stride_v, first, last, packed, factor, added,
            softcap, PREPARE, FETCH_K, FETCH_V, SCORES, WEIGH, ADD, KP, VP, VALUE_AT, PAGE, OPEN_PAGES, DOT, HAS_SCORE_BIAS,
            HAS_SOFTCAP, BLOCK_M, BLOCK_N, DEFER, T,
        )  # fmt: skip
    if (not SPLIT) or split < WINDOW_SPLITS:
        # with splits, few programs take the window. Buffers for them would take shared memory from all programs
        STAGES: tl.constexpr = 1 if SPLIT else 2
        last_token = tl.minimum((tl.program_id(2) * BLOCK_M + BLOCK_M - 1) // GROUPS, tokens - 1)
        dense_q = as_operand(load_plane(q_rows, q_stride_d, rows_valid, 0, DQ).to(DOT), T)
        carried = _walk_window(
            carried, dense_q, q_token, last_token, bh, stored, packed, factor, added, softcap,
            k + b * k_stride_b + h * k_stride_h, k_stride_s, k_stride_d,
            v + b * v_stride_b + h * v_stride_h, v_stride_s, v_stride_d, mask + b * mask_stride_b, mask_stride_s,
            sink_k, sink_v, tail_k, tail_v, tokens, split, DQ, DV, VP, TAIL_SPLIT if SPLIT else 0, SINK, TAIL, HAS_MASK,
            DOT, HAS_SCORE_BIAS, HAS_SOFTCAP, WINDOW_N, STAGES, T,
        )  # fmt: skip
    if HAS_SINKS and not SPLIT:
        m, l, z, acc = carried
        logit = tl.load(sinks + q_head, mask=rows_valid, other=0.0).to(tl.float32) * LOG2E
        new_m = tl.maximum(m, logit)
        decay = tl.exp2(m - new_m)
        scaled = ()
        for j in tl.static_range(VP.planes):
            scaled = scaled + (acc[j] * tl.expand_dims(decay, T),)
        carried = new_m, l * decay + tl.exp2(logit - new_m), z * decay, scaled
    _finish(carried, out_rows, rows_valid, lse_rows, out.dtype.element_ty, SPLIT, T, VP)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    partial, lse, sinks, out, heads, rows, splits,
    DV: tl.constexpr, GROUPS: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits' outputs by their log-sum-exp, BLOCK splits at a time, into out `[B, tokens, H * GROUPS, DV]`.

    Grid (row * head, query row, block of CHANNELS channels).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bh, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_head = (bh % heads) * GROUPS + row % GROUPS
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    m = LOWEST
    l = 0.0
    acc = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        position = (bh * splits + split) * rows + row
        weight = tl.load(lse + position, mask=split < splits, other=float("-inf"))
        keep = (split < splits)[:, None] & (channel < DV)[None, :]
        x = tl.load(partial + position[:, None] * DV + channel[None, :], mask=keep, other=0.0)
        new_m = tl.maximum(m, tl.max(weight, 0))
        decay = tl.exp2(m - new_m)
        weight = tl.exp2(weight - new_m)
        l = l * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(x * weight[:, None], 0)
        m = new_m
    if HAS_SINKS:
        logit = tl.load(sinks + q_head).to(tl.float32) * LOG2E
        new_m = tl.maximum(m, logit)
        decay = tl.exp2(m - new_m)
        l, acc = l * decay + tl.exp2(logit - new_m), acc * decay
    acc = acc / tl.where(l > 0, l, 1.0)
    token = row // GROUPS
    position = ((bh // heads * (rows // GROUPS) + token) * (heads * GROUPS) + q_head) * DV
    tl.store(out + position + channel, acc.to(out.dtype.element_ty), mask=channel < DV)
