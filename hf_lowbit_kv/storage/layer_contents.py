"""The contents of a packed layer outside a store: taken out of one store, and put into another.

Saved caches and kept prompts have this form, without the unused slots and pages of a store. A growing store reads
these pages in place. A preallocated store copies them to its own memory, whose addresses must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from .layer_spec import LayerSpec
from .page_pool import Slab, locate
from .paged_store import LayerStore, PagedStore, read_pages, write_pages
from .row_memory import RowMemory

#: number of pages that `in_layout_of` converts at a time. Meanwhile each code takes about eight bytes
PAGES_AT_ONCE = 64
Pair = tuple[torch.Tensor, torch.Tensor]


class LayerContents(NamedTuple):
    """`B` rows of one packed layer."""

    spec: LayerSpec
    """with the layouts in which the pages are"""
    slabs: list[torch.Tensor]
    """uint8 `[n, H, page_bytes]`"""
    table: torch.Tensor
    """int64 `[B, P]` on the CPU: page indices of each row, numbered across slabs; 0-padded"""
    paged: list[int]
    """by row, tokens in pages"""
    sinks: list[Pair]
    """by row, keys and values `[H, n, D]` of its first tokens, in the model's dtype"""
    tails: list[Pair]
    """by row, keys and values `[H, n, D]` of its tokens after the pages, in order"""
    shared: list[Slab]
    """the reference counts of `slabs`. Those of the first layer count for all layers with the same paging"""
    seen: int = 0
    """padded tokens"""
    in_tail: int = 0
    """lower bound of the unpacked newest tokens of every row"""
    mode: str = "packed"
    """see `TextFacts.mode`"""
    padding: Sequence[tuple[int, torch.Tensor]] = ()
    """masks of padding, bool `[B, n]`, and the position at which each begins"""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        parts = zip(self.sinks, self.paged, self.tails, strict=True)
        return [sink[0].shape[1] + paged + tail[0].shape[1] for sink, paged, tail in parts]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.sinks[0][0].shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of keys and of values."""
        return self.sinks[0][0].shape[-1], self.sinks[0][1].shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.sinks[0][0].dtype

    @property
    def present(self) -> torch.Tensor:
        """bool `[B, P]` on the CPU: which entries of `table` name a page. `P` is the largest number of pages of a row."""
        pages = [-(-tokens // self.spec.page_size) for tokens in self.paged]
        return torch.arange(max(pages, default=0)) < torch.tensor(pages)[:, None]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that have memory on the device."""
        return [*self.slabs, *(x for pair in (*self.sinks, *self.tails) for x in pair)]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, without pages that none of them is in."""
        pages = len(self.table[self.present].unique()) * self.slabs[0].shape[1:].numel()
        return pages + sum(x.nbytes for pair in (*self.sinks, *self.tails) for x in pair)

    def first(self, count: int) -> LayerContents:
        """The first `count` tokens of each row; no row may have fewer. Pages are neither copied nor cut: `count` must be in
        the sink, at the end of a page, or past all pages."""
        spec = self.spec
        paged = [min(tokens, max(count - spec.sink, 0)) for tokens in self.paged]
        ends = [max(count - spec.sink - tokens, 0) for tokens in paged]
        table = self.table[:, : -(-max(paged, default=0) // spec.page_size)]
        sinks = [(k[:, :count], v[:, :count]) for k, v in self.sinks]
        tails = [(k[:, :end], v[:, :end]) for (k, v), end in zip(self.tails, ends, strict=True)]
        return self._replace(table=table, paged=paged, sinks=sinks, tails=tails)

    def copied(self, first: LayerContents | None = None, count: int = 0) -> LayerContents:
        """The same tokens, with pages in one slab of their own.

        Args:
            first: of one row: contents with the same first `count` pages, which take their place.
        """
        own = self.present
        own[:, :count] = False
        numbers, places = torch.unique(self.table[own], return_inverse=True)
        slabs, counts, (begin,) = ([], [], [self.table]) if first is None else united([first], count)
        table = torch.zeros_like(self.table)
        table[:, :count] = begin[:, :count]
        table[own] = places + sum(map(len, slabs))
        if len(numbers) or not slabs:  # an empty one has the shape of pages
            slabs.append(read_pages(self.slabs, numbers.to(self.slabs[0].device)))
            counts.append(Slab(len(numbers)))
        return self._replace(slabs=slabs, table=table, shared=counts)

    def trimmed(self, slab: Slab, used: np.ndarray, new: Slab, pages: torch.Tensor) -> LayerContents:
        """The same tokens with another slab in the place of one, whose pages they do not all have.

        Args:
            used: bool `[n]`: which pages of the slab are in the other one.
            new, pages: the other one, and its memory in this layer.
        """
        at = self.shared.index(slab)
        left = [used if i == at else np.ones(len(each), dtype=bool) for i, each in enumerate(self.shared)]
        slabs, counts = list(self.slabs), list(self.shared)
        slabs[at], counts[at] = pages, new
        numbers = torch.from_numpy(np.concatenate(left).cumsum() - 1)
        return self._replace(slabs=slabs, table=numbers[self.table], shared=counts)

    def to(self, device: torch.device) -> LayerContents:
        """The same tokens on this device. If all are there already, nothing is copied."""
        if all(tensor.device == device for tensor in self.tensors()):
            return self
        sinks, tails = ([(k.to(device), v.to(device)) for k, v in pairs] for pairs in (self.sinks, self.tails))
        return self._replace(slabs=[slab.to(device) for slab in self.slabs], sinks=sinks, tails=tails)

    def in_layout_of(self, spec: LayerSpec) -> LayerContents:
        """The same tokens with pages as a store with this spec has them. It differs only in the layout of pages."""
        if self.spec == spec:
            return self
        return self._replace(spec=spec, slabs=[self._converted(slab, spec) for slab in self.slabs])

    def _converted(self, slab: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        old, widths, dtype = self.spec, self.widths, self.dtype
        formats = list(zip(old.formats, spec.formats, widths, strict=True))
        converted = []
        for pages in slab.split(PAGES_AT_ONCE):
            parts = pages.split(old.part_bytes(*widths, dtype), dim=-1)
            converted.append(
                torch.cat(
                    [
                        before.in_layout_of(after, part, width, old.page_size, dtype) if before != after else part
                        for part, (before, after, width) in zip(parts, formats, strict=True)
                    ],
                    dim=-1,
                )
            )
        if not converted:
            return slab.new_zeros(0, slab.shape[1], sum(spec.part_bytes(*widths, dtype)))
        return torch.cat(converted)


def united(
    parts: Sequence[LayerContents], count: int | None = None
) -> tuple[list[torch.Tensor], list[Slab], list[torch.Tensor]]:
    """One list of slabs for contents of the same layer, without those that none of them uses, their reference counts, and
    each one's table, numbered through it. count: look at the first `count` pages of each row only; `None`: at all."""
    slabs: dict[Slab, torch.Tensor] = {}
    located = []
    for part in parts:
        present = part.present[:, :count]
        at, index = locate(part.slabs, part.table[:, :count][present].numpy())
        slabs |= {part.shared[i]: part.slabs[i] for i in np.unique(at).tolist() or [0]}
        located.append((part, present, at, index))
    firsts = dict(zip(slabs, np.cumsum([0, *map(len, slabs)]).tolist(), strict=False))
    tables = []
    for part, present, at, index in located:
        table = torch.zeros(present.shape, dtype=torch.int64)
        table[present] = torch.from_numpy(np.array([firsts.get(slab, 0) for slab in part.shared])[at] + index)
        tables.append(table)
    return list(slabs.values()), list(slabs), tables


