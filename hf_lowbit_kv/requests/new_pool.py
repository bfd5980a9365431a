"""A pool of rows for a model, as large as the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cache.low_bit_cache import LowBitCache
from .memory_budget import USABLE, activation_bytes, free_memory, pool_size
from .pool_steps import PoolSteps, read_once, stored_layers
from .row_pool import RowPool
from .shared_prefixes import SharedPrefixes


def new_pool(
    model: Any,
    make_cache: Callable[[int], LowBitCache],
    chunk_size: int,
    *,
    memory: int | None = None,
    share: float = USABLE,
    limits: Sequence[int] | None = None,
    max_rows: int | None = None,
    tokens: int | None = None,
    share_prefixes: bool = True,
    record: bool = True,
    agree: Callable[[list[int]], list[int]] = list,
) -> tuple[PoolSteps, SharedPrefixes | None]:
    """Find out how much memory there is, and allocate a pool.

    Args:
        model: unwrapped, with our attention implementation selected. make_cache: makes an empty cache for so many tokens.
        chunk_size: tokens of a prompt that are read at a time.
        memory: bytes; `None`: the part `share` of what is free once a chunk was read.
        limits, max_rows: see `pool_size`. tokens: for which there are pages, instead of what `memory` has room for.
        record: whether decode steps are recorded where the device has graphs.
        agree: under tensor parallelism, the least of these numbers over all ranks: all must have the same pool.

    Raises:
        ValueError: there is no room for a single row.
    """
    # on a CPU nothing is to be learned from reading a whole chunk
    read = max(chunk_size, 2) if model.device.type == "cuda" else 2
    template = make_cache(read)
    needed = activation_bytes(model.device, lambda: read_once(model, template, read))
    layers = stored_layers(template)
    for layer in template.packed_layers:
        layer.store = None  # the rows of the pool take its place
    if memory is None:
        memory = int(share * max(free_memory(model.device) - needed, 0))
    longest = getattr(model.config, "max_position_embeddings", None)
    size = pool_size(layers, memory, limits, longest, max_rows, share_prefixes)
    pool = RowPool(layers, *agree([size.slots, tokens or size.tokens, size.max_length]))
    prefixes = SharedPrefixes(pool, pool.slots) if share_prefixes else None
    return PoolSteps(model, template, pool, record), prefixes
