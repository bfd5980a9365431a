"""Forks of stores: others with the same tokens, which share full pages with the stores they came from.

A cache forks the stores of all its layers at once. The CPU waits for the device once, plans once for all layers whose tables
agree (as a rule all do), and launches the copies of windows and tables together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .paged_store import LayerState, PagedStore
from .shared_pages import Holding, mask_of

#: of a fork, copies of its own
_CLONED = ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged", "lost")


class _ForkPlan(NamedTuple):
    """What a fork of `B` rows consists of, with `P` pages a row. On the CPU."""

    shared: list[tuple[int, int]]
    """places in the pool of blocks with pages that are shared, and which pages (`shared_pages.mask_of`)"""
    new_pages: int
    """pages of its own: a block that stands in front of the shared ones"""
    entries: torch.Tensor
    """int32 `[B, P]`: its page table"""
    blocks: torch.Tensor
    """int64 `[B, P]`: in which of its blocks that page is"""
    places: torch.Tensor
    """int64 `[B, P]`: which page of that block"""
    open_pages: list[tuple[int, int, int]]
    """pages that are not full: place of the block in the pool, of the page in the block, and the fork's own page"""


@torch.inference_mode(False)
def fork_stores(stores: Sequence[PagedStore], capacity: int | None) -> list[PagedStore]:
    """A fork of each store. Full pages are shared, windows and open pages are copied; what is stored in one of the two from now
    on does not show in the other. Waits for the device once.

    Args:
        capacity: as for a new store. Nothing says so where a row holds more tokens already.
    """
    alike: dict[tuple, list[int]] = {}
    tables: dict[tuple, torch.Tensor] = {}
    for index, (store, told) in enumerate(zip(stores, _tables(stores), strict=True)):
        blocks = tuple(block.shape[0] for block in store.state.pool)
        page = store.spec.page_size, store.spec.direct, store.spec.pages_for(capacity or 0)
        key = store.device, blocks, page, told.shape, told.numpy().tobytes()
        alike.setdefault(key, []).append(index)
        tables[key] = told
    forks: list[PagedStore | None] = [None] * len(stores)
    for key, indices in alike.items():
        stores_alike = [stores[index] for index in indices]
        for index, fork in zip(
            indices, _forks(stores_alike, _planned(stores_alike[0], tables[key], capacity), capacity), strict=True
        ):
            forks[index] = fork
    return [fork for fork in forks if fork is not None]


