"""Contents: rows outside of a cache, taken out of one cache and put into another.

Saved caches and kept prompts have this form, without the unused slots and pages of a cache. A growing cache reads these
pages in place. A preallocated cache copies them to its own memory, whose addresses must not change.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..storage.content_digests import EmbeddedRows, rows_digest
from ..storage.layer_spec import LayerSpec
from ..storage.page_pool import PageUser, Slab, locate, references_in, upload
from ..storage.paged_store import WINDOWS, LayerStore, PagedStore, read_pages, write_pages
from ..storage.row_memory import page_addresses
from .model_positions import Values, joined_positions

#: number of pages that `in_layout_of` converts at a time. Meanwhile each code takes about eight bytes
PAGES_AT_ONCE = 64


class Pages(NamedTuple):
    """The pages of `B` rows, in all layers with the same paging."""

    spec: LayerSpec
    """of one of these layers"""
    slabs: list[Slab]
    table: np.ndarray
    """int64 `[B, P]`: page numbers of each row, counted through `slabs`; 0-padded"""
    paged: np.ndarray
    """int64 `[B]`: tokens in pages"""
    in_tail: int = 0
    """lower bound of the unpacked newest tokens of every row"""

    @property
    def present(self) -> np.ndarray:
        """bool `[B, P]`: which entries of `table` name a page."""
        return np.arange(self.table.shape[1]) < -(-self.paged // self.spec.page_size)[:, None]

    def window(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 `[B]` each: how many tokens of rows of these lengths are in the sink, and how many in the tail."""
        sinks = np.minimum(lengths, self.spec.sink)
        return sinks, lengths - sinks - self.paged

    def places(self, lengths: np.ndarray, rows: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Where a store has the tokens of each of `WINDOWS`: rows and slots, int64 `[2, n]` on its device.

        Args:
            rows: those of the store that have these tokens.
        """
        places = []
        starts = np.zeros_like(self.paged), self.paged
        for counts, first, slots in zip(
            self.window(lengths), starts, (self.spec.sink, self.spec.tail_size), strict=True
        ):
            tokens = [np.arange(start, start + count) for start, count in zip(first, counts, strict=True)]
            places.append(upload(np.stack([np.repeat(rows, counts), np.concatenate(tokens) % max(slots, 1)]), device))
        return [places[0], places[0], places[1], places[1]]


class LayerTensors(NamedTuple):
    """The tokens of `B` rows in one packed layer."""

    spec: LayerSpec
    """with the layouts in which the pages are"""
    slabs: list[torch.Tensor]
    """uint8 `[n, H, page_bytes]`: its memory of `Pages.slabs`"""
    windows: list[torch.Tensor]
    """`WINDOWS`, `[H, n, D]` each in the model's dtype: the tokens of all rows, one row after the other"""

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.windows[0].shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of keys and of values."""
        return self.windows[0].shape[-1], self.windows[1].shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.windows[0].dtype

    def to(self, device: torch.device) -> LayerTensors:
        """The same tokens on this device. What is there already is not copied."""
        slabs, windows = ([x.to(device) for x in tensors] for tensors in (self.slabs, self.windows))
        return self._replace(slabs=slabs, windows=windows)

    def in_layout_of(self, spec: LayerSpec) -> LayerTensors:
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


@dataclass(eq=False)
class Contents(PageUser):
    """`B` rows of a cache. All layers have the same tokens; layers with the same paging have them in the same pages.

    Contents have no references to their pages: use them, copy them (`copied`) or put them into a cache before the cache that
    they are from changes. It may free them and write to them again. A kept prompt (`keep`) has references.
    """

    layers: dict[int, LayerTensors]
    """packed layers, by index; all of them or, of an empty cache, none"""
    pages: dict[Hashable, Pages]
    """by paging"""
    lengths: np.ndarray
    """int64 `[B]`: tokens of each row"""
    native_layers: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """tensors of native layers, see `native_layer_contents`"""
    seen: int = 0
    """padded tokens"""
    padding: Sequence[tuple[int, torch.Tensor]] = ()
    """masks of padding, bool `[B, n]`, and the position at which each begins"""
    mode: str = "packed"
    """see `TextFacts.mode`"""
    text: torch.Tensor | None = None
    """ids `[B, n]` where they are known"""
    positions: Values | None = None
    """positions that the model keeps outside of its cache"""
    read: tuple[int, bool] | None = None
    """read length of the first tokens, and whether later ones disagree, see `length_rope.ReadLengths`"""
    seed: str = ""
    """of a kept prompt: identifies the model and the kind of cache"""
    header: dict[str, Any] = field(default_factory=dict)
    """of a kept prompt: the description of model and cache in a file"""

    def __post_init__(self):
        super().__init__()
        self._rows: EmbeddedRows | None = None  # the last ones that it suits

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).windows[0].device

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that have memory on the device."""
        return [*self._unpaged(), *(slab for layer in self.layers.values() for slab in layer.slabs)]

    def _unpaged(self) -> list[torch.Tensor]:
        native = [x for tensors in self.native_layers.values() for x in tensors.values()]
        return native + [x for layer in self.layers.values() for x in layer.windows]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, those of shared pages too, without pages that none of them is in."""
        counts = {paging: len(np.unique(pages.table[pages.present])) for paging, pages in self.pages.items()}
        pages = (counts[x.spec.paging] * x.slabs[0].shape[1:].numel() for x in self.layers.values())
        return sum(pages) + sum(x.nbytes for x in self._unpaged())

    @torch.no_grad()
    def copied(self, other: Contents | None = None, match: int = 0) -> Contents:
        """The same tokens with copied pages, in one slab for each paging. Waits for the device.

        Args:
            other: one row with the same first `match` tokens as this one. Their first pages are shared instead, as far as they
                have the same bytes in all layers. Texts that were cut into other chunks have other bytes.
        """
        count = 0 if other is None else self._equal_pages(other, match)
        pages, shared, numbers = dict(self.pages), dict[Hashable, dict[Slab, Any]](), dict[Hashable, np.ndarray]()
        for paging, old in self.pages.items():
            slabs, begins = united([other.pages[paging]] if other is not None and count else [], count)
            table, own = np.zeros_like(old.table), old.present
            for begin in begins:
                table[:, :count], own[:, :count] = begin, False
            numbers[paging], places = np.unique(old.table[own], return_inverse=True)
            table[own] = places + sum(map(len, slabs))
            new = [Slab(len(numbers[paging]))] if len(numbers[paging]) or not slabs else []
            pages[paging], shared[paging] = old._replace(slabs=[*slabs, *new], table=table), slabs
        layers = {}
        for index, layer in self.layers.items():
            memory = [other.layers[index].slabs[at] for _, at in shared[layer.spec.paging].values()] if other else []
            if len(memory) < len(pages[layer.spec.paging].slabs):  # an empty slab has the shape of pages
                memory.append(read_pages(layer.slabs, upload(numbers[layer.spec.paging], layer.slabs[0].device)))
            layers[index] = layer._replace(slabs=memory)
        return replace(self, pages=pages, layers=layers)

    def _equal_pages(self, other: Contents, match: int) -> int:
        """How many of the first full pages have the same bytes in all layers, among the first `match` tokens."""
        if any(layer.spec != other.layers[index].spec for index, layer in self.layers.items()):
            return 0
        equal = np.ones(min(each.full_pages(match) for each in (self, other)), dtype=bool)
        for index, layer in self.layers.items():
            both = [
                (each.layers[index].slabs, each.pages[layer.spec.paging].table[0, : len(equal)])
                for each in (self, other)
            ]
            one, two = (page_addresses([slabs], numbers)[0] + slabs[0].data_ptr() for slabs, numbers in both)
            if len(left := np.flatnonzero(equal & (one != two))):
                one, two = (read_pages(slabs, upload(numbers[left], slabs[0].device)) for slabs, numbers in both)
                equal[left] = (one == two).flatten(1).all(1).cpu().numpy()
        return int(equal.cumprod().sum())

    # ---- one row --------------------------------------------------------------------------------------------------

    def first(self, count: int) -> Contents:
        """The first `count` tokens of the one row. Pages are neither copied nor cut: `count` must be in the sink, at the end of
        a page, or past all pages."""
        lengths, pages, layers = np.minimum(self.lengths, count), {}, {}
        for paging, old in self.pages.items():
            paged = np.minimum(old.paged, max(count - old.spec.sink, 0))
            pages[paging] = old._replace(table=old.table[:, : -(-int(paged[0]) // old.spec.page_size)], paged=paged)
        for index, layer in self.layers.items():
            (sink,), (tail,) = pages[layer.spec.paging].window(lengths)
            ends = sink, sink, tail, tail
            layers[index] = layer._replace(windows=[x[:, :end] for x, end in zip(layer.windows, ends, strict=True)])
        return replace(self, layers=layers, pages=pages, lengths=lengths)

    def restorable(self, match: int) -> int:
        """How many tokens of a text can be restored from this row, if both have the first `match` tokens in common. If the
        match ends with the row, or inside the window: all of them. Otherwise whole pages (`whole_pages`)."""
        paged = max(pages.spec.sink + pages.paged[0] for pages in self.pages.values())
        in_window = match > paged and not self.native_layers
        return match if match == self.lengths[0] or in_window else self.whole_pages(match)

    def whole_pages(self, match: int) -> int:
        """How many tokens of a match with this row can be restored from pages only. They end with a page, at least `residual`
        tokens before the end of the match. 0 if the layers' pages do not end at the same tokens, or with native layers, which
        have only the state at the end."""
        specs = [pages.spec for pages in self.pages.values()]
        count = 0 if self.native_layers else self.full_pages(match - max(spec.residual for spec in specs))
        return specs[0].sink + count * specs[0].page_size if count else 0

    def full_pages(self, tokens: int) -> int:
        """The number of full pages of the first `tokens` tokens of this row. 0 if the layers' pages do not end at the same
        tokens."""
        pages = self.pages.values()
        (sink, size), *others = {(each.spec.sink, each.spec.page_size) for each in pages}
        return 0 if others else int(max(min(tokens - sink, *(each.paged[0] for each in pages)), 0) // size)

    # ---- kept prompts ---------------------------------------------------------------------------------------------

    def keep(self, seed: str, ids: torch.Tensor, header: dict[str, Any]) -> Contents:
        """Be a kept prompt: acquire references to the pages, so no cache that reads them in place takes them for free ones.

        Args:
            ids: int64 `[n]` on the CPU.
            seed, header: see the attributes.
        """
        self.seed, self.text, self.header = seed, ids[None], header
        self._acquire()
        return self

    def _acquire(self) -> None:
        acquired: dict[Slab, np.ndarray] = {}
        for pages in self.pages.values():
            acquired |= references_in(pages.slabs, pages.table)
        self.set_references(acquired)

    @property
    def ids(self) -> torch.Tensor:
        """Of a kept prompt: int64 `[n]` on the CPU."""
        assert self.text is not None
        return self.text[0]

    def matches(self, ids: torch.Tensor) -> int:
        """Length of the common prefix of this text and `ids` `[n]`."""
        return common_prefix(self.ids, ids)

    def suits(self, model: Any) -> bool:
        """Whether its tokens have the embeddings now that it was read with, as far as these are known."""
        rows, embedded = EmbeddedRows.of(model), self.header.get("embedded")
        if rows is not self._rows and embedded is not None and rows_digest(model, self.ids) not in (embedded, None):
            return False
        self._rows = rows
        return True


def common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    """Length of the common prefix of two texts, ids `[n]` on the CPU."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one.numpy()[:count] != other.numpy()[:count])  # NumPy: see `prefix_loading._rows`
    return int(differ[0]) if len(differ) else count


def united(parts: Sequence[Pages], count: int | None = None) -> tuple[dict[Slab, tuple[int, int]], list[np.ndarray]]:
    """The slabs that these rows have pages in, and each one's table, numbered through them. By slab: which of `parts` has
    it, and its index there. count: look at the first `count` pages of each row only; `None`: at all."""
    slabs: dict[Slab, tuple[int, int]] = {}
    located = []
    for number, part in enumerate(parts):
        present = part.present[:, :count]
        at, index = locate(part.slabs, part.table[:, :count][present])
        slabs |= {part.slabs[i]: (number, i) for i in np.unique(at).tolist() or [0]}
        located.append((part.slabs, present, at, index))
    firsts = dict(zip(slabs, np.cumsum([0, *map(len, slabs)]).tolist(), strict=False))
    tables = []
    for own, present, at, index in located:
        table = np.zeros(present.shape, dtype=np.int64)
        table[present] = np.array([firsts.get(slab, 0) for slab in own])[at] + index
        tables.append(table)
    return slabs, tables


def joined(parts: Sequence[Contents], tokens: int | None = None) -> Contents:
    """Contents with the one row of each of these, or its first `tokens` tokens (`Contents.first`), without padding."""
    parts = [part if tokens is None else part.first(tokens) for part in parts]
    lengths = np.concatenate([part.lengths for part in parts])
    pages, sources = dict[Hashable, Pages](), dict[Hashable, dict[Slab, tuple[int, int]]]()
    for paging, first in parts[0].pages.items():
        sources[paging], tables = united([part.pages[paging] for part in parts])
        width = max(table.shape[1] for table in tables)
        table = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in tables])
        paged = np.concatenate([part.pages[paging].paged for part in parts])
        new = Pages(first.spec, list(sources[paging]), table, paged)
        pages[paging] = new._replace(in_tail=min(int(new.window(lengths)[1].min()), new.spec.residual))
    layers = {}
    for index, layer in parts[0].layers.items():
        alike = [part.layers[index].in_layout_of(layer.spec) for part in parts]
        slabs = [alike[number].slabs[at] for number, at in sources[layer.spec.paging].values()]
        windows = [_cat(of_rows, dim=1) for of_rows in zip(*(each.windows for each in alike), strict=True)]
        layers[index] = LayerTensors(layer.spec, slabs, windows)
    native_layers = {
        index: {name: _cat([part.native_layers[index][name] for part in parts], dim=0) for name in tensors}
        for index, tensors in parts[0].native_layers.items()
    }
    positions = joined_positions([part.positions for part in parts])
    return Contents(layers, pages, lengths, native_layers, seen=int(lengths.max()), positions=positions)


