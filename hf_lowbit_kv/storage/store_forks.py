"""Forks of stores: others with the same tokens, which share full pages with the stores they came from.

A cache forks the stores of all its layers at once, `n` times. The CPU waits for the device once, numbers pages once for all
layers with the same paging, and lets one call copy what all forks of all layers have of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from .page_pool import PageTables, upload
from .paged_store import LayerState, PagedStore, share_records

#: of a fork, copies of its own: in the model's dtype, and int32
_WINDOWS = ("sink_k", "sink_v", "tail_k", "tail_v")
_COUNTERS = ("length", "paged", "lost", "scratch")


@torch.inference_mode(False)
def fork_stores(stores: Sequence[PagedStore], capacity: int | None, n: int = 1) -> list[list[PagedStore]]:
    """`n` times a fork of each store. Full pages are shared, windows and partial pages are copied; later writes to
    one are not visible in the others. Waits for the device once.

    Args:
        capacity: as for a new store. Not checked against the current length.
    """
    by_tables: dict[PageTables, list[int]] = {}
    for index, store in enumerate(stores):
        by_tables.setdefault(store.tables, []).append(index)
    all_paged = _paged(stores)
    forks: list[list[Any]] = [[None] * len(stores) for _ in range(n)]
    for tables, indices in by_tables.items():
        spec, paged = stores[indices[0]].spec, np.stack([all_paged[index] for index in indices])
        # usually equal in all layers; after an interrupted pass some layers have packed more pages
        full, used = paged.min(0) // spec.page_size, -(-paged.max(0) // spec.page_size)
        width = max(int(full.max(initial=0)) + spec.direct, int(used.max(initial=0)), 1, spec.pages_for(capacity or 0))
        new = tables.fork(n, full, width)
        column = np.arange(width)
        opened = ((column >= full[:, None]) & (column < used[:, None])).nonzero()
        alike: dict[tuple, list[int]] = {}
        for index in indices:
            alike.setdefault((stores[index].device, stores[index].dtype), []).append(index)
        for same in alike.values():
            for number, fork in enumerate(_forks([stores[index] for index in same], new, opened, capacity)):
                forks[number // len(same)][same[number % len(same)]] = fork
    return forks


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one dtype and device, each in memory of its own. A few launches copy them all, and one call
    allocates them, which takes a fraction of the time of separate calls."""
    if hasattr(torch, "_foreach_clone"):
        return list(torch._foreach_clone(tensors))
    return list(torch._foreach_mul(tensors, 1))  # releases before it; the product is exact


def _paged(stores: Sequence[PagedStore]) -> list[np.ndarray]:
    """For each store, int32 `[B]` on the CPU: how many tokens of each row are in pages."""
    alike: dict[tuple, list[PagedStore]] = {}
    for store in stores:
        alike.setdefault((store.device, store.batch_size), []).append(store)
    paged: dict[PagedStore, np.ndarray] = {}
    for same in alike.values():
        columns = torch.cat([store.state.paged for store in same], dim=1).cpu().numpy().T
        firsts = np.cumsum([0, *(store.num_heads for store in same[:-1])])
        paged.update(zip(same, columns[firsts], strict=True))
    return [paged[store] for store in stores]


def _forks(
    stores: Sequence[PagedStore],
    tables: Sequence[PageTables],
    opened: tuple[np.ndarray, np.ndarray],
    capacity: int | None,
) -> list[PagedStore]:
    """For each of these tables, forks of stores of one dtype on one device.

    Args:
        opened: row and column of pages that are used and not shared.
    """
    device, first = stores[0].device, tables[0]
    states = [store.state for store in stores]
    memory = [dict(zip(store._slabs, store.state.pool, strict=True)) for store in stores]
    pools: list[list[torch.Tensor]] = []
    for each in tables:
        for state, known in zip(states, memory, strict=True):
            shape = state.pool[0].shape[1:]
            pools.append(
                [
                    known[slab] if slab in known else torch.empty(len(slab), *shape, dtype=torch.uint8, device=device)
                    for slab in each.slabs
                ]
            )
    slab, index = first.locate(first.table)
    starts = np.array([[part.data_ptr() for part in pool] for pool in pools])
    sizes = np.array([state.pool[0].stride(0) for state in states] * len(tables))
    addresses = (starts - starts[:, :1])[:, slab] + sizes[:, None, None] * index
    entries = upload(first.table, device)

    windows = copies_of([x for state in states for x in attrgetter(*_WINDOWS)(state)] * len(tables))
    counters = copies_of([x for state in states for x in (*attrgetter(*_COUNTERS)(state), entries)] * len(tables))
    page_addresses = copies_of(list(upload(addresses, device)))
    new_states = []
    for i, (pool, page_address) in enumerate(zip(pools, page_addresses, strict=True)):
        sink_k, sink_v, tail_k, tail_v = windows[4 * i : 4 * i + 4]
        length, paged, lost, scratch, table = counters[5 * i : 5 * i + 5]
        window, counts = (sink_k, sink_v, tail_k, tail_v), (length, paged, lost)
        parameters = states[i % len(states)].parameters
        new_states.append(LayerState(pool, table, page_address, *window, *counts, scratch, parameters))
    torch._foreach_zero_(counters[3::5])  # scratch
    if first.slabs[0] not in memory[0]:
        torch._foreach_zero_([pool[0] for pool in pools])
    before = stores[0].tables.table
    for row, column in zip(*opened, strict=True):
        (source,), (at,) = stores[0].tables.locate(before[row, column : column + 1])
        pages = [state.pool[source][at] for state in states if source < len(state.pool)]
        if len(pages) == len(states):
            torch._foreach_copy_([pool[0][index[row, column]] for pool in pools], pages * len(tables))
    forks = [
        _fork(store, state, each, capacity)
        for each, of_fork in zip(tables, _parts(new_states, len(stores)), strict=True)
        for store, state in zip(stores, of_fork, strict=True)
    ]
    for i, store in enumerate(stores):
        share_records([store, *forks[i :: len(stores)]])
    return forks


def _parts(states: list[LayerState], size: int) -> list[list[LayerState]]:
    return [states[start : start + size] for start in range(0, len(states), size)]


def _fork(store: PagedStore, state: LayerState, tables: PageTables, capacity: int | None) -> PagedStore:
    new = type(store).__new__(type(store))
    new.__dict__.update(store.__dict__)
    new.capacity, new.state, new.tables = capacity, state, tables
    new._slabs, new._version = list(tables.slabs), tables.version
    if capacity is not None:
        new._mark_static()
    return new
