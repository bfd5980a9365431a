"""The pages of a cache's rows, in all layers that have the same tokens in pages (`LayerSpec.paging`).

The layers share page numbers. Each has its own bytes, and its own table on its device, because compiled steps would take a
shared tensor for an alias. A change of numbers concerns all layers at once: first everything is allocated, then numbers and
layers change. So if memory runs out, nothing has changed, and the numbers of all layers are the same at any time. A change
that an interrupt (Ctrl-C) has ended between two layers is completed before anything else uses the numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from .layer_spec import LayerSpec
from .page_pool import Numbers, RowPages, Slab, locate, upload
from .paged_store import COUNTERS, SCRATCH, WINDOWS, LayerState, PagedStore, page_writes, read_pages, share_records

#: pages per row of a slab that a growing cache adds
SLAB_PAGES_PER_ROW = 8


class RowMemory:
    """The page numbers of a cache's rows, and their effect on the layers that have them.

    Stores belong to layers, and `join` their memory, which does not keep them alive. All methods concern the stores that
    have joined.

    Args:
        spec: one with the layers' paging.
        pages: the page numbers of the rows.
        capacity: tokens per row (preallocated, addresses never change), or `None` to grow by slabs.
    """

    def __init__(self, spec: LayerSpec, pages: RowPages, capacity: int | None):
        self.spec, self._pages, self.capacity = spec, pages, capacity
        self._stores: list[weakref.ref[PagedStore]] = []
        self._unfinished: Callable[[], None] | None = None
        self._count_room()

    @staticmethod
    def of(spec: LayerSpec, rows: int, capacity: int | None) -> RowMemory:
        """The memory of these many empty rows."""
        return RowMemory(spec, RowPages(rows, max(spec.pages_for(capacity or 0), 1)), capacity)

    def __getstate__(self):
        return self.spec, self.pages, self.capacity  # copies of stores join the copy

    def __setstate__(self, state):
        self.__init__(*state)  # type: ignore[misc]

    @property
    def pages(self) -> RowPages:
        self._complete()
        return self._pages

    def _complete(self) -> None:
        if self._unfinished is not None:
            self._unfinished()

    @property
    def stores(self) -> list[PagedStore]:
        return [store for ref in tuple(self._stores) if (store := ref()) is not None]

    def _count_room(self) -> None:
        #: tokens that a row can hold without more pages; a preallocated cache counts the tokens that it has no room for
        self.room = self.spec.room(self.pages.width) if self.capacity is None else math.inf

    @torch.inference_mode(False)
    def join(self, store: PagedStore) -> None:
        """Give an empty or copied store the tables of these rows, and memory for all slabs that it has not."""
        state = store.state
        pool = state.pool or self._pool(store, self.pages.slabs)
        numbers, address = upload(_placed([pool], self.pages.table), store.device)
        table, address = numbers.int(), address.clone()
        store.set_state(state._replace(pool=pool, page_table=table, page_address=address))
        self.add(store)

    def add(self, store: PagedStore) -> None:
        """Let a store with the tables of these rows follow them."""
        self._stores.append(weakref.ref(store, self._stores.remove))

    # ---- room -----------------------------------------------------------------------------------------------------

    def width_for(self, length: int) -> int:
        """Pages per row, as a growing cache adds them, for rows of `length` tokens."""
        missing = max(self.spec.pages_for(length) - self.pages.width, 0)
        return self.pages.width + -(-missing // SLAB_PAGES_PER_ROW) * SLAB_PAGES_PER_ROW

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens. A growing cache adds slabs; a preallocated one has the room already."""
        self._complete()
        if length > self.room:
            self.widen(self.width_for(length))

    def widen(self, pages: int) -> None:
        """Give every row at least this many pages; works for a preallocated cache too. Packed tokens are not copied."""
        if pages > self.pages.width:
            self._prepared(self.pages.widened(pages - self.pages.width))()

    def adopt(
        self,
        pools: Sequence[Sequence[torch.Tensor]],
        slabs: Sequence[Slab],
        table: np.ndarray,
        adopted: np.ndarray,
        width: int,
    ) -> None:
        """Let growing rows, which are empty, read the packed pages of these slabs.

        Args:
            pools: for each store, the slabs' pages, uint8 `[n, H, page_bytes]` each.
            slabs: those slabs.
            table: int64 `[B, P]`: page numbers, counted through these slabs.
            adopted: bool `[B, P]`: entries that use a page of `slabs`; the others get a page of a new slab.
            width: pages of each row, at least `P`.
        """
        more = max(self.pages.width, width) - table.shape[1]
        ids, full = (np.pad(x, ((0, 0), (0, more))) for x in (table, adopted))
        self._prepared(self.pages.adopting(slabs, ids, full), pools, slabs)()

    # ---- rows -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The rows are empty: release the pages that others use. Memory and addresses of a preallocated cache stay."""
        if not self.pages.exclusive or any(slab.owner is not self.pages for slab in self.pages.slabs):
            self._prepared(self.pages.emptied())()

    @torch.inference_mode(False)
    def selecting(self, rows: torch.Tensor) -> Callable[[], None]:
        """What makes row `b` a copy of row `rows[b]`. Everything is allocated before it is returned. Full pages are shared;
        windows and a partial page are copied. Waits for the device once.

        After its shared pages a row's table names free pages, which no row uses.
        """
        if self.capacity is not None and len(rows) != self.pages.rows:
            raise ValueError(
                f"a preallocated cache (max_cache_len={self.capacity}) is fixed to {self.pages.rows} rows; "
                f"{len(rows)} were requested. Use a growing cache, or repeat the prompt before the first call."
            )
        first = self.stores[0]
        numbers = torch.cat([rows.to(first.device).long(), first.state.paged[:, 0].long()]).cpu().numpy()
        chosen, paged = numbers[: len(rows)], numbers[len(rows) :]
        return self._prepared(self.pages.selected(paged[chosen], self.spec.page_size, chosen))

    def own_pages(self) -> None:
        """Give each table entry that names no full page a page that no other row refers to. Needed after `paged` was
        lowered, because later tokens are packed there. Waits for the device where pages are shared."""
        if not self.pages.exclusive:
            paged = self.stores[0].state.paged[:, 0].cpu().numpy().astype(np.int64)
            self._prepared(self.pages.selected(paged, self.spec.page_size))()

    # ---- changes --------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _prepared(
        self, numbers: Numbers, adopted: Sequence[Sequence[torch.Tensor]] = (), slabs: Sequence[Slab] = ()
    ) -> Callable[[], None]:
        """What gives the rows these page numbers in all layers. Everything is allocated before it is returned.

        Args:
            adopted, slabs: `pools` and `slabs` of `adopt`.
        """
        stores, present = self.stores, self.pages
        entries = present.entries(numbers)
        if numbers.rows is None and not len(entries[0]) and numbers.slabs == present.slabs:
            return functools.partial(present.set, numbers)  # most crops change no page number
        states: dict[PagedStore, LayerState] = {}
        writes = []
        for device, alike in _by_device(stores):
            pools: list[list[torch.Tensor]] = []
            for i, store in alike:
                pools.append(self._pool(store, numbers.slabs, adopted[i] if adopted else (), slabs))
            placed = upload(_placed(pools, numbers.table[entries]), device)
            rows, columns = upload(np.stack(entries), device)
            chosen = None if numbers.rows is None else upload(numbers.rows, device)
            for (_, store), pool, address in zip(alike, pools, placed[1:], strict=True):
                fields: dict[str, Any] = {
                    "page_table": _entries(store.state.page_table, numbers, chosen),
                    "page_address": _entries(store.state.page_address, numbers, chosen),
                }
                fields["page_table"][rows, columns] = placed[0].int()
                fields["page_address"][rows, columns] = address
                if chosen is not None:
                    fields |= {name: getattr(store.state, name)[chosen] for name in (*WINDOWS, *COUNTERS)}
                    if len(chosen) != store.batch_size:
                        fields["scratch"] = store.state.scratch.new_zeros(len(chosen) * store.num_heads * SCRATCH + 1)
                if len(numbers.copied[0]):
                    source, target = (upload(ids, device) for ids in numbers.copied)
                    writes += page_writes(pool, target, read_pages(pool, source))
                states[store] = store.state._replace(pool=pool, **fields)

        return functools.partial(self._change, numbers, states, writes)

    def _change(self, numbers: Numbers, states: dict[PagedStore, LayerState], writes: list[Any]) -> None:
        """Give the rows these numbers, and the stores these states. Done again from its beginning, it has the same effect."""
        self._unfinished = functools.partial(self._change, numbers, states, writes)
        for page, index, contents in writes:
            page[index] = contents
        self._pages.set(numbers)
        for store, state in states.items():
            store.set_state(state)
        self._unfinished = None
        self._count_room()

    def _pool(
        self,
        store: PagedStore,
        wanted: Sequence[Slab],
        adopted: Sequence[torch.Tensor] = (),
        slabs: Sequence[Slab] = (),
    ) -> list[torch.Tensor]:
        """A store's pages of these slabs: what it has, what it adopts (`adopted`, of `slabs`), and new memory."""
        known = dict(zip(self.pages.slabs, store.state.pool)) | dict(zip(slabs, adopted, strict=True))
        pool = []
        for slab in wanted:  # a comprehension would keep the store alive in the traceback, if memory runs out
            pool.append(known[slab] if slab in known else store.new_slab(len(slab)))
        return pool


