"""Reading stored tokens back, unpacked and in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pages", "max_length"])
def read_pages_kernel(
    pool, address, paged, out, heads, pages, max_length,
    DECODE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SINK: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    PART_AT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode pages into out `[B, H, max_length, D]`. Grid (row * head, tile of BLOCK_N tokens)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    start = tl.program_id(1) * BLOCK_N
    packed = tl.load(paged + bh)
    if start < packed:
        index = start + tl.arange(0, BLOCK_N)
        valid = index < packed
        page = pool + tl.multiple_of(tl.load(address + b * pages + start // PAGE) + h * PAGE_BYTES, 16) + PART_AT
        rows = out + (bh * max_length + SINK + index) * D
        channel = tl.arange(0, P.padded)
        keep = (valid & (SINK + index < max_length))[:, None] & (channel < P.width)[None, :]
        for j in tl.static_range(P.planes):
            x = DECODE(page, start % PAGE, valid, j, BLOCK_N, P)
            tl.store(rows[:, None] + (j * P.width + channel)[None, :], x.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["max_length"])
def read_window_kernel(
    sink, tail, length, paged, out, max_length,
    D: tl.constexpr, D_PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy sink and tail into out `[B, H, max_length, D]`. Grid (row * head, block of their slots)."""
    bh = tl.program_id(0).to(tl.int64)
    stored, packed = tl.load(length + bh), tl.load(paged + bh)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D_PADDED)[None, :]
    # number counts the sink's slots, then the tokens of the tail from the oldest
    place = tl.where(number < SINK, number, number + packed)
    keep = ((place < stored) & (place < max_length))[:, None] & (channel < D)
    rows = (out + (bh * max_length + place) * D)[:, None] + channel
    if SINK > 0:
        here = keep & (number < SINK)[:, None]
        x = tl.load((sink + (bh * SINK + number) * D)[:, None] + channel, mask=here, other=0.0)
        tl.store(rows, x, mask=here)
    if TAIL > 0:
        here = keep & ((number >= SINK) & (number < SINK + TAIL))[:, None]
        x = tl.load((tail + (bh * TAIL + (place - SINK) % TAIL) * D)[:, None] + channel, mask=here, other=0.0)
        tl.store(rows, x, mask=here)
