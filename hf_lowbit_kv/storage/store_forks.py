"""Forks of stores: others with the same tokens, which share full pages with the stores they came from.

A cache forks the stores of all its layers at once, `n` times. The CPU waits for the device once, plans once
for all layers whose tables agree (as a rule all do), and lets one call copy what all forks of all layers have of their own.
It plans with NumPy: PyTorch's small operations take longer, and share larger ones out to threads that other work may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from .paged_store import LayerState, PagedStore
from .shared_pages import Holding, mask_of

#: of a fork, copies of its own: in the model's dtype, and int32
_WINDOWS = ("sink_k", "sink_v", "tail_k", "tail_v")
_COUNTERS = ("length", "paged", "lost", "scratch")


class _ForkPlan(NamedTuple):
    """Contents of a fork of `B` rows, with `P` pages per row."""

    shared: list[tuple[int, int]]
    """places in the pool of blocks with pages that are shared, and which pages (`shared_pages.mask_of`)"""
    new_pages: int
    """pages of its own: a block before the shared ones"""
    entries: np.ndarray
    """int32 `[B, P]`: its page table"""
    blocks: np.ndarray
    """int64 `[B, P]`: in which of its blocks that page is"""
    places: np.ndarray
    """int64 `[B, P]`: which page of that block"""
    open_pages: list[tuple[int, int, int]]
    """pages that are not full: place of the block in the pool, of the page in the block, and the fork's own page"""


