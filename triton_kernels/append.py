"""Stores new tokens in sink, tail ring and partial pages, and packs each page that is due.

A program owns the counters of one row (sequence x KV head). One token takes one launch. Several tokens take three: pages, then
sink and tail, then counters. Pages come first because they are packed from ring slots that the newest of these tokens
overwrite.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _paged_after(tokens, RESIDUAL: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr):
    """`LayerSpec.paged_after`."""
    if DIRECT:
        return tl.maximum(tokens, 0)
    else:
        return tl.maximum(tokens - RESIDUAL, 0) // PAGE * PAGE


@triton.jit
def _encode_page(
    pool, table, h, page, records, source_k, source_v, start, stop,
    ENCODE_K: tl.constexpr, ENCODE_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr, VALUE_AT: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr,
    ROWS_K: tl.constexpr, ROWS_V: tl.constexpr,
):  # fmt: skip
    """Store the tokens of page number `page` in the range `start` to `stop` (token indices, sink not counted)."""
    base = page * PAGE
    low, high = tl.maximum(start - base, 0), tl.minimum(stop - base, PAGE)
    part = pool + tl.multiple_of(tl.load(table + page) + h * PAGE_BYTES, 16)
    ENCODE_K(part, records[0], source_k, low, high, base, ROWS_K, HAS_ORDER, TAIL, KP)
    ENCODE_V(part + VALUE_AT, records[1], source_v, low, high, base, ROWS_V, HAS_ORDER, TAIL, VP)


@triton.jit
def _store_window(
    x, sink, tail, bh, position, keep, D: tl.constexpr, D_PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr
):
    """Write tokens `[N, D_PADDED]` at positions `[N]` of the row to sink or tail. keep `[N]`: which to write."""
    channel = tl.arange(0, D_PADDED)[None, :]
    columns = channel < D
    if SINK > 0:
        rows = sink + (bh * SINK + position) * D
        tl.store(rows[:, None] + channel, x, mask=(keep & (position < SINK))[:, None] & columns)
    if TAIL > 0:
        rows = tail + (bh * TAIL + (position - SINK) % TAIL) * D
        tl.store(rows[:, None] + channel, x, mask=(keep & (position >= SINK))[:, None] & columns)


@triton.jit(do_not_specialize=["pages", "room"])
def append_one_kernel(
    k, v, mask, pool, address, sink_k, sink_v, tail_k, tail_v, length, paged, lost, record_k, record_v,
    k_stride_b, k_stride_h, k_stride_d, v_stride_b, v_stride_h, v_stride_d, mask_stride_b, heads, pages, room,
    record_stride_k, record_stride_v,
    ENCODE_K: tl.constexpr, ENCODE_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, RESIDUAL: tl.constexpr,
    PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr, VALUE_AT: tl.constexpr, DIRECT: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS_K: tl.constexpr, ROWS_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one token for each row, k and v `[B, H, 1, D]`. Grid (row * head). PDL: see `entry_points`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    new_k, new_v = k + b * k_stride_b + h * k_stride_h, v + b * v_stride_b + h * v_stride_h
    # all loads precede the first branch, so they take one memory latency together
    stored, before = tl.load(length + bh), tl.load(paged + bh)
    channel_k, channel_v = tl.arange(0, DK_PADDED)[None, :], tl.arange(0, DV_PADDED)[None, :]
    x_k = tl.load(new_k + channel_k * k_stride_d, mask=channel_k < DK, other=0.0)
    x_v = tl.load(new_v + channel_v * v_stride_d, mask=channel_v < DV, other=0.0)
    fits = stored < room
    missing = stored >= room
    if HAS_MASK:
        real = tl.load(mask + b * mask_stride_b) != 0
        fits = fits & real
        missing = missing & real
    if missing:
        tl.store(lost + bh, tl.load(lost + bh) + 1)
    if fits:
        first = stored - SINK
        after = tl.maximum(before, _paged_after(first + 1, RESIDUAL, PAGE, DIRECT))
        position = stored + tl.arange(0, 1)
        keep = (position < SINK) | (position - SINK >= after)
        _store_window(x_k, sink_k, tail_k, bh, position, keep, DK, DK_PADDED, SINK, TAIL)
        _store_window(x_v, sink_v, tail_v, bh, position, keep, DV, DV_PADDED, SINK, TAIL)

        records = (record_k + h * record_stride_k, record_v + h * record_stride_v)
        # the new token is read from the input, not from the tail, to which this program has just written it
        source_k = (tail_k + bh * TAIL * DK, DK, new_k, 0, k_stride_d, length, first, 0)
        source_v = (tail_v + bh * TAIL * DV, DV, new_v, 0, v_stride_d, length, first, 0)
        for page in range(before // PAGE, (after + PAGE - 1) // PAGE if after > before else before // PAGE):
            _encode_page(
                pool, address + b * pages, h, page, records, source_k, source_v, before, after, ENCODE_K, ENCODE_V, KP, VP,
                PAGE, PAGE_BYTES, VALUE_AT, False, TAIL, ROWS_K, ROWS_V,
            )  # fmt: skip
        tl.store(length + bh, stored + 1)
        tl.store(paged + bh, after)


@triton.jit
def _counts(length, paged, count, bh, b, tokens, room, SINK: tl.constexpr, RESIDUAL: tl.constexpr, PAGE: tl.constexpr,
            DIRECT: tl.constexpr, HAS_ORDER: tl.constexpr):  # fmt: skip
    """A row's length and paged tokens before new tokens are stored; the number of tokens that fit; the paged tokens after."""
    stored, before = tl.load(length + bh), tl.load(paged + bh)
    if HAS_ORDER:
        tokens = tl.load(count + b)
    fits = tl.maximum(tl.minimum(tokens, room - stored), 0)
    after = tl.maximum(before, _paged_after(stored + fits - SINK, RESIDUAL, PAGE, DIRECT))
    return stored, before, fits, after