def joined(parts: Sequence[LayerContents]) -> LayerContents:
    """Contents with the rows of these contents of the same layer, one after the other, without padding."""
    slabs, counts, tables = united(parts)
    width = max(table.shape[1] for table in tables)
    table = torch.cat([torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in tables])
    paged, sinks, tails = (
        list(chain(*(getattr(part, name) for part in parts))) for name in ("paged", "sinks", "tails")
    )
    rows = LayerContents(parts[0].spec, slabs, table, paged, sinks, tails, counts)
    in_tail = min(tail[0].shape[1] for tail in tails)
    return rows._replace(seen=max(rows.lengths), in_tail=min(in_tail, rows.spec.residual))


@torch.no_grad()
def equal_pages(one: LayerContents, other: LayerContents, count: int) -> torch.Tensor:
    """bool `[count]` on the CPU: which of the first pages of a row have the same bytes. Waits for the device."""
    pages = []
    for part in (one, other):
        at, index = locate(part.slabs, part.table[0, :count].numpy())
        starts = np.array([[slab.data_ptr(), slab.stride(0)] for slab in part.slabs])[at]
        pages.append(starts[:, 0] + starts[:, 1] * index)
    equal = torch.from_numpy(pages[0] == pages[1])  # they are read where they lie
    if len(left := (~equal).nonzero()[:, 0]):
        bytes_of = [read_pages(part.slabs, part.table[0, left].to(part.slabs[0].device)) for part in (one, other)]
        equal[left] = (bytes_of[0] == bytes_of[1]).flatten(1).all(1).cpu()
    return equal