def _by_device(stores: Sequence[PagedStore]) -> Iterator[tuple[torch.device, list[tuple[int, PagedStore]]]]:
    """The stores of each device, with their indices."""
    devices: dict[torch.device, list[tuple[int, PagedStore]]] = {}
    for index, store in enumerate(stores):
        devices.setdefault(store.device, []).append((index, store))
    yield from devices.items()


def page_addresses(pools: Sequence[list[torch.Tensor]], numbers: np.ndarray) -> np.ndarray:
    """int64 `[pools, *numbers.shape]`: where these pages start in each pool, in bytes from the start of its first slab."""
    slab, index = locate(pools[0], numbers)
    starts = np.zeros((len(pools), len(pools[0])), dtype=np.int64)
    for used in np.flatnonzero(np.bincount(slab.ravel())):  # a pool of requests may have many
        starts[:, used] = [pool[used].data_ptr() - pool[0].data_ptr() for pool in pools]
    sizes = np.array([pool[0].stride(0) for pool in pools], dtype=np.int64)
    return starts[:, slab] + sizes.reshape(-1, *[1] * numbers.ndim) * index


def _placed(pools: Sequence[list[torch.Tensor]], numbers: np.ndarray) -> np.ndarray:
    """int64 `[1 + pools, *numbers.shape]`: page numbers, and their `page_addresses`."""
    return np.stack([numbers.astype(np.int64), *page_addresses(pools, numbers)])