@triton.jit(do_not_specialize=["tokens", "pages", "room"])
def append_pages_kernel(
    k, v, order, count, pool, address, tail_k, tail_v, length, paged, record_k, record_v,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    heads, tokens, pages, room, record_stride_k, record_stride_v,
    ENCODE_K: tl.constexpr, ENCODE_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SINK: tl.constexpr, TAIL: tl.constexpr, RESIDUAL: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    VALUE_AT: tl.constexpr, DIRECT: tl.constexpr, HAS_ORDER: tl.constexpr, ROWS_K: tl.constexpr, ROWS_V: tl.constexpr,
):  # fmt: skip
    """Pack each page that new tokens `[B, H, tokens, D]` fill. Grid (row * head, index among these pages)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    stored, before, fits, after = _counts(
        length, paged, count, bh, b, tokens, room, SINK, RESIDUAL, PAGE, DIRECT, HAS_ORDER
    )
    page = before // PAGE + tl.program_id(1)
    if (after > before) & (page * PAGE < after):
        to_sink = tl.minimum(tl.maximum(SINK - stored, 0), fits)
        first = tl.maximum(stored - SINK, 0)
        new_order = order + b * tokens
        records = (record_k + h * record_stride_k, record_v + h * record_stride_v)
        source_k = (
            tail_k + bh * TAIL * DK, DK, k + b * k_stride_b + h * k_stride_h, k_stride_s, k_stride_d, new_order, first, to_sink
        )  # fmt: skip
        source_v = (
            tail_v + bh * TAIL * DV, DV, v + b * v_stride_b + h * v_stride_h, v_stride_s, v_stride_d, new_order, first, to_sink
        )  # fmt: skip
        _encode_page(
            pool, address + b * pages, h, page, records, source_k, source_v, before, after, ENCODE_K, ENCODE_V,
            KP, VP, PAGE, PAGE_BYTES, VALUE_AT, HAS_ORDER, TAIL, ROWS_K, ROWS_V,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "room"])
def append_window_kernel(
    k, v, order, count, sink_k, sink_v, tail_k, tail_v, length, paged,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d, heads, tokens, room,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, SINK: tl.constexpr,
    TAIL: tl.constexpr, RESIDUAL: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr, HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the new tokens that belong in sink or tail. Grid (row * head, block of tokens)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    stored, before, fits, after = _counts(
        length, paged, count, bh, b, tokens, room, SINK, RESIDUAL, PAGE, DIRECT, HAS_ORDER
    )
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = stored + number
    keep = (number < fits) & ((position < SINK) | (position - SINK >= after))
    if HAS_ORDER:
        number = tl.load(order + b * tokens + number, mask=keep, other=0)
    number = number.to(tl.int64)
    channel = tl.arange(0, DK_PADDED)[None, :]
    rows = k + b * k_stride_b + h * k_stride_h + number * k_stride_s
    x = tl.load(rows[:, None] + channel * k_stride_d, mask=keep[:, None] & (channel < DK), other=0.0)
    _store_window(x, sink_k, tail_k, bh, position, keep, DK, DK_PADDED, SINK, TAIL)
    channel = tl.arange(0, DV_PADDED)[None, :]
    rows = v + b * v_stride_b + h * v_stride_h + number * v_stride_s
    x = tl.load(rows[:, None] + channel * v_stride_d, mask=keep[:, None] & (channel < DV), other=0.0)
    _store_window(x, sink_v, tail_v, bh, position, keep, DV, DV_PADDED, SINK, TAIL)


@triton.jit(do_not_specialize=["tokens", "room"])
def append_counters_kernel(
    length, paged, lost, count, heads, tokens, room,
    SINK: tl.constexpr, RESIDUAL: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Advance the counters past the stored tokens. Grid (row * head)."""
    bh = tl.program_id(0)
    stored, before, fits, after = _counts(
        length, paged, count, bh, bh // heads, tokens, room, SINK, RESIDUAL, PAGE, DIRECT, HAS_ORDER
    )
    tl.store(length + bh, stored + fits)
    tl.store(paged + bh, after)
    if HAS_ORDER:
        tokens = tl.load(count + bh // heads)
    tl.store(lost + bh, tl.load(lost + bh) + tokens - fits)