def _cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def trim(prompts: Sequence[Contents], slab: Slab) -> None:
    """Free the pages of a slab that none of these kept prompts has."""
    users = [prompt for prompt in prompts if slab in prompt.acquired]
    used = np.any([prompt.acquired[slab] for prompt in users], axis=0)
    if not users or used.all():
        return
    new, kept = Slab(int(used.sum())), used.nonzero()[0]
    (paging,) = (paging for paging, pages in users[0].pages.items() if slab in pages.slabs)
    at = users[0].pages[paging].slabs.index(slab)
    memory = {
        index: read_pages([layer.slabs[at]], upload(kept, layer.slabs[at].device))
        for index, layer in users[0].layers.items()
        if layer.spec.paging == paging
    }
    for prompt in users:
        pages = prompt.pages[paging]
        at = pages.slabs.index(slab)
        left = [used if each is slab else np.ones(len(each), dtype=bool) for each in pages.slabs]
        slabs = [*pages.slabs[:at], new, *pages.slabs[at + 1 :]]
        prompt.pages[paging] = pages._replace(slabs=slabs, table=(np.concatenate(left).cumsum() - 1)[pages.table])
        for index, of_layer in memory.items():
            layer = prompt.layers[index]
            prompt.layers[index] = layer._replace(slabs=[*layer.slabs[:at], of_layer, *layer.slabs[at + 1 :]])
        prompt._acquire()


