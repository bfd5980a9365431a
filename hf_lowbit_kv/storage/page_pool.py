"""Page numbers: which pages are free, how many references the others have, and which pages a row of a batch has.

A full page is never written to, so rows, caches, kept prompts and requests share it: each of them has a reference, and a page
without references is free. Layers with the same paging have the same tokens in pages, so they share numbers and counts, and
only their memory differs: `Slab` i of a pool is item i of the list `LayerState.pool` of each of these layers.

When Python collects a `PageUser`, in whatever thread, its references are released.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

#: reentrant, because an object may be collected, and release its pages, while another one holds the lock
_lock = threading.RLock()


class Slab:
    """Pages that were allocated together, and the number of references to each. Each layer has one tensor for them."""

    def __init__(self, pages: int):
        self.references = np.zeros(pages, dtype=np.int32)
        self._users: list[weakref.ref[PageUser]] = []

    def __len__(self) -> int:
        return len(self.references)

    def __getstate__(self) -> int:
        return len(self)  # users that are copied with the slab have references to the copied slab

    def __setstate__(self, pages: int) -> None:
        self.__init__(pages)  # type: ignore[misc]

    @property
    def owner(self) -> PageUser | None:
        """The oldest living user. The slab's memory is counted for it, and only it takes the slab's free pages."""
        with _lock:
            return next((user for ref in tuple(self._users) if (user := ref()) is not None), None)

    def join(self, user: PageUser) -> None:
        self._users.append(weakref.ref(user, self._users.remove))


class PageUser:
    """Owns references to pages of slabs. Garbage collection releases them."""

    def __init__(self) -> None:
        #: by slab, int32 `[pages]`
        self.acquired: dict[Slab, np.ndarray] = {}
        weakref.finalize(self, _release, self.acquired).atexit = False

    def set_references(self, acquired: dict[Slab, np.ndarray], counts_memory: bool = True) -> None:
        """Have these references instead of the present ones.

        Args:
            counts_memory: whether the slabs' memory may be counted for this object.
        """
        with _lock:
            for slab, counts in acquired.items():
                if slab not in self.acquired:
                    self.acquired[slab] = np.zeros_like(counts)
                    if counts_memory:
                        slab.join(self)
                slab.references += counts - self.acquired[slab]
                self.acquired[slab] = counts
            for slab in [slab for slab in self.acquired if slab not in acquired]:
                slab.references -= self.acquired.pop(slab)
                slab._users[:] = [ref for ref in slab._users if ref() is not self]


def _release(acquired: dict[Slab, np.ndarray]) -> None:
    with _lock:
        while acquired:
            slab, counts = acquired.popitem()
            slab.references -= counts


def references_in(slabs: Sequence[Slab], table: np.ndarray) -> dict[Slab, np.ndarray]:
    """By slab, how often a table names each of its pages: int32 `[pages]`. Numbers count through the slabs."""
    counts = np.bincount(table.ravel(), minlength=sum(map(len, slabs))).astype(np.int32)
    return dict(zip(slabs, np.split(counts, np.cumsum([len(slab) for slab in slabs])[:-1]), strict=True))


def locate(slabs: Sequence[Any], numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 each: the slab of each of these pages, and its index there. Numbers count through the slabs."""
    sizes = np.array([len(slab) for slab in slabs], dtype=np.int64)
    ends = np.cumsum(sizes)
    slab = np.searchsorted(ends, numbers, side="right")
    return slab, numbers - (ends - sizes)[slab]


# ---- pages of a batch --------------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """The page numbers that a batch is about to have (`RowPages`)."""

    slabs: list[Slab]
    table: np.ndarray
    """int32 `[B, P]`"""
    rows: np.ndarray | None = None
    """int64 `[B]`: row `b` was row `rows[b]`; `None`: rows are where they were"""
    copied: tuple[np.ndarray, np.ndarray] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    """int64 `[m]`, `[m]`: pages that are not full, and the pages that get their bytes"""


