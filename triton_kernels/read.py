"""Unpacks stored tokens, in order: all of them (`read`), or a stretch of stored and new tokens (`unpack`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import PagedStore
from .common import cdiv, constants, format_records, padded_width, plane_channels, takes_ptx
from .common import launch as _launch
from .registry import reader

#: largest number of packed tokens that a program decodes
PAGE_BLOCK = 64
#: number of tokens of the full-precision window and of the new tokens that a program copies
WINDOW_BLOCK = 32


@triton.jit
def _read_tile(
    pool, address, paged, record, record_stride, out, bh, b, h, tile, pages, first, count,
    DECODE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SINK: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    PART_AT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a row's keys, or of its values, to out `[B, H, count, D]`: those of the tokens `first` to
    `first + count` that are in pages.

    tile: index of this tile of BLOCK_N tokens; tile 0 contains token `first`, or begins the pages if `first` is in the sink.
    record: the format's parameters; those of KV head `h` begin at `h * record_stride`.
    """
    start = (tl.maximum(first - SINK, 0) // BLOCK_N + tile) * BLOCK_N
    packed = tl.load(paged + bh)
    if start < packed:
        index = start + tl.arange(0, BLOCK_N)
        valid = index < packed
        page = pool + tl.multiple_of(tl.load(address + b * pages + start // PAGE) + h * PAGE_BYTES, 16) + PART_AT
        head_record = record + h * record_stride
        position = SINK + index - first
        rows = out + (bh * count + position) * D
        channel = tl.arange(0, P.padded)
        keep = (valid & (position >= 0) & (position < count))[:, None] & (channel < P.width)[None, :]
        for j in tl.static_range(P.planes):
            x = DECODE(page, head_record, start % PAGE, valid, j, BLOCK_N, P)
            tl.store(rows[:, None] + plane_channels(j, P)[None, :], x.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _copy_window(
    sink, tail, new, stride_s, stride_d, out, bh, number, source, position, keep,
    D: tl.constexpr, PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Copy a row's keys, or its values, outside pages to rows `position` of out.

    number: which tokens, see `_read_window`. source: where they are; tail tokens: index after the sink, new tokens:
    their position.
    """
    channel = tl.arange(0, PADDED)[None, :]
    rows = (out + position.to(tl.int64) * D)[:, None] + channel
    keep = keep[:, None] & (channel < D)
    if SINK > 0:
        selected = keep & (number < SINK)[:, None]
        x = tl.load((sink + (bh * SINK + number) * D)[:, None] + channel, mask=selected, other=0.0)
        tl.store(rows, x, mask=selected)
    if TAIL > 0:
        selected = keep & ((number >= SINK) & (number < SINK + TAIL))[:, None]
        x = tl.load((tail + (bh * TAIL + source % TAIL) * D)[:, None] + channel, mask=selected, other=0.0)
        tl.store(rows, x, mask=selected)
    if HAS_NEW:
        selected = keep & (number >= SINK + TAIL)[:, None]
        x = tl.load((new + source.to(tl.int64) * stride_s)[:, None] + channel * stride_d, mask=selected, other=0.0)
        tl.store(rows, x, mask=selected)


@triton.jit
def _read_window(
    sink_k, sink_v, tail_k, tail_v, length, paged, k, v, order, real, out_k, out_v,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    bh, b, h, block, tokens, first, count,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, SINK: tl.constexpr,
    TAIL: tl.constexpr, HAS_NEW: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of a row's tokens outside pages to out_k and out_v `[B, H, count, D]`: those of the tokens `first` to
    `first + count` that are in sink, tail or (HAS_NEW) among the `tokens` new tokens.

    block: index of this block of BLOCK tokens. HAS_ORDER: the new tokens have padding. `real[b]` of row `b` are real, at the
    positions `order[b]`.
    """
    stored, packed = tl.load(length + bh), tl.load(paged + bh)
    # number: SINK numbers for the sink, then TAIL for the tail, oldest token first, then the new tokens. The tail's oldest
    # token has index `packed` after the sink
    number = block * BLOCK + tl.arange(0, BLOCK)
    source = number + packed - SINK
    token = tl.where(number < SINK, number, number + packed)
    keep = token < stored
    if HAS_NEW:
        new = number - (SINK + TAIL)
        new_tokens = tl.load(real + b) if HAS_ORDER else tokens
        is_new = (new >= 0) & (new < new_tokens)
        token = tl.where(new >= 0, stored + new, token)
        keep = tl.where(new >= 0, is_new, keep)
        if HAS_ORDER:
            new = tl.load(order + b * tokens + new, mask=is_new, other=0)
        source = tl.where(number >= SINK + TAIL, new, source)
    keep = keep & (token >= first) & (token < first + count)
    position = bh * count + token - first
    _copy_window(
        sink_k, tail_k, k + b * k_stride_b + h * k_stride_h, k_stride_s, k_stride_d, out_k, bh, number, source, position, keep,
        DK, DK_PADDED, SINK, TAIL, HAS_NEW,
    )  # fmt: skip
    _copy_window(
        sink_v, tail_v, v + b * v_stride_b + h * v_stride_h, v_stride_s, v_stride_d, out_v, bh, number, source, position, keep,
        DV, DV_PADDED, SINK, TAIL, HAS_NEW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pages", "tokens", "first", "count", "blocks", "tiles_k"])
def unpack_kernel(
    pool, address, sink_k, sink_v, tail_k, tail_v, length, paged, record_k, record_v, k, v, order, real, out_k, out_v,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    record_k_stride, record_v_stride, heads, pages, tokens, first, count, blocks, tiles_k,
    DECODE_K: tl.constexpr, DECODE_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr, VALUE_AT: tl.constexpr, HAS_NEW: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write tokens `first` to `first + count` of every row to out_k and out_v `[B, H, count, D]`.

    Grid (row * head, index). The first `blocks` programs of axis 1 copy the window and the new tokens, the next `tiles_k`
    decode packed keys, and the others decode packed values.
    """
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    index = tl.program_id(1)
    if index < blocks:
        _read_window(
            sink_k, sink_v, tail_k, tail_v, length, paged, k, v, order, real, out_k, out_v,
            k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d,
            bh, b, h, index, tokens, first, count,
            DK, DV, DK_PADDED, DV_PADDED, SINK, TAIL, HAS_NEW, HAS_ORDER, BLOCK,
        )  # fmt: skip
    elif index < blocks + tiles_k:
        _read_tile(
            pool, address, paged, record_k, record_k_stride, out_k, bh, b, h, index - blocks, pages, first, count,
            DECODE_K, KP, DK, SINK, PAGE, PAGE_BYTES, 0, BLOCK_K,
        )  # fmt: skip
    else:
        _read_tile(
            pool, address, paged, record_v, record_v_stride, out_v, bh, b, h, index - blocks - tiles_k, pages, first, count,
            DECODE_V, VP, DV, SINK, PAGE, PAGE_BYTES, VALUE_AT, BLOCK_V,
        )  # fmt: skip


class _PageReader(NamedTuple):
    """How pages are decoded: their keys, or their values."""

    decode: Any
    """Triton function of the format"""
    params: Any
    """its compile-time arguments"""
    part_at: int
    """where this part of a page begins, in bytes"""
    max_block: int
    """largest number of tokens that `decode` takes"""


@functools.cache
def _page_readers(
    spec: LayerSpec, head_dims: tuple[int, int], dtype: torch.dtype, ptx: bool
) -> tuple[tuple[_PageReader, ...], int]:
    """The readers of keys and of values; the size of a page in bytes."""
    part_bytes = spec.part_bytes(*head_dims, dtype)
    readers = []
    for fmt, head_dim, part_at in zip(spec.formats, head_dims, (0, part_bytes[0]), strict=True):
        module = reader(fmt)
        params = module.params(fmt, head_dim, spec.page_size, dtype, ptx)
        readers.append(_PageReader(module.decode, constants(params), part_at, params.max_block))
    return tuple(readers), sum(part_bytes)


class NewTokens(NamedTuple):
    """Tokens that follow the stored ones: k, v `[B, H, S, D]`. With padding: positions of the real
    tokens `[B, S]` and their number `[B]`, int32."""

    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor | None = None
    real: torch.Tensor | None = None


def unpack(
    store: PagedStore, outs: tuple[torch.Tensor, torch.Tensor], first: int, new: NewTokens | None = None
) -> None:
    """Write tokens `first` and up of every row to `outs`, keys and values `[B, H, count, D]`, contiguous.

    The tokens of `new` follow the stored ones. Rows of `outs` past a row's end are not written.
    """
    state, spec = store.state, store.spec
    (batch, heads), pages, device = state.length.shape, state.page_address.shape[1], state.length.device
    head_dims, count = (outs[0].shape[-1], outs[1].shape[-1]), outs[0].shape[2]
    dtype = state.sink_k.dtype
    readers, page_bytes = _page_readers(spec, head_dims, dtype, takes_ptx(device))
    packed = min(pages * spec.page_size, first + count - spec.sink) - max(first - spec.sink, 0)
    (keys, values), records = readers, format_records(store)
    block_k, block_v = (min(PAGE_BLOCK, side.max_block, spec.page_size) for side in readers)
    # tiles begin at multiples of a block, so a range may touch one tile more
    tiles_k, tiles_v = (cdiv(packed, block) + 1 if packed > 0 else 0 for block in (block_k, block_v))
    tokens = 0 if new is None else new.k.shape[2]
    blocks = cdiv(spec.sink + spec.tail_size + tokens, WINDOW_BLOCK)
    if blocks + tiles_k + tiles_v == 0:
        return
    k, v, order, real = (state.sink_k, state.sink_v, None, None) if new is None else new
    _launch(
        unpack_kernel,
        (batch * heads, blocks + tiles_k + tiles_v),
        *(state.pool[0], state.page_address, state.sink_k, state.sink_v, state.tail_k, state.tail_v),
        *(state.length, state.paged, records[0][0], records[1][0], k, v),
        *(state.length if order is None else order, state.length if real is None else real, *outs),
        *(*k.stride(), *v.stride(), records[0][1], records[1][1]),
        *(heads, pages, tokens, first, count, blocks, tiles_k),
        device=device,
        DECODE_K=keys.decode,
        DECODE_V=values.decode,
        KP=keys.params,
        VP=values.params,
        DK=head_dims[0],
        DV=head_dims[1],
        DK_PADDED=padded_width(head_dims[0]),
        DV_PADDED=padded_width(head_dims[1]),
        SINK=spec.sink,
        TAIL=spec.tail_size,
        PAGE=spec.page_size,
        PAGE_BYTES=page_bytes,
        VALUE_AT=values.part_at,
        HAS_NEW=new is not None,
        HAS_ORDER=order is not None,
        BLOCK=WINDOW_BLOCK,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        enable_fp_fusion=False,  # products are rounded like the reference's
    )


def read(store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Operations.read`: the stored tokens in order, keys and values `[B, H, max_length, D]`. Zeros fill the space
    past a row's end."""
    state = store.state
    batch, heads = state.length.shape
    keys, values = (
        torch.zeros(batch, heads, max_length, head_dim, dtype=state.sink_k.dtype, device=state.length.device)
        for head_dim in state.head_dims
    )
    if max_length:
        unpack(store, (keys, values), 0)
    return keys, values
