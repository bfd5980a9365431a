"""A pool of rows for a model, as large as the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cache.low_bit_cache import LowBitCache
from .memory_budget import USABLE, activation_bytes, free_memory, pool_size
from .pool_models import longest_row
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
    """Measure the free memory, and allocate a pool.

    Args:
        model: unwrapped, with our attention implementation selected. make_cache: makes an empty cache for this many
            tokens.
        chunk_size: tokens of a prompt that are read at a time.
        memory: bytes; `None`: the part `share` of the memory that is free after a chunk was read.
        limits, max_rows: see `pool_size`. tokens: allocate pages for this many tokens, instead of as many as fit into
            `memory`.
        record: whether decode steps are recorded if the device has CUDA graphs.
        agree: under tensor parallelism, returns the minimum of these numbers over all ranks, so that all have the same
            pool.

    Raises:
        ValueError: there is no room for a single row.
    """
    # on a CPU, reading a whole chunk would show nothing about memory
    read = max(chunk_size, 2) if model.device.type == "cuda" else 2
    template = make_cache(read)
    needed = activation_bytes(model.device, lambda: read_once(model, template, read))
    layers = stored_layers(template)
    for layer in template.packed_layers:
        layer.store = None  # the rows of the pool take its place
    if memory is None:
        memory = int(share * max(free_memory(model.device) - needed, 0))
    size = pool_size(layers, memory, limits, longest_row(model), max_rows, share_prefixes)
    pool = RowPool(layers, *agree([size.slots, tokens or size.tokens, size.max_length]))
    prefixes = SharedPrefixes(pool, pool.slots) if share_prefixes else None
    return PoolSteps(model, template, pool, record), prefixes
