"""Unpacks stored tokens, in order: all of them (`read`), or a stretch of them and of the chunk that follows
(`unpack`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..storage.paged_store import LayerSpec, LayerStore
from .common import constants, format_records, padded_width, plane_channels, takes_ptx
from .common import launch as _launch
from .registry import reader

#: largest number of tokens of a program
PAGE_BLOCK = 64
WINDOW_BLOCK = 32


@triton.jit(do_not_specialize=["pages", "first", "count"])
def read_pages_kernel(
    pool, address, paged, record, out, heads, pages, first, count, record_stride,
    DECODE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SINK: tl.constexpr, PAGE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    PART_AT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode those of a row's tokens `first` to `first + count` that are packed, into out `[B, H, count, D]`.

    record: the format's parameters; KV head `h` at `h * record_stride`. Grid (row * head, tile of BLOCK_N tokens).
    """
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    start = (tl.maximum(first - SINK, 0) // BLOCK_N + tl.program_id(1)) * BLOCK_N
    packed = tl.load(paged + bh)
    if start < packed:
        index = start + tl.arange(0, BLOCK_N)
        valid = index < packed
        page = pool + tl.multiple_of(tl.load(address + b * pages + start // PAGE) + h * PAGE_BYTES, 16) + PART_AT
        head_record = record + h * record_stride
        place = SINK + index - first
        rows = out + (bh * count + place) * D
        channel = tl.arange(0, P.padded)
        keep = (valid & (place >= 0) & (place < count))[:, None] & (channel < P.width)[None, :]
        for j in tl.static_range(P.planes):
            x = DECODE(page, head_record, start % PAGE, valid, j, BLOCK_N, P)
            tl.store(rows[:, None] + plane_channels(j, P)[None, :], x.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _copy_window(
    sink, tail, chunk, stride_s, stride_d, out, bh, number, source, place, keep,
    D: tl.constexpr, PADDED: tl.constexpr, SINK: tl.constexpr, TAIL: tl.constexpr, HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys or values of `read_window_kernel`: copy tokens `number` of the window to rows `place` of out. source:
    positions in the chunk."""
    channel = tl.arange(0, PADDED)[None, :]
    rows = (out + place.to(tl.int64) * D)[:, None] + channel
    keep = keep[:, None] & (channel < D)
    if SINK > 0:
        here = keep & (number < SINK)[:, None]
        x = tl.load((sink + (bh * SINK + number) * D)[:, None] + channel, mask=here, other=0.0)
        tl.store(rows, x, mask=here)
    if TAIL > 0:
        here = keep & ((number >= SINK) & (number < SINK + TAIL))[:, None]
        x = tl.load((tail + (bh * TAIL + source % TAIL) * D)[:, None] + channel, mask=here, other=0.0)
        tl.store(rows, x, mask=here)
    if HAS_CHUNK:
        here = keep & (number >= SINK + TAIL)[:, None]
        x = tl.load((chunk + source.to(tl.int64) * stride_s)[:, None] + channel * stride_d, mask=here, other=0.0)
        tl.store(rows, x, mask=here)


@triton.jit(do_not_specialize=["tokens", "first", "count"])
def read_window_kernel(
    sink_k, sink_v, tail_k, tail_v, length, paged, k, v, order, real, out_k, out_v,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d, v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    heads, tokens, first, count,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, SINK: tl.constexpr,
    TAIL: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy those of a row's tokens `first` to `first + count` that are not packed into out_k and out_v `[B, H, count,
    D]`: sink, tail and, if HAS_CHUNK, the chunk's `tokens`. Grid (row * head, block of these).

    HAS_ORDER: the chunk's real tokens stand at positions `order` `[B, tokens]`; there are `real` `[B]` of them.
    """
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    stored, packed = tl.load(length + bh), tl.load(paged + bh)
    # number counts the sink's slots, then the tail's tokens, oldest first, then the chunk's tokens
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = number + packed - SINK
    token = tl.where(number < SINK, number, number + packed)
    keep = token < stored
    if HAS_CHUNK:
        chunk = number - (SINK + TAIL)
        many = tl.load(real + b) if HAS_ORDER else tokens
        in_chunk = (chunk >= 0) & (chunk < many)
        token = tl.where(chunk >= 0, stored + chunk, token)
        keep = tl.where(chunk >= 0, in_chunk, keep)
        if HAS_ORDER:
            chunk = tl.load(order + b * tokens + chunk, mask=in_chunk, other=0)
        source = tl.where(number >= SINK + TAIL, chunk, source)
    keep = keep & (token >= first) & (token < first + count)
    place = bh * count + token - first
    _copy_window(
        sink_k, tail_k, k + b * k_stride_b + h * k_stride_h, k_stride_s, k_stride_d, out_k, bh, number, source, place, keep,
        DK, DK_PADDED, SINK, TAIL, HAS_CHUNK,
    )  # fmt: skip
    _copy_window(
        sink_v, tail_v, v + b * v_stride_b + h * v_stride_h, v_stride_s, v_stride_d, out_v, bh, number, source, place, keep,
        DV, DV_PADDED, SINK, TAIL, HAS_CHUNK,
    )  # fmt: skip


class _PageReader(NamedTuple):
    """How the pages of keys, or of values, are read."""

    decode: Any
    params: Any
    part_at: int
    max_block: int


@functools.cache
def _page_readers(
    spec: LayerSpec, head_dims: tuple[int, int], dtype: torch.dtype, ptx: bool
) -> tuple[tuple[_PageReader, ...], int]:
    """How keys and values are read; and the bytes of a page."""
    parts = spec.part_bytes(*head_dims, dtype)
    readers = []
    for fmt, head_dim, part_at in zip(spec.formats, head_dims, (0, parts[0]), strict=True):
        module = reader(fmt)
        params = module.params(fmt, head_dim, spec.page_size, dtype, ptx)
        readers.append(_PageReader(module.decode, constants(params), part_at, params.max_block))
    return tuple(readers), sum(parts)


class NewTokens(NamedTuple):
    """Tokens of a chunk that follow the stored ones: k, v `[B, H, S, D]`. For a padded chunk: positions of the real
    tokens `[B, S]` and their number `[B]`, int32."""

    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor | None = None
    real: torch.Tensor | None = None


def unpack(
    layer: LayerStore, outs: tuple[torch.Tensor, torch.Tensor], first: int, new: NewTokens | None = None
) -> None:
    """Write tokens `first` and up of every row to `outs`, keys and values `[B, H, count, D]`, contiguous.

    The tokens of `new` follow the stored ones. Rows of `outs` behind a row's end are not written.
    """
    state, spec = layer.state, layer.spec
    (batch, heads), pages, device = state.length.shape, state.page_address.shape[1], state.length.device
    head_dims, count = (outs[0].shape[-1], outs[1].shape[-1]), outs[0].shape[2]
    dtype = state.sink_k.dtype
    readers, page_bytes = _page_readers(spec, head_dims, dtype, takes_ptx(device))
    packed = min(pages * spec.page_size, first + count - spec.sink) - max(first - spec.sink, 0)
    records = format_records(layer)
    for reader_of_side, head_dim, out, (record, stride) in zip(readers, head_dims, outs, records, strict=True):
        block = min(PAGE_BLOCK, reader_of_side.max_block, spec.page_size)
        if packed > 0:
            _launch(
                read_pages_kernel,
                (batch * heads, triton.cdiv(packed, block) + 1),
                *(state.pool[0], state.page_address, state.paged, record, out, heads, pages, first, count, stride),
                device=device,
                DECODE=reader_of_side.decode,
                P=reader_of_side.params,
                D=head_dim,
                SINK=spec.sink,
                PAGE=spec.page_size,
                PAGE_BYTES=page_bytes,
                PART_AT=reader_of_side.part_at,
                BLOCK_N=block,
                enable_fp_fusion=False,  # products are rounded like the reference's
            )
    tokens = 0 if new is None else new.k.shape[2]
    k, v, order, real = (state.sink_k, state.sink_v, None, None) if new is None else new
    if slots := spec.sink + spec.tail_size + tokens:
        _launch(
            read_window_kernel,
            (batch * heads, triton.cdiv(slots, WINDOW_BLOCK)),
            *(state.sink_k, state.sink_v, state.tail_k, state.tail_v, state.length, state.paged, k, v),
            *(state.length if order is None else order, state.length if real is None else real, *outs),
            *(*k.stride(), *v.stride(), heads, tokens, first, count),
            device=device,
            DK=head_dims[0],
            DV=head_dims[1],
            DK_PADDED=padded_width(head_dims[0]),
            DV_PADDED=padded_width(head_dims[1]),
            SINK=spec.sink,
            TAIL=spec.tail_size,
            HAS_CHUNK=new is not None,
            HAS_ORDER=order is not None,
            BLOCK=WINDOW_BLOCK,
        )


def read(layer: LayerStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Operations.read`: the stored tokens in order, keys and values `[B, H, max_length, D]`. Zeros fill the space
    behind a row's end."""
    state = layer.state
    batch, heads = state.length.shape
    keys, values = (
        torch.zeros(batch, heads, max_length, head_dim, dtype=state.sink_k.dtype, device=state.length.device)
        for head_dim in state.head_dims
    )
    if max_length:
        unpack(layer, (keys, values), 0)
    return keys, values
