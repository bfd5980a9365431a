"""A pool of rows: sequences that come and go, and share one slab of packed pages. Rows in use are always contiguous.

Rows in use are in slots 0 to n - 1. When a row leaves, the last row moves into its slot. So a decode step of all rows
runs on `state.rows(slice(0, n))`, with the kernels of an ordinary batch.

A row declares its maximum length, and enters only if enough pages for it are free. So no row is ever preempted. A page is
assigned when the row needs it. Until then it may hold a shared prefix.

A page has a number (`PagePool`). Numbers below the pool's size name its own pages. Slabs of kept prompts get higher numbers
while a row or a prefix has one of their pages: rows read them in place, and they are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from ..cache.contents import Contents, PackedLayer, PagedLayers
from ..storage.layer_spec import LayerSpec
from ..storage.page_pool import PagePool, locate
from ..storage.paged_store import PagedStore
from .ring_memory import RingShape
from .slot_memory import Pair, SlotMemory


@dataclass(eq=False)
class Row:
    """A sequence in the pool."""

    slot: int
    limit: int
    """its maximum length in tokens"""
    length: int = 0
    """tokens that are stored; the CPU counts them"""
    pages: dict[Hashable, list[int]] = field(default_factory=dict)
    """by paging, the row's pages in order"""
    paged: dict[Hashable, int] = field(default_factory=dict)
    """by paging, tokens that were in pages when the row began. With a shared prefix these may be more than `length` implies,
    and the row then has no recent tokens"""
    room: int = 0
    """lower bound of the tokens for which the row's pages suffice, so that most steps need not check its pages"""


@dataclass(frozen=True)
class Prefix:
    """Stored tokens with which a row may begin: full pages, the sink before them, and perhaps recent tokens. It holds no
    reference to the pages, so a row must adopt it before any page is released."""

    length: int
    """tokens: the sink's, the pages' and the window's"""
    pages: dict[Hashable, list[int]]
    """by paging, full pages"""
    sinks: list[Pair]
    """see `SlotMemory.set_window`"""
    tails: list[Pair] = field(default_factory=list)
    paged: dict[Hashable, int] = field(default_factory=dict)
    """by paging, tokens in pages; empty: all but the sink's"""
    opened: dict[Hashable, list[torch.Tensor]] = field(default_factory=dict)
    """by paging, the page after these if it is not full, see `SlotMemory.write_page`"""
    rings: list[Pair] = field(default_factory=list)
    """of each sliding layer, see `RingMemory.put`"""