class RowPages(PageUser):
    """The page numbers of a batch, for all layers of a cache that have the same paging.

    Every entry of `table` names a page. Those before the end of a row's full pages may be shared. All others belong to the row
    only, because later tokens are packed there. Numbers count through `slabs`. Methods return new numbers, and `set` makes
    them the present ones, so that the layers' memory can be allocated in between (`RowMemory`).

    Args:
        rows: sequences of the batch.
        pages: pages of each.
    """

    def __init__(self, rows: int, pages: int):
        super().__init__()
        self.slabs: list[Slab] = []
        #: int32 `[B, P]`. Never changed in place
        self.table = np.zeros((rows, 0), dtype=np.int32)
        self.set(self.widened(pages))

    def __getstate__(self):
        return Numbers(self.slabs, self.table)

    def __setstate__(self, numbers):
        PageUser.__init__(self)
        self.set(numbers)

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def width(self) -> int:
        """Pages of each row."""
        return self.table.shape[1]

    @property
    def exclusive(self) -> bool:
        """Whether no page is shared, neither by rows nor with others."""
        with _lock:
            return all(
                counts.max(initial=0) <= 1 and (counts == slab.references).all()
                for slab, counts in self.acquired.items()
            )

    def set(self, numbers: Numbers) -> None:
        """Have these page numbers, and references to their pages."""
        self.slabs, self.table = numbers.slabs, numbers.table
        self.set_references(references_in(self.slabs, self.table))

    def entries(self, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """int64 `[n]` each: row and column of the entries that will name another page than they do now, or that their row's
        entries do now."""
        before = self.table if numbers.rows is None else self.table[numbers.rows]
        changed = np.ones(numbers.table.shape, dtype=bool)
        if numbers.slabs[: len(self.slabs)] == self.slabs:  # otherwise numbers mean other pages
            changed[:, : self.width] = before != numbers.table[:, : self.width]
        rows, columns = changed.nonzero()
        return rows, columns

    def widened(self, pages: int) -> Numbers:
        """Every row has this many more pages, in one new slab."""
        slab, first = Slab(self.rows * pages), sum(map(len, self.slabs))
        new = np.arange(first, first + len(slab), dtype=np.int32).reshape(self.rows, pages)
        return Numbers([*self.slabs, slab], np.concatenate([self.table, new], axis=1))

    def selected(self, paged: np.ndarray, page_size: int, rows: np.ndarray | None = None) -> Numbers:
        """Row `b` is row `rows[b]` and shares its full pages. Every other entry has a page of its own; a partial page is copied
        into it.

        Args:
            paged: int64 `[B]`: tokens in pages of each new row.
            rows: `None` keeps the order.
        """
        before = self.table if rows is None else self.table[rows]
        full = np.arange(self.width) < (paged // page_size)[:, None]
        own = np.full_like(before, -1)
        own[: self.rows] = self.table[: len(own)]
        slabs, table = self._owned(self.slabs, np.where(full, before, own), full)
        opened = (paged % page_size).nonzero()[0]
        column = paged[opened] // page_size
        source, target = before[opened, column], table[opened, column]
        copied = source[source != target].astype(np.int64), target[source != target].astype(np.int64)
        return Numbers(slabs, table, rows, copied)

    def emptied(self) -> Numbers:
        """Nothing is stored: without pages that others use, and without slabs that belong to others."""
        slabs = [slab for slab in self.slabs if slab.owner is self]
        table = self.table if len(slabs) == len(self.slabs) else np.full_like(self.table, -1)
        return Numbers(*self._owned(slabs, table, np.zeros(table.shape, dtype=bool)))

    def adopting(self, slabs: Sequence[Slab], ids: np.ndarray, adopted: np.ndarray) -> Numbers:
        """Nothing is stored, and pages of these slabs are used.

        Args:
            ids: int64 `[B, P]`: page numbers through these slabs.
            adopted: bool `[B, P]`: entries that use a page of `slabs`; the others get a page of a new slab, which comes
                first.
        """
        count = int((~adopted).sum())
        own = max(count, 0 if adopted.any() else 1)  # without rows, too, there is a slab
        table = np.where(adopted, ids + own, 0).astype(np.int32)
        table[~adopted] = np.arange(count)
        return Numbers([*([Slab(own)] if own else []), *slabs], table)

    def fork(self, n: int, full: np.ndarray, width: int) -> list[RowPages]:
        """The pages of `n` forks with `width` pages for each row, which share the first `full` `[B]` pages of each row."""
        adopted = np.arange(width) < full[:, None]
        ids = np.zeros(adopted.shape, dtype=np.int64)
        ids[:, : self.width] = self.table[:, :width]
        slab, index = locate(self.slabs, ids)
        used = np.unique(slab[adopted])
        firsts = np.zeros(len(self.slabs), dtype=np.int64)
        firsts[used] = np.cumsum([0, *(len(self.slabs[each]) for each in used)])[:-1]
        forks = [RowPages(self.rows, 0) for _ in range(n)]
        for fork in forks:
            fork.set(fork.adopting([self.slabs[each] for each in used], firsts[slab] + index, adopted))
        return forks

    def _owned(self, slabs: list[Slab], table: np.ndarray, full: np.ndarray) -> tuple[list[Slab], np.ndarray]:
        """Return slabs and a table. Entries outside `full` get exclusive pages: the present page if possible (-1: none),
        otherwise a free one. A new slab supplies missing pages."""
        usable = np.concatenate([np.zeros(0, dtype=bool), *map(self._usable, slabs)])
        usable[table[full]] = False
        needs_own = ~full
        ids = table[needs_own]
        index = np.flatnonzero((ids >= 0) & usable[ids] if len(usable) else np.zeros(len(ids), dtype=bool))
        kept, first = np.unique(ids[index], return_index=True)
        without = np.ones(len(ids), dtype=bool)
        without[index[first]] = False
        usable[kept] = False
        free, missing = np.flatnonzero(usable), int(without.sum())
        if len(free) < missing:
            new = Slab(missing - len(free))
            free = np.concatenate([free, np.arange(len(usable), len(usable) + len(new))])
            slabs = [*slabs, new]
        ids[without] = free[:missing]
        out = table.copy()
        out[needs_own] = ids
        return slabs, out

    def _usable(self, slab: Slab) -> np.ndarray:
        """bool `[pages]`: which pages these rows may have for themselves."""
        with _lock:
            if slab.owner is not self:
                return np.zeros(len(slab), dtype=bool)
            return slab.references == self.acquired[slab]


# ---- pages of requests -------------------------------------------------------------------------------------------------


class PagePool(PageUser):
    """The page numbers of a pool of rows, for all layers with the same paging. Rows, and prefixes that are remembered, have
    references to pages. Pages of kept prompts and of caches are adopted: rows read them where they lie.

    Args:
        count: pages of the pool, numbered from 0. Adopted pages have the numbers after them.
    """

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        #: in the order of numbers. Those of a dropped slab have no references, and are free for a slab of the same size
        self.slabs = [Slab(count)]
        self._hold(self.slabs[0], counts_memory=True)

    def _hold(self, slab: Slab, counts_memory: bool = False) -> None:
        self.set_references({**self.acquired, slab: np.zeros(len(slab), dtype=np.int32)}, counts_memory)

    @property
    def free(self) -> int:
        """Number of free pages of the pool."""
        return self.count - int(np.count_nonzero(self.slabs[0].references))

    def take(self, pages: int) -> list[int]:
        """Take free pages; they have one reference then. Raises `IndexError` if there are too few."""
        with _lock:
            own = self.slabs[0]
            taken = np.flatnonzero(own.references == 0)[:pages]
            if len(taken) < pages:
                raise IndexError(f"pages={pages} are not free: only {len(taken)} are")
            own.references[taken] = self.acquired[own][taken] = 1
        return taken.tolist()

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to each of these pages."""
        self._change(pages, 1)

    def release(self, pages: Sequence[int]) -> int:
        """Remove a reference to each of these pages. Returns how many of the pool's pages that frees."""
        before = self.free
        self._change(pages, -1)
        return self.free - before

    def _change(self, pages: Sequence[int], change: int) -> None:
        slabs, indices = locate(self.slabs, np.asarray(pages, dtype=np.int64))
        with _lock:
            for number in np.unique(slabs):
                slab, of_slab = self.slabs[number], indices[slabs == number]
                for counts in (self.acquired[slab], slab.references):
                    np.add.at(counts, of_slab, change)
                assert (self.acquired[slab][of_slab] >= 0).all(), f"a free page of {pages=} was released"

    # ---- slabs of others -----------------------------------------------------------------------------------------

    def first_page(self, index: int) -> int:
        """The number of the first page of slab `index`."""
        return sum(map(len, self.slabs[:index]))

    @property
    def adopted(self) -> list[Slab]:
        return [slab for slab in self.acquired if slab is not self.slabs[0]]

    def adopt(self, slab: Slab) -> int:
        """Number the pages of a slab. Returns its index among the slabs."""
        gone = (index for index, each in enumerate(self.slabs) if each not in self.acquired and len(each) == len(slab))
        index = next(gone, len(self.slabs))
        self.slabs[index : index + 1] = [slab]
        self._hold(slab)
        return index

    def drop_unread(self) -> list[int]:
        """Forget adopted slabs to whose pages nothing here has a reference. Returns their indices in `slabs`."""
        gone = [slab for slab in self.adopted if not self.acquired[slab].any()]
        if gone:
            self.set_references({slab: counts for slab, counts in self.acquired.items() if slab not in gone})
        return [self.slabs.index(slab) for slab in gone]


def upload(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers on a device. The CPU does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
