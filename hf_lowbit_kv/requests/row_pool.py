"""A pool of rows: sequences that come and go, and share one block of packed pages. Rows in use are always contiguous.

Rows in use stand in slots 0 to n - 1. When a row leaves, the last row moves into its slot. So a decode step of all rows
runs on `state.rows(slice(0, n))`, with the kernels of an ordinary batch.

A row states the largest number of tokens that it may ever hold, and enters only if pages for all of them are left. So
no row is ever preempted. It gets each page when the page is due. Until then pages may keep prefixes that were read
before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import PagedStore, read_pages
from .page_ledger import PageLedger
from .slot_memory import TABLE_STEP, SlotMemory, StoredLayer


@dataclass(eq=False)
class Row:
    """A sequence in the pool."""

    slot: int
    limit: int
    """the most tokens it may hold"""
    length: int = 0
    """tokens that are stored; the CPU counts them"""
    pages: dict[Hashable, list[int]] = field(default_factory=dict)
    """by paging, its pages in order"""
    prefix_length: int = 0
    """tokens that it began with: all of them stand in the sink and in pages, even where that leaves the window empty"""
    room: int = 0
    """tokens for which its pages suffice, at least; saves looking at every page in every step"""


@dataclass(frozen=True)
class Prefix:
    """The full pages at the beginning of a text, and the sink in front of them. A kept prefix holds its pages."""

    length: int
    """tokens: the sink's and the pages'"""
    pages: dict[Hashable, list[int]]
    sinks: list[tuple[torch.Tensor, torch.Tensor]]
    """see `SlotMemory.sinks`"""


def pages_needed(layers: Iterable[StoredLayer], tokens: int) -> dict[Hashable, int]:
    """For each paging, the number of pages of a row of `tokens` tokens."""
    return {layer.paging: layer.spec.pages_for(tokens) for layer in layers}


class RowPool:
    """Slots and pages, and which row has which. Nothing here waits for the device.

    Args:
        layers: all packed layers of a model.
        slots: largest number of rows at once.
        tokens: tokens for which there are pages, all rows together.
        max_length: largest number of tokens of a single row.
    """

    def __init__(self, layers: Sequence[StoredLayer], slots: int, tokens: int, max_length: int):
        self.layers, self.slots, self.max_length = list(layers), slots, max_length
        self._specs: dict[Hashable, LayerSpec] = {layer.paging: layer.spec for layer in self.layers}
        pages = {paging: max(-(-tokens // spec.page_size), 1) for paging, spec in self._specs.items()}
        entries = {
            paging: -(-max(spec.pages_for(max_length), 1) // TABLE_STEP) * TABLE_STEP
            for paging, spec in self._specs.items()
        }
        self.memory = SlotMemory(self.layers, slots, pages, entries)
        self.ledgers = {paging: PageLedger(count) for paging, count in pages.items()}
        self.rows: list[Row] = []
        self._due: dict[Hashable, list[tuple[int, int, int]]] = {paging: [] for paging in self._specs}

    # ---- room -----------------------------------------------------------------------------------------------------

    def missing(self, limit: int, shared: int = 0, rows: int = 1) -> int:
        """How many pages are missing for `rows` more rows of up to `limit` tokens; 0: they fit. Slots are not considered.

        Args:
            shared: tokens of a prefix whose pages each of these rows shares.
        """
        most = 0
        for paging, spec in self._specs.items():
            unshared = spec.pages_for(limit) - max(shared - spec.sink, 0) // spec.page_size
            most = max(most, rows * unshared + self._promised(paging) - self.ledgers[paging].free)
        return most

    def missing_for_fork(self, row: Row, limit: int) -> int:
        """Like `missing`, for a fork of a row that is in the pool."""
        return self.missing(
            limit, min(self.full_tokens(row, paging) + spec.sink for paging, spec in self._specs.items())
        )

    def _promised(self, paging: Hashable) -> int:
        """Number of free pages that rows in the pool will still get."""
        spec = self._specs[paging]
        return sum(max(spec.pages_for(row.limit) - len(row.pages[paging]), 0) for row in self.rows)

    def could_ever_fit(self, limit: int) -> bool:
        """Whether a row of up to `limit` tokens fits into the empty pool."""
        return limit <= self.max_length and all(
            spec.pages_for(limit) <= self.ledgers[paging].count for paging, spec in self._specs.items()
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row that fits into the empty pool."""
        rooms = [spec.room(self.ledgers[paging].count) for paging, spec in self._specs.items()]
        return min(self.max_length, *rooms)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.rows)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def enter(self, limit: int, prefix: Prefix | None = None) -> Row:
        """A new row for up to `limit` tokens, in the slot behind the last one.

        Args:
            prefix: the prefix with which the row begins.

        Raises:
            ValueError: no slot or too few pages are left. Nothing has changed then.
        """
        shared = 0 if prefix is None else prefix.length
        if limit > self.max_length:
            raise ValueError(
                f"limit={limit} is more than the {self.max_length} tokens that a row of this pool may hold"
            )
        if not self.free_slots or self.missing(limit, shared) > 0:
            raise ValueError(
                f"limit={limit} does not fit: the pool has {self.free_slots} slots left, and too few pages"
            )
        row = Row(len(self.rows), limit, pages={paging: [] for paging in self._specs})
        self.rows.append(row)
        if prefix is not None:
            self.adopt(row, prefix)
        return row

    def adopt(self, row: Row, prefix: Prefix) -> None:
        """Let an empty row begin with a prefix, whose pages it shares."""
        assert row.length == 0
        self._share(row, prefix.pages)
        self.memory.set_sinks(row.slot, prefix.sinks)
        self.memory.set_length(row.slot, prefix.length)
        row.length = row.prefix_length = prefix.length

    def load(self, row: Row, stores: Sequence[PagedStore], length: int) -> None:
        """Copy the contents of a row of another cache into an empty row. Waits for the device.

        Args:
            stores: the stores of the layers, in order, each with one row. length: the row's tokens.
        """
        assert row.length == 0
        for layer, store in zip(self.layers, stores, strict=True):
            pages, ledger = row.pages[layer.paging], self.ledgers[layer.paging]
            for entry in range(len(pages), -(-int(store.state.paged[0, 0]) // layer.spec.page_size)):
                pages.append(ledger.take())
                self._due[layer.paging].append((row.slot, entry, pages[entry]))
        for state, layer, store in zip(self.memory.states, self.layers, stores, strict=True):
            pages = row.pages[layer.paging]
            ids = torch.tensor(pages, dtype=torch.long, device=layer.device)
            state.pool[0][ids] = read_pages(store.state.pool, store.state.page_table[0, : len(pages)])
            for name in ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged"):
                getattr(state, name)[row.slot] = getattr(store.state, name)[0]
        row.length = length
        paged = [int(store.state.paged[0, 0]) for store in stores]
        row.prefix_length = min(layer.spec.sink + count for layer, count in zip(self.layers, paged, strict=True))

    def extend(self, row: Row, tokens: int) -> None:
        """Give the row the pages that are due when it stores `tokens` more."""
        if row.length + tokens > row.limit:
            raise ValueError(f"tokens={tokens} do not fit: the row holds {row.length}, and its limit is {row.limit}")
        if row.length + tokens <= row.room:
            return
        for paging, spec in self._specs.items():
            pages = row.pages[paging]
            for entry in range(len(pages), spec.pages_for(row.length + tokens)):
                pages.append(self.ledgers[paging].take())
                self._due[paging].append((row.slot, entry, pages[entry]))
        row.room = min(spec.room(len(row.pages[paging])) for paging, spec in self._specs.items())

    def flush(self) -> None:
        """Write all new pages into the tables, in one go. Needed before a step or a chunk runs."""
        for paging, entries in self._due.items():
            if entries:
                self.memory.write_table(paging, entries)
                entries.clear()

    def fork(self, row: Row, limit: int) -> Row:
        """A new row with the tokens of another one. Full pages are shared; the window and an open page are copied.

        Raises:
            ValueError: as for `enter`.
        """
        if not self.free_slots or self.missing_for_fork(row, limit) > 0:
            raise ValueError(
                f"limit={limit} does not fit: the pool has {self.free_slots} slots left, and too few pages"
            )
        self.flush()
        new = Row(len(self.rows), limit, row.length, {paging: [] for paging in self._specs}, row.prefix_length)
        self.rows.append(new)
        for paging, spec in self._specs.items():
            full = self.full_tokens(row, paging) // spec.page_size
            self._share(new, {paging: row.pages[paging][:full]})
            if full < spec.pages_for(row.length):  # an open page
                page = self.ledgers[paging].take()
                self.memory.copy_page(paging, row.pages[paging][full], page)
                new.pages[paging].append(page)
                self._due[paging].append((new.slot, full, page))
        self.memory.copy_window(row.slot, new.slot)
        return new

    def _share(self, row: Row, pages: dict[Hashable, list[int]]) -> None:
        for paging, ids in pages.items():
            for page in ids:
                self.ledgers[paging].hold(page)
                self._due[paging].append((row.slot, len(row.pages[paging]), page))
                row.pages[paging].append(page)

    def full_tokens(self, row: Row, paging: Hashable) -> int:
        """Tokens of a row that stand in full pages."""
        spec = self._specs[paging]
        paged = max(spec.paged_after(row.length - spec.sink), row.prefix_length - spec.sink)
        return paged // spec.page_size * spec.page_size

    def leave(self, row: Row) -> Row | None:
        """Free a row's slot and pages. Returns the row that has moved into the slot, if any."""
        self.flush()
        last = self.rows.pop()
        if last is not row:
            self.memory.move(last.slot, row.slot)
            self.rows[row.slot] = last
        self.memory.empty(last.slot)
        if last is not row:
            last.slot = row.slot
        for paging, pages in row.pages.items():
            for page in pages:
                self.ledgers[paging].drop(page)
        row.slot, row.pages = -1, {}
        return None if last is row else last

    # ---- prefixes -------------------------------------------------------------------------------------------------

    def prefix_lengths(self, tokens: int) -> list[int]:
        """Lengths of the prefixes that a text of `tokens` tokens may share, ascending. At least one token and the
        residual tokens remain to be read, so that the window is computed again. Empty if the layers' pages do not end
        at the same tokens."""
        if len(self._specs) > 1:
            return []
        (spec,) = self._specs.values()
        most = (tokens - 1 - spec.residual - spec.sink) // spec.page_size
        return [spec.sink + count * spec.page_size for count in range(1, most + 1)]

    def prefix(self, row: Row, length: int, sinks: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> Prefix:
        """The first `length` tokens of a row, one of `prefix_lengths`. Holds their pages until `drop`.

        Args:
            sinks: copies of the row's sink, if there are some already.
        """
        ((paging, spec),) = self._specs.items()
        pages = row.pages[paging][: (length - spec.sink) // spec.page_size]
        for page in pages:
            self.ledgers[paging].hold(page)
        return Prefix(length, {paging: pages}, self.memory.sinks(row.slot) if sinks is None else sinks)

    def full_lengths(self, tokens: int) -> list[int]:
        """Lengths at which full pages end, for a row of `tokens` tokens. Empty as for `prefix_lengths`."""
        if len(self._specs) > 1:
            return []
        (spec,) = self._specs.values()
        count = spec.paged_after(tokens - spec.sink) // spec.page_size
        return [spec.sink + page * spec.page_size for page in range(1, count + 1)]

    def hold_page(self, row: Row, place: int, length: int) -> Prefix:
        """Hold one full page of a row until `drop`; length: tokens of the row up to its end."""
        ((paging, pages),) = row.pages.items()
        self.ledgers[paging].hold(pages[place])
        return Prefix(length, {paging: [pages[place]]}, [])

    def drop(self, prefix: Prefix) -> int:
        """Release a prefix. Returns how many pages that frees."""
        return sum(self.ledgers[paging].drop(page) for paging, pages in prefix.pages.items() for page in pages)

    def free(self) -> None:
        """Free all memory. The pool cannot be used afterwards."""
        self.memory.groups.clear()
        self.memory.states.clear()
        self.memory.tables.clear()
        self.rows.clear()