class RowPool:
    """Assigns slots and pages to rows. Never waits for the device.

    Args:
        layers: of all packed layers of a model, a store with their sizes and parameters.
        slots: largest number of rows at once.
        tokens: tokens for which there are pages, all rows together.
        max_length: largest number of tokens of a single row.
        rings: of the model's sliding layers.
    """

    def __init__(
        self,
        layers: Sequence[PagedStore],
        slots: int,
        tokens: int,
        max_length: int,
        rings: Sequence[RingShape] = (),
    ):
        self.slots, self.max_length = slots, max_length
        self._specs: dict[Hashable, LayerSpec] = {layer.spec.paging: layer.spec for layer in layers}
        self.memory = SlotMemory(layers, slots, tokens, max_length, rings)
        self.page_pools = {group.paging: PagePool(group.pages.shape[1]) for group in self.memory.groups}
        self.rows: list[Row] = []
        self._due: dict[Hashable, list[tuple[int, int, int]]] = {paging: [] for paging in self._specs}

    # ---- room -----------------------------------------------------------------------------------------------------

    def missing(self, limit: int, prefix: Prefix | None = None, fork_of: Row | None = None) -> int:
        """How many pages are missing for one more row of up to `limit` tokens; 0: it fits. Slots are not considered.

        Args:
            prefix: the prefix that the row adopts.
            fork_of: the row in the pool whose full pages the new row shares.
        """
        shared = {} if prefix is None else prefix.pages
        if fork_of is not None:
            shared = self._full_pages(fork_of)
        pages_missing = 0
        for paging, spec in self._specs.items():
            unshared = max(spec.pages_for(limit) - len(shared.get(paging, ())), 0)
            pages_missing = max(pages_missing, unshared + self._promised(paging) - self.page_pools[paging].free)
        return pages_missing

    def _promised(self, paging: Hashable) -> int:
        """Number of free pages that rows in the pool will still get."""
        spec = self._specs[paging]
        return sum(max(spec.pages_for(row.limit) - len(row.pages[paging]), 0) for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that fits into the empty pool."""
        rooms = [spec.room(self.page_pools[paging].count) for paging, spec in self._specs.items()]
        return min(self.max_length, *rooms)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.rows)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def enter(self, limit: int, prefix: Prefix | None = None) -> Row:
        """A new row for up to `limit` tokens, in the slot after the last one. A slot must be free, and no page `missing`.

        Args:
            prefix: the prefix with which the row begins.
        """
        row = Row(len(self.rows), limit, pages={paging: [] for paging in self._specs})
        with self._entering(row):
            if prefix is not None:
                self.adopt(row, prefix)
        return row

    @contextmanager
    def _entering(self, row: Row) -> Iterator[None]:
        """The row enters, and leaves again if that ends in an exception, e.g. because memory runs out."""
        self.rows.append(row)
        try:
            yield
        except BaseException:
            self.leave(row)
            raise

    def admit(self, limit: int, find: Callable[[], Prefix | None], make_room: Callable[[int], object]) -> Row | None:
        """A new row for up to `limit` tokens; `None`: there are too few pages now. A slot must be free.

        Args:
            find: returns the longest known prefix with which the row may begin.
            make_room: releases kept pages until this many pages are free.
        """
        missing = self.missing(limit, prefix := find())
        if missing > 0:
            make_room(missing)
            # some of its pages may be gone, and slabs that it adopted were dropped
            missing = self.missing(limit, prefix := find())
        if missing <= 0:
            return self.enter(limit, prefix)
        self.drop_unread()
        return None

    def adopt(self, row: Row, prefix: Prefix) -> None:
        """Let an empty row begin with a prefix, whose full pages it shares."""
        assert row.length == 0
        self._share(row, prefix.pages)
        for paging, contents in prefix.opened.items():
            (page,) = self._own_pages(row, paging, 1)
            self.memory.write_page(paging, page, contents)
        row.paged = dict(prefix.paged) or {
            paging: max(prefix.length - spec.sink, 0) for paging, spec in self._specs.items()
        }
        self.memory.set_window(row.slot, prefix.length, row.paged, prefix.sinks, prefix.tails)
        self.memory.rings.put(row.slot, prefix.length, prefix.rings)
        row.length = prefix.length

    def extend(self, row: Row, tokens: int) -> None:
        """Give the row the pages that are due when it stores `tokens` more."""
        if row.length + tokens > row.limit:
            raise ValueError(f"tokens={tokens} do not fit: the row holds {row.length}, and its limit is {row.limit}")
        if row.length + tokens <= row.room:
            return
        for paging, spec in self._specs.items():
            self._own_pages(row, paging, spec.pages_for(row.length + tokens) - len(row.pages[paging]))
        row.room = min(spec.room(len(row.pages[paging])) for paging, spec in self._specs.items())

    def _own_pages(self, row: Row, paging: Hashable, count: int) -> list[int]:
        """Take free pages for the end of the row."""
        pages = self.page_pools[paging].take(count) if count > 0 else []
        self._append(row, paging, pages)
        return pages

    def _append(self, row: Row, paging: Hashable, pages: list[int]) -> None:
        first = len(row.pages[paging])
        self._due[paging] += [(row.slot, entry, page) for entry, page in enumerate(pages, first)]
        row.pages[paging] += pages

    def flush(self) -> None:
        """Write all new pages into the tables at once. Call this before a step or a chunk runs."""
        for paging, entries in self._due.items():
            if entries:
                self.memory.write_table(paging, entries)
                entries.clear()

    def fork(self, row: Row, limit: int) -> Row:
        """A new row with the tokens of another one, as for `enter`. Full pages are shared; the window and a partial page are
        copied."""
        self.flush()
        new = Row(len(self.rows), limit, row.length, {paging: [] for paging in self._specs}, dict(row.paged))
        with self._entering(new):
            self._share(new, full := self._full_pages(row))
            for paging, spec in self._specs.items():
                if (count := len(full[paging])) < spec.pages_for(row.length):  # a partial page
                    (page,) = self._own_pages(new, paging, 1)
                    self.memory.copy_page(paging, row.pages[paging][count], page)
            self.memory.copy_window(row.slot, new.slot)
        return new

    def _share(self, row: Row, pages: dict[Hashable, list[int]]) -> None:
        for paging, ids in pages.items():
            self.page_pools[paging].acquire(ids)
            self._append(row, paging, ids)

    def _full_pages(self, row: Row) -> dict[Hashable, list[int]]:
        """By paging, the pages of a row that are full."""
        pages = {}
        for paging, spec in self._specs.items():
            paged = max(spec.paged_after(row.length - spec.sink), row.paged.get(paging, 0))
            pages[paging] = row.pages[paging][: paged // spec.page_size]
        return pages

    def leave(self, row: Row) -> Row | None:
        """Free a row's slot and pages. Returns the row that moves into the slot, if any."""
        self.flush()
        last = self.rows.pop()
        if last is not row:
            self.memory.move(last.slot, row.slot)
            self.rows[row.slot] = last
        self.memory.empty(last.slot)
        if last is not row:
            last.slot = row.slot
        self.release(row.pages)
        row.slot, row.pages = -1, {}
        return None if last is row else last

    # ---- prefixes -------------------------------------------------------------------------------------------------

    def full_lengths(self, tokens: int) -> list[int]:
        """Lengths at which full pages end, for a row of `tokens` tokens, ascending. Empty if the layers' pages do not end at
        the same tokens."""
        if len(self._specs) > 1:
            return []
        (spec,) = self._specs.values()
        count = spec.paged_after(tokens - spec.sink) // spec.page_size
        return [spec.sink + page * spec.page_size for page in range(1, count + 1)]

    def release(self, pages: dict[Hashable, list[int]]) -> int:
        """Release a reference to each of these pages, by paging. Returns the number of pages of the pool that became free."""
        freed = sum(self.page_pools[paging].release(numbers) for paging, numbers in pages.items())
        self.drop_unread()
        return freed

    # ---- kept prompts -----------------------------------------------------------------------------------------------

    def kept(self, contents: Contents, rings: Sequence[Pair] = ()) -> Prefix:
        """A kept prompt as a prefix for a row. The pool adopts the slabs of its full pages, copies none, and drops
        them again unless a row adopts the prefix at once.

        Args:
            contents: the prompt's (one row).
            rings: see `Prefix`.
        """
        stores = self.memory.stores
        layers = [layer.to(store.device) for layer, store in zip(contents.layers.values(), stores, strict=True)]
        prefix = Prefix(int(contents.lengths[0]), {}, [], rings=list(rings))
        for paging, group in contents.groups.items():
            prefix.paged[paging] = int(group.paged[0])
            prefix.pages[paging], opened = self._adopt_slabs(paging, group, layers)
            if opened:
                prefix.opened[paging] = opened
        for alike in self.memory.groups:
            windows = zip(*(layers[i].windows for i in alike.layers), strict=True)
            sink_k, sink_v, tail_k, tail_v = (torch.stack(of_layers) for of_layers in windows)
            prefix.sinks.append((sink_k, sink_v))
            prefix.tails.append((tail_k, tail_v))
        return prefix

    def _adopt_slabs(
        self, paging: Hashable, group: PagedLayers, layers: Sequence[PackedLayer]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Adopt the slabs of a kept prompt's full pages. Returns the numbers of these pages; and of each layer the page after
        them, if there is one.

        Args:
            group: the layers with this paging.
            layers: of the prompt, all of them.
        """
        indices, pool = self.memory.layers_of(paging), self.page_pools[paging]
        slabs, places = locate(group.slabs, group.table[group.present])
        full = int(group.paged[0]) // group.spec.page_size
        firsts = {}
        for number in np.unique(slabs[:full]).tolist():
            slab = group.slabs[number]
            if slab not in pool.acquired:
                pages = [self._in_layout(i, layers[i], number) for i in indices]
                self.memory.adopt(paging, pool.adopt(slab), pages)
            firsts[number] = pool.first_page(pool.slabs.index(slab))
        located = list(zip(slabs.tolist(), places.tolist(), strict=True))
        opened = [
            self._in_layout(i, layers[i], number, slice(place, place + 1))[0]
            for number, place in located[full:]
            for i in indices
        ]
        return [firsts[number] + place for number, place in located[:full]], opened

    def _in_layout(self, index: int, layer: PackedLayer, slab: int, pages: slice = slice(None)) -> torch.Tensor:
        """A slab of a layer, or pages of it, in the layout of the pool."""
        return layer._replace(slabs=[layer.slabs[slab][pages]]).in_layout_of(self.memory.stores[index].spec).slabs[0]

    def idle_bytes(self, more_than: float) -> int:
        """Bytes of adopted slabs that no row reads; 0 if all adopted slabs together have at most `more_than` bytes."""
        sizes = {
            paging: sum(group.pages[:, 0].nbytes for group in self.memory.groups if group.paging == paging)
            for paging in self._specs
        }
        adopted = [(slab, paging) for paging, pages in self.page_pools.items() for slab in pages.adopted]
        if sum(len(slab) * sizes[paging] for slab, paging in adopted) <= more_than:
            return 0
        read = {
            self.page_pools[paging].slabs[number]
            for row in self.rows
            for paging, pages in row.pages.items()
            for number in {*locate(self.page_pools[paging].slabs, np.array(pages, dtype=np.int64))[0].tolist()}
        }
        return sum(len(slab) * sizes[paging] for slab, paging in adopted if slab not in read)

    def drop_unread(self) -> None:
        """Drop the adopted slabs whose pages have no reference in this pool."""
        for paging, pages in self.page_pools.items():
            for index in pages.drop_unread():
                self.memory.drop(paging, index)

    def free(self) -> None:
        """Free all memory. The pool cannot be used afterwards."""
        self.page_pools.clear()
        self.memory.groups.clear()
        self.memory.stores.clear()
        self.memory.tables.clear()
        self.memory.rings.clear()
        self.rows.clear()