@torch.inference_mode(False)
def fork_stores(stores: Sequence[PagedStore], capacity: int | None, n: int = 1) -> list[list[PagedStore]]:
    """`n` times a fork of each store. Full pages are shared, windows and open pages are copied; later writes to
    one are not visible in the others. Waits for the device once.

    Args:
        capacity: as for a new store. Not checked against the current length.
    """
    alike: dict[tuple, list[int]] = {}
    tables = _tables(stores)
    for index, (store, (table, paged)) in enumerate(zip(stores, tables, strict=True)):
        pages = (
            store.spec.page_size,
            store.spec.direct,
            store.spec.pages_for(capacity or 0),
            *map(len, store.state.pool),
        )
        key = store.device, store.dtype, pages, table.shape, table.tobytes(), paged.tobytes()
        alike.setdefault(key, []).append(index)
    forks: list[list[Any]] = [[None] * len(stores) for _ in range(n)]
    for indices in alike.values():
        plan = _planned(stores[indices[0]], *tables[indices[0]], capacity)
        for number, fork in enumerate(_forks([stores[index] for index in indices], plan, capacity, n)):
            forks[number // len(indices)][indices[number % len(indices)]] = fork
    return forks


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one dtype and device, each in memory of its own. A few launches copy them all, and one call
    allocates them, which takes a fraction of the time that as many calls take."""
    if hasattr(torch, "_foreach_clone"):
        return list(torch._foreach_clone(tensors))
    return list(torch._foreach_mul(tensors, 1))  # releases before it; the product is exact


def _tables(stores: Sequence[PagedStore]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each store, int32 on the CPU: its page table `[B, P]`, and how many tokens of each row are in pages `[B]`."""
    parts: dict[tuple, list[torch.Tensor]] = {}
    for store in stores:
        parts.setdefault((store.device, store.batch_size), []).extend((store.state.page_table, store.state.paged))
    on_cpu = {key: torch.cat(tensors, dim=1).cpu().numpy() for key, tensors in parts.items()}
    first = dict.fromkeys(on_cpu, 0)
    out = []
    for store in stores:
        key = store.device, store.batch_size
        middle = first[key] + store.pages_per_row
        out.append((on_cpu[key][:, first[key] : middle], on_cpu[key][:, middle]))
        first[key] = middle + store.num_heads
    return out


def _planned(store: PagedStore, table: np.ndarray, paged: np.ndarray, capacity: int | None) -> _ForkPlan:
    size, direct = store.spec.page_size, store.spec.direct
    full = paged // size
    width = max(int(full.max(initial=0)) + direct, 1, store.spec.pages_for(capacity or 0))
    shared = np.arange(width) < full[:, None]
    own = ~shared
    new_pages = max(int(own.sum()), 0 if shared.any() else 1)  # without rows, too, a store has a block
    ids = table[:, :width][shared[:, : table.shape[1]]]
    named = np.zeros(store.num_pages, dtype=bool)
    named[ids] = True

    # by page of the store: its block in the store, its place there, its block in the fork, its number in the fork
    pages = np.zeros((4, store.num_pages), dtype=np.int64)
    kept: list[tuple[int, int]] = []
    first, number = 0, new_pages
    for place, block in enumerate(store.state.pool):
        count = len(block)
        in_block = slice(first, first + count)
        pages[0, in_block], pages[1, in_block] = place, np.arange(count)
        if mask := mask_of(named[in_block]):
            pages[2, in_block], pages[3, in_block] = len(kept) + (new_pages > 0), np.arange(number, number + count)
            kept.append((place, mask))
            number += count
        first += count
    blocks, places, entries = (np.zeros(shared.shape, dtype=np.int64) for _ in range(3))
    places[own] = entries[own] = np.arange(own.sum())
    places[shared], blocks[shared], entries[shared] = pages[1:, ids]

    open_pages = []
    for row in (paged % size).nonzero()[0].tolist() if direct else ():
        page = table[row, full[row]]
        open_pages.append((int(pages[0, page]), int(pages[1, page]), int(places[row, full[row]])))
    return _ForkPlan(kept, new_pages, entries.astype(np.int32), blocks, places, open_pages)


def _forks(stores: Sequence[PagedStore], plan: _ForkPlan, capacity: int | None, n: int) -> list[PagedStore]:
    """`n` times forks of stores of one dtype on one device whose tables agree."""
    device = stores[0].device
    states = [store.state for store in stores]
    pools: list[list[torch.Tensor]] = []
    for state in states * n:
        shape = plan.new_pages, *state.pool[0].shape[1:]
        new_block = [torch.empty(shape, dtype=torch.uint8, device=device)] if plan.new_pages else []
        pools.append([*new_block, *(state.pool[place] for place, _ in plan.shared)])

    starts = np.array([[block.data_ptr() for block in pool] for pool in pools])
    sizes = np.array([state.pool[0].stride(0) for state in states] * n)
    addresses = (starts - starts[:, :1])[:, plan.blocks] + sizes[:, None, None] * plan.places
    entries = torch.from_numpy(plan.entries).to(device)

    windows = copies_of([x for state in states for x in attrgetter(*_WINDOWS)(state)] * n)
    counters = copies_of([x for state in states for x in (*attrgetter(*_COUNTERS)(state), entries)] * n)
    page_addresses = copies_of(list(torch.from_numpy(addresses).to(device)))
    new_states = []
    for i, (pool, page_address) in enumerate(zip(pools, page_addresses, strict=True)):
        sink_k, sink_v, tail_k, tail_v = windows[4 * i : 4 * i + 4]
        length, paged, lost, scratch, table = counters[5 * i : 5 * i + 5]
        window, counts = (sink_k, sink_v, tail_k, tail_v), (length, paged, lost)
        parameters = states[i % len(states)].parameters
        new_states.append(LayerState(pool, table, page_address, *window, *counts, scratch, parameters))
    torch._foreach_zero_(counters[3::5])  # scratch
    if plan.new_pages:
        torch._foreach_zero_([pool[0] for pool in pools])
    for page_of, page, copy_of_page in plan.open_pages:
        own_pages = [pool[0][copy_of_page] for pool in pools]
        torch._foreach_copy_(own_pages, [state.pool[page_of][page] for state in states] * n)
    forks = [_fork(store, state, capacity) for store, state in zip([*stores] * n, new_states, strict=True)]
    for i, store in enumerate(stores):
        holdings = [fork.holding for fork in forks[i :: len(stores)]]
        store.holding.share(holdings, [(store.state.pool[place], pages) for place, pages in plan.shared])
        for record in store.state.parameters:
            for holding in (store.holding, *holdings):
                holding.read(record)
    return forks


def _fork(store: PagedStore, state: LayerState, capacity: int | None) -> PagedStore:
    new = type(store).__new__(type(store))
    new.__dict__.update(store.__dict__)
    new.capacity, new.holding, new.state, new._in_order = capacity, Holding(), state, False
    if capacity is not None:
        new._mark_static()
    return new