@torch.no_grad()
@torch.inference_mode(False)
def take_tokens(store: LayerStore, rows: Sequence[int] | None = None) -> LayerContents:
    """Take the tokens of a store. Pages are not copied: use them, copy them (`LayerContents.copied`) or acquire references to
    them before the store changes. It may free them and write to them again. Waits for the device.

    Args:
        rows: which rows; `None`: all.

    Raises:
        ValueError: it has no rows.
    """
    state, spec = store.state, store.spec
    rows = range(store.batch_size) if rows is None else rows
    if not rows:
        raise ValueError("the cache has no rows: there is nothing to save")
    all_paged, lengths, table = state.paged[:, 0].tolist(), state.length[:, 0].tolist(), state.page_table.cpu().long()
    paged = [all_paged[row] for row in rows]
    sinks, tails = [], []
    for row, tokens in zip(rows, paged, strict=True):
        slots = torch.arange(tokens, max(lengths[row] - spec.sink, tokens)) % max(spec.tail_size, 1)
        slots = slots.to(store.device)
        sink = slice(min(lengths[row], spec.sink))
        sinks.append((state.sink_k[row, :, sink].clone(), state.sink_v[row, :, sink].clone()))
        tails.append((state.tail_k[row][:, slots], state.tail_v[row][:, slots]))
    slabs = list(state.pool)
    counts = list(store.memory.tables.slabs) if isinstance(store, PagedStore) else [Slab(len(slab)) for slab in slabs]
    taken = LayerContents(spec, slabs, table[list(rows)], paged, sinks, tails, counts)
    present = taken.present
    return taken._replace(table=taken.table[:, : present.shape[1]].where(present, 0))


class _Places(NamedTuple):
    """Where the tokens of `B` rows go in a store. Most layers of a cache agree in that, so it is computed once for them."""

    adopted: torch.Tensor
    """bool `[B, P]` on the CPU: full pages, which a growing store reads in place"""
    copied: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """int64 `[n]` on the device: row, entry of its page table, and index in `LayerContents.slabs` of the pages that a
    preallocated store copies: all"""
    opened: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """the same for the pages that a growing store copies: those that are not full"""
    slots: list[torch.Tensor]
    """by row, int64 on the device: slots of the tail's ring"""
    counts: tuple[torch.Tensor, torch.Tensor]
    """int32 `[B, 1]` on the device: tokens of a row, and how many of them are in pages"""


def _places(store: PagedStore, tokens: LayerContents, known: dict[Any, _Places]) -> _Places:
    spec, device, lengths = store.spec, store.device, tokens.lengths
    layout = spec.page_size, spec.tail_size, tokens.table.shape, tokens.table.numpy().tobytes()
    recent = [tail[0].shape[1] for tail in tokens.tails]
    key = device, layout, tuple(tokens.paged), tuple(lengths), tuple(recent)
    if key not in known:
        paged, column = torch.tensor(tokens.paged)[:, None], torch.arange(tokens.table.shape[1])
        adopted = paged // spec.page_size > column
        present = -(-paged // spec.page_size) > column

        def pages(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, entries = chosen.nonzero(as_tuple=True)
            return rows.to(device), entries.to(device), tokens.table[chosen].to(device)

        slots = [
            torch.arange(first, first + count, device=device) % max(spec.tail_size, 1)
            for first, count in zip(tokens.paged, recent, strict=True)
        ]
        counts = torch.tensor([lengths, tokens.paged], dtype=torch.int32).to(device)[:, :, None]
        known[key] = _Places(adopted, pages(present), pages(present & ~adopted), slots, (counts[0], counts[1]))
    return known[key]


@torch.no_grad()
@torch.inference_mode(False)
def put_tokens(stores: Sequence[PagedStore], tokens: Sequence[LayerContents]) -> None:
    """Put these tokens into the empty stores of a cache's layers, in which they fit. They are moved to the device of their
    store, and converted to its layout."""
    known: dict[Any, _Places] = {}
    by_memory: dict[RowMemory, list[tuple[PagedStore, LayerContents]]] = {}
    for store, of_store in zip(stores, tokens, strict=True):
        moved = of_store.to(store.device).in_layout_of(store.spec)
        by_memory.setdefault(store.memory, []).append((store, moved))
    for memory, layers in by_memory.items():
        of_first, adopted = layers[0][1], _places(*layers[0], known).adopted
        # a row may have more pages than its length needs: after `crop`, tokens stay in pages that would be in the tail
        width = max(memory.width_for(max(of_first.lengths)), of_first.table.shape[1])
        adopts = memory.capacity is None and bool(adopted.any())
        if adopts:
            pages = {store: of_store.slabs for store, of_store in layers}
            memory.adopt(
                [pages[store] for store in memory.stores],
                of_first.shared,
                of_first.table.numpy(),
                adopted.numpy(),
                width,
            )
        else:
            memory.widen(width if memory.capacity is None else of_first.table.shape[1])
        for store, of_store in layers:
            _fill(store, of_store, _places(store, of_store, known), adopts)


def _fill(store: PagedStore, tokens: LayerContents, places: _Places, adopted: bool) -> None:
    """Copy into a store what it does not read in place. adopted: whether it reads full pages in place."""
    rows, entries, sources = places.opened if adopted else places.copied
    if len(rows):
        write_pages(store.state.pool, store.state.page_table[rows, entries], read_pages(tokens.slabs, sources))
    state = store.state
    for row, (sink, tail) in enumerate(zip(tokens.sinks, tokens.tails, strict=True)):
        for window, new in zip((state.sink_k, state.sink_v), sink, strict=True):
            window[row, :, : new.shape[1]] = new
        for window, new in zip((state.tail_k, state.tail_v), tail, strict=True):
            window[row][:, places.slots[row]] = new
    state.length.copy_(places.counts[0])
    state.paged.copy_(places.counts[1])