def _tables(stores: Sequence[PagedStore]) -> list[torch.Tensor]:
    """Of each store, int32 `[B, P + 1]` on the CPU: its page table, and how many tokens stand in pages."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for store in stores:
        parts.setdefault(store.device, []).extend((store.state.page_table.flatten(), store.state.paged[:, 0]))
    arrived = {
        device: iter(torch.cat(tables).cpu().split([len(part) for part in tables])) for device, tables in parts.items()
    }
    out = []
    for store in stores:
        table, paged = next(arrived[store.device]), next(arrived[store.device])
        out.append(torch.cat([table.view(store.batch_size, -1), paged[:, None]], dim=1))
    return out


def _planned(store: PagedStore, told: torch.Tensor, capacity: int | None) -> _ForkPlan:
    size, direct = store.spec.page_size, store.spec.direct
    table, paged = told[:, :-1].long(), told[:, -1].long()
    full = paged // size
    width = max(int(full.max()) + direct, 1, store.spec.pages_for(capacity or 0))
    shared = torch.arange(width) < full[:, None]
    new_pages = int((~shared).sum())
    ids = table[:, :width][shared[:, : table.shape[1]]]
    named = torch.zeros(store.num_pages, dtype=torch.bool)
    named[ids] = True

    # by page of the store: its block in the store, its place there, its block in the fork, its number in the fork
    pages = torch.zeros(4, store.num_pages, dtype=torch.int64)
    kept: list[tuple[int, int]] = []
    first, number = 0, new_pages
    for place, block in enumerate(store.state.pool):
        count = block.shape[0]
        here = slice(first, first + count)
        pages[0, here], pages[1, here] = place, torch.arange(count)
        if mask := mask_of(named[here]):
            pages[2, here], pages[3, here] = len(kept) + (new_pages > 0), torch.arange(number, number + count)
            kept.append((place, mask))
            number += count
        first += count
    blocks, places, entries = (torch.zeros(shared.shape, dtype=torch.int64) for _ in range(3))
    places[~shared] = entries[~shared] = torch.arange(new_pages)
    places[shared], blocks[shared], entries[shared] = pages[1:, ids]

    open_pages = []
    for row in (paged % size).nonzero()[:, 0].tolist() if direct else ():
        page = table[row, full[row]]
        open_pages.append((int(pages[0, page]), int(pages[1, page]), int(places[row, full[row]])))
    return _ForkPlan(kept, new_pages, entries.int(), blocks, places, open_pages)


def _forks(stores: Sequence[PagedStore], plan: _ForkPlan, capacity: int | None) -> list[PagedStore]:
    """Forks of stores on one device whose tables agree."""
    device = stores[0].device
    states = [_allocated(store, plan, device) for store in stores]
    starts = np.array([[block.data_ptr() - state.pool[0].data_ptr() for block in state.pool] for state in states])
    sizes = np.array([state.pool[0].stride(0) for state in states])
    # in NumPy: PyTorch would do this with all threads, which takes 5 ms where other work keeps them busy
    at = starts[:, plan.blocks.numpy()] + sizes[:, None, None] * plan.places.numpy()
    addresses = torch.from_numpy(at).to(device)
    entries = plan.entries.to(device)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for store, state, address in zip(stores, states, addresses, strict=True):
        copies += [(getattr(state, name), getattr(store.state, name)) for name in _CLONED]
        copies += [
            (state.pool[0][copy_of_page], store.state.pool[block][page])
            for block, page, copy_of_page in plan.open_pages
        ]
        copies += [(state.page_table, entries), (state.page_address, address)]
    _zero([x for state in states for x in (state.scratch, *state.pool[: plan.new_pages > 0])])
    _copy(copies)
    return [_fork(store, state, plan, capacity) for store, state in zip(stores, states, strict=True)]


def _zero(tensors: Sequence[torch.Tensor]) -> None:
    for dtype in {x.dtype for x in tensors}:
        torch._foreach_zero_([x for x in tensors if x.dtype == dtype])


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to, from: a few launches for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in copies:
        if target.numel():
            targets, sources = by_dtype.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


def _allocated(store: PagedStore, plan: _ForkPlan, device: torch.device) -> LayerState:
    """The state of a fork. What it does not share with the store is memory that nobody has written to yet."""
    old = store.state
    pool = [old.pool[place] for place, _ in plan.shared]
    if plan.new_pages:
        pool.insert(0, torch.empty((plan.new_pages, *old.pool[0].shape[1:]), dtype=torch.uint8, device=device))
    cloned: dict[str, Any] = {name: torch.empty_like(getattr(old, name)) for name in _CLONED}
    return old._replace(
        pool=pool,
        page_table=torch.empty(plan.entries.shape, dtype=torch.int32, device=device),
        page_address=torch.empty(plan.entries.shape, dtype=torch.int64, device=device),
        scratch=torch.empty_like(old.scratch),
        **cloned,
    )


def _fork(store: PagedStore, state: LayerState, plan: _ForkPlan, capacity: int | None) -> PagedStore:
    new = type(store).__new__(type(store))
    new.__dict__.update(store.__dict__)
    new.capacity, new.holding, new.state, new._in_order = capacity, Holding(), state, False
    for place, pages in plan.shared:
        store.holding.share(new.holding, store.state.pool[place], pages)
    for record in state.parameters:
        store.holding.read(record)
        new.holding.read(record)
    if capacity is not None:
        new._mark_static()
    return new