# ---- stores ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@torch.inference_mode(False)
def take_rows(stores: Mapping[int, LayerStore], rows: Sequence[int] | None = None) -> Contents:
    """Take rows of the stores of a cache's layers, by index. Pages are not copied. Waits for the device.

    Args:
        rows: which rows; `None`: all.

    Raises:
        ValueError: there are no rows.
    """
    first = next(iter(stores.values()))
    chosen = list(range(first.batch_size) if rows is None else rows)
    if not chosen:
        raise ValueError("the cache has no rows: there is nothing to save")
    lengths, pages, layers = _numbers(first.state.length)[chosen, 0], dict[Hashable, Pages](), {}
    places: dict[tuple[Hashable, torch.device], list[torch.Tensor]] = {}
    for index, store in stores.items():
        state, spec = store.state, store.spec
        if spec.paging not in pages:
            owned = store.memory.tables.slabs if isinstance(store, PagedStore) else map(Slab, map(len, state.pool))
            taken = Pages(spec, list(owned), _numbers(state.page_table)[chosen], _numbers(state.paged)[chosen, 0])
            table = taken.table[:, : -(-int(taken.paged.max()) // spec.page_size)]
            taken = taken._replace(table=table)
            pages[spec.paging] = taken._replace(table=np.where(taken.present, table, 0))
        key = spec.paging, store.device
        if key not in places:
            places[key] = pages[spec.paging].places(lengths, chosen, store.device)
        windows = [
            getattr(state, name)[at[0], :, at[1]].transpose(0, 1) for name, at in zip(WINDOWS, places[key], strict=True)
        ]
        layers[index] = LayerTensors(spec, list(state.pool), windows)
    return Contents(layers, pages, lengths)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """int64 on the CPU."""
    return tensor.cpu().numpy().astype(np.int64)


@torch.no_grad()
@torch.inference_mode(False)
def put_rows(stores: Mapping[int, PagedStore], contents: Contents) -> None:
    """Put rows into the empty stores of a cache's layers, in which they fit. Tensors are moved to the device of their
    store, and converted to its layout."""
    layers = {
        store: contents.layers[index].to(store.device).in_layout_of(store.spec) for index, store in stores.items()
    }
    lengths = contents.lengths
    for paging, pages in contents.pages.items():
        alike = [store for store in layers if store.spec.paging == paging]
        memory, table, adopted = alike[0].memory, pages.table, np.zeros_like(pages.table, dtype=bool)
        # a row may have more pages than its length needs: after `crop`, tokens stay in pages that would be in the tail
        width = table.shape[1]
        if memory.capacity is None:
            adopted = np.arange(width) < (pages.paged // pages.spec.page_size)[:, None]
            width = max(memory.width_for(int(lengths.max())), width)
        if adopted.any():
            memory.adopt([layers[store].slabs for store in memory.stores], pages.slabs, table, adopted, width)
        else:
            memory.widen(width)
        copied = pages.present & ~adopted
        sources = np.stack([*copied.nonzero(), table[copied]])
        counts = np.stack([lengths, pages.paged])[:, :, None]
        for device in {store.device for store in alike}:
            uploaded = upload(sources, device), upload(counts, device)
            places = pages.places(lengths, range(len(lengths)), device)
            for store in alike:
                if store.device == device:
                    _fill(store, layers[store], *uploaded, places)


def _fill(
    store: PagedStore, layer: LayerTensors, sources: torch.Tensor, counts: torch.Tensor, places: list[torch.Tensor]
) -> None:
    """Copy into a store what it does not read in place.

    Args:
        sources: int64 `[3, n]`: row and entry of its page table for each page, and the page's number in `layer.slabs`.
        counts: int64 `[2, B, 1]`: tokens of each row, and how many of them are in pages.
        places: see `Pages.places`.
    """
    state = store.state
    if sources.shape[1]:
        write_pages(state.pool, state.page_table[sources[0], sources[1]], read_pages(layer.slabs, sources[2]))
    for name, new, at in zip(WINDOWS, layer.windows, places, strict=True):
        getattr(state, name)[at[0], :, at[1]] = new.transpose(0, 1)
    state.length.copy_(counts[0])
    state.paged.copy_(counts[1])