def _entries(tensor: torch.Tensor, numbers: Numbers, chosen: torch.Tensor | None) -> torch.Tensor:
    """A copy of a page table or of addresses `[B, P]` with the rows and the width of these numbers, zero-padded."""
    new = tensor.new_zeros(numbers.table.shape)
    new[:, : tensor.shape[1]] = tensor if chosen is None else tensor[chosen]
    return new


# ---- forks -------------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def fork_stores(stores: Sequence[PagedStore], capacity: int | None, n: int = 1) -> list[list[PagedStore]]:
    """`n` times a fork of each store. Full pages are shared, windows and partial pages are copied; later writes to
    one are not visible in the others. Waits for the device once. One call copies what all forks of all layers have of their
    own.

    Args:
        capacity: as for a new store. Not checked against the current length.
    """
    by_memory: dict[RowMemory, list[int]] = {}
    for index, store in enumerate(stores):
        by_memory.setdefault(store.memory, []).append(index)
    all_paged = _paged(stores)
    forks: list[list[Any]] = [[None] * len(stores) for _ in range(n)]
    for memory, indices in by_memory.items():
        spec, paged = memory.spec, np.stack([all_paged[index] for index in indices])
        # usually equal in all layers; after an interrupted pass some layers have packed more pages
        full, used = paged.min(0) // spec.page_size, -(-paged.max(0) // spec.page_size)
        width = max(int(full.max(initial=0)) + spec.direct, int(used.max(initial=0)), 1, spec.pages_for(capacity or 0))
        new = [RowMemory(spec, pages, capacity) for pages in memory.pages.fork(n, full, width)]
        column = np.arange(width)
        opened = ((column >= full[:, None]) & (column < used[:, None])).nonzero()
        alike: dict[tuple, list[int]] = {}
        for index in indices:
            alike.setdefault((stores[index].device, stores[index].dtype), []).append(index)
        for same in alike.values():
            for number, fork in enumerate(_forks([stores[index] for index in same], new, opened)):
                forks[number // len(same)][same[number % len(same)]] = fork
    for each in (store for of_fork in forks for store in of_fork):  # in the order of layers
        each.memory.add(each)
    return forks


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one dtype and device, each in memory of its own. A few launches copy them all, and one call
    allocates them, which takes a fraction of the time of separate calls."""
    if hasattr(torch, "_foreach_clone"):
        return list(torch._foreach_clone(tensors))
    return list(torch._foreach_mul(tensors, 1))  # releases before it; the product is exact


def _grouped(tensors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Groups of this many, in order."""
    return zip(*[iter(tensors)] * size, strict=True)


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
    stores: Sequence[PagedStore], memories: Sequence[RowMemory], opened: tuple[np.ndarray, np.ndarray]
) -> list[PagedStore]:
    """For each of these memories, forks of stores of one dtype on one device.

    Args:
        opened: row and column of pages that are used and not shared.
    """
    device, first, old = stores[0].device, memories[0].pages, stores[0].memory.pages
    states = [store.state for store in stores]
    known = [dict(zip(old.slabs, state.pool, strict=True)) for state in states]
    pools: list[list[torch.Tensor]] = []
    for slabs in (memory.pages.slabs for memory in memories):
        for state, own in zip(states, known, strict=True):
            shape = state.pool[0].shape[1:]
            pools.append(
                [
                    own[slab] if slab in own else torch.empty(len(slab), *shape, dtype=torch.uint8, device=device)
                    for slab in slabs
                ]
            )
    if first.slabs[0] not in known[0]:
        torch._foreach_zero_([pool[0] for pool in pools])
    entries = upload(first.table, device)

    windows = copies_of([x for state in states for x in attrgetter(*WINDOWS)(state)] * len(memories))
    counters = copies_of(
        [x for state in states for x in (*attrgetter(*COUNTERS)(state), state.scratch, entries)] * len(memories)
    )
    addresses = copies_of(list(upload(page_addresses(pools, first.table), device)))
    copies = zip(pools, addresses, _grouped(windows, len(WINDOWS)), _grouped(counters, len(COUNTERS) + 2), strict=True)
    forks = []
    for (memory, store), copied in zip(itertools.product(memories, stores), copies, strict=True):
        pool, address, (sink_k, sink_v, tail_k, tail_v), (length, paged, lost, scratch, table) = copied
        parameters = store.state.parameters
        state = LayerState(
            pool, table, address, sink_k, sink_v, tail_k, tail_v, length, paged, lost, scratch, parameters
        )
        forks.append(store.fork(state, memory))
    torch._foreach_zero_([fork.state.scratch for fork in forks])
    _, index = locate(first.slabs, first.table)
    for row, column in zip(*opened, strict=True):
        (source,), (at,) = locate(old.slabs, old.table[row, column : column + 1])
        pages = [state.pool[source][at] for state in states]
        torch._foreach_copy_([pool[0][index[row, column]] for pool in pools], pages * len(memories))
    for i, store in enumerate(stores):
        share_records([store, *forks[i :: len(stores)]])
    return forks
