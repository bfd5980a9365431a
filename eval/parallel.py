"""Teacher forcing in one forward pass: what `perplexity` finds by feeding a cache chunk by chunk, for a fraction of the work.

A token's keys and values depend on the tokens before it alone, so a layer may get those of the whole text at once. Each layer
encodes and decodes all pages together, with the formats, transforms and parameters of the cache that is asked for. Then each
chunk of queries attends to what it would find in that cache: pages that are packed by then as they decode, and everything newer
exactly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hf_lowbit_kv.formats import Format
from hf_lowbit_kv.reference import plain_attention, restored, transformed

#: pages that are encoded and decoded together
SLAB = 8


def prepare(cache: Any, bounds: Sequence[int]) -> None:
    """Let a new cache's packed layers attend as if the text came in chunks that end at `bounds`. Good for one forward pass;
    nothing is stored.

    Raises:
        ValueError: a layer whose two streams are not keys and values.
    """
    for layer in cache.packed_layers:
        if layer.spec.reading.name != "separate":
            raise ValueError(f"reading {layer.spec.reading.name!r} is not offered in one pass; use parallel=False")
        layer.step = functools.partial(_step, layer, tuple(bounds))


def bits_per_value(cache: Any, tokens: int) -> float:
    """What `cache.bits_per_value` is when a row of so many tokens is stored."""
    stored = values = 0
    for layer in cache.packed_layers:
        spec, store = layer.spec, layer.store
        dims = store.head_dim_k, store.head_dim_v
        paged = spec.paged_after(max(tokens - spec.sink, 0))
        pages = -(-paged // spec.page_size)
        each = pages * sum(spec.part_bytes(*dims, store.dtype)) + (tokens - paged) * sum(dims) * store.dtype.itemsize
        stored += store.num_heads * each + sum(record.nbytes for record in store.state.parameters)
        values += store.num_heads * tokens * sum(dims)
    return 8 * stored / values if values else 0.0


def _step(layer: Any, bounds: Sequence[int], query, key, value, mask, scaling: float, softcap, sinks) -> torch.Tensor:
    """`LowBitLayer.step` for a whole text: `[B, S, Hq, D]`."""
    if mask is not None:
        raise ValueError("padding is not offered in one pass; use parallel=False")
    state, spec = layer.store.state, layer.spec
    q, k, v = transformed(query, key, value, state, spec)
    q, k, v = q.float(), k.float(), v.float()
    tensors = spec.tensors(state)
    packed = [spec.paged_after(max(start - spec.sink, 0)) for start in bounds[:-1]]
    whole = slice(spec.sink, spec.sink + packed[-1])
    decoded_k = _decoded(spec.key_format, k[:, :, whole], spec.page_size, key.dtype, tensors["key_format"])
    decoded_v = _decoded(spec.value_format, v[:, :, whole], spec.page_size, key.dtype, tensors["value_format"])
    position = torch.arange(k.shape[2], device=k.device)
    blocks = []
    for (low, high), seen in zip(itertools.pairwise(bounds), packed, strict=True):
        keys = _as_stored(k, decoded_k, spec.sink, seen, high)
        values = _as_stored(v, decoded_v, spec.sink, seen, high)
        allowed = position[:high] <= position[low:high, None]
        if softcap is None and sinks is None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q[:, :, low:high], keys, values, attn_mask=allowed, scale=scaling, enable_gqa=grouped
            ).transpose(1, 2)
        else:
            out = plain_attention(q[:, :, low:high], keys, values, allowed, scaling, softcap, sinks)
        blocks.append(out)
    return restored(torch.cat(blocks, 1).to(query.dtype), state, spec)


def _as_stored(x: torch.Tensor, decoded: torch.Tensor, sink: int, seen: int, end: int) -> torch.Tensor:
    """What a chunk that ends at `end` finds where `seen` tokens behind the sink are packed."""
    return torch.cat([x[:, :, :sink], decoded[:, :, :seen], x[:, :, sink + seen : end]], 2) if seen else x[:, :, :end]


def _decoded(fmt: Format, x: torch.Tensor, size: int, dtype: torch.dtype, parameters: Any) -> torch.Tensor:
    """Tokens `[B, H, n, D]`, `n` a multiple of the page size, packed and unpacked."""
    if x.shape[2] % size:
        raise ValueError(f"{x.shape[2]} packed tokens are not a multiple of page_size={size}; use parallel=False")
    parts = []
    for part in x.unflatten(2, (-1, size)).transpose(1, 2).split(SLAB, 1) if x.shape[2] else ():
        rows = [fmt.encode(row.to(dtype), dtype, parameters) for row in part]
        parts.append(fmt.decode(torch.stack(rows), x.shape[-1], size, dtype, parameters))
    return torch.cat(parts, 1).transpose(1, 2).flatten(2, 3) if parts else x
