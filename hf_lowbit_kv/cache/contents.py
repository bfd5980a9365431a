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
from ..storage.paged_store import WINDOWS, PagedStore, read_pages, write_pages
from ..storage.row_memory import page_addresses
from .model_positions import Values, joined_positions

#: number of pages that `in_layout_of` converts at a time. Meanwhile each code takes about eight bytes
PAGES_AT_ONCE = 64


class PackedLayer(NamedTuple):
    """The tokens of `B` rows in one packed layer."""

    spec: LayerSpec
    """with the layouts in which the pages are"""
    slabs: list[torch.Tensor]
    """uint8 `[n, H, page_bytes]`: its memory of `PagedLayers.slabs`"""
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

    def to(self, device: torch.device) -> PackedLayer:
        """The same tokens on this device. What is there already is not copied."""
        slabs, windows = ([x.to(device) for x in tensors] for tensors in (self.slabs, self.windows))
        return self._replace(slabs=slabs, windows=windows)

    def in_layout_of(self, spec: LayerSpec) -> PackedLayer:
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
        return torch.cat(converted)


class PagedLayers(NamedTuple):
    """`B` rows in all packed layers with the same paging, which have the same tokens in the same pages."""

    spec: LayerSpec
    """of one of these layers"""
    slabs: list[Slab]
    table: np.ndarray
    """int64 `[B, P]`: page numbers of each row, counted through `slabs`; 0-padded"""
    paged: np.ndarray
    """int64 `[B]`: tokens in pages"""
    layers: dict[int, PackedLayer]
    """by index"""
    in_tail: int = 0
    """lower bound of the unpacked newest tokens of every row"""

    @property
    def present(self) -> np.ndarray:
        """bool `[B, P]`: which entries of `table` name a page."""
        return np.arange(self.table.shape[1]) < -(-self.paged // self.spec.page_size)[:, None]

    def with_pages(self, slabs: list[Slab], table: np.ndarray, memory: Mapping[int, list[torch.Tensor]]) -> PagedLayers:
        """The same tokens in other pages. memory: by layer, that of these slabs."""
        layers = {index: layer._replace(slabs=memory[index]) for index, layer in self.layers.items()}
        return self._replace(slabs=slabs, table=table, layers=layers)

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
        begins, slots = (np.zeros_like(self.paged), self.paged), (self.spec.sink, self.spec.tail_size)
        for counts, firsts, size in zip(self.window(lengths), begins, slots, strict=True):
            tokens = [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
            places.append(upload(np.stack([np.repeat(rows, counts), np.concatenate(tokens) % max(size, 1)]), device))
        return [places[0], places[0], places[1], places[1]]

    def first(self, count: int, lengths: np.ndarray) -> PagedLayers:
        """See `Contents.first`. lengths: int64 `[1]`, of what is left."""
        paged = np.minimum(self.paged, max(count - self.spec.sink, 0))
        new = self._replace(table=self.table[:, : -(-int(paged[0]) // self.spec.page_size)], paged=paged)
        (sink,), (tail,) = new.window(lengths)
        ends = sink, sink, tail, tail
        layers = {
            index: layer._replace(windows=[x[:, :end] for x, end in zip(layer.windows, ends, strict=True)])
            for index, layer in self.layers.items()
        }
        return new._replace(layers=layers)

    def copied(self, other: PagedLayers | None, count: int) -> PagedLayers:
        """The same tokens with copied pages. other: has the first `count` pages of its row instead."""
        table, own = np.zeros_like(self.table), self.present
        slabs, memory = list[Slab](), {index: list[torch.Tensor]() for index in self.layers}
        if other is not None and count:
            slabs, (begin,), memory = united([other], count)
            table[:, :count], own[:, :count] = begin, False
        numbers, places = np.unique(self.table[own], return_inverse=True)
        table[own] = places + sum(map(len, slabs))
        if len(numbers) or not slabs:  # an empty slab has the shape of pages
            slabs.append(Slab(len(numbers)))
            for index, layer in self.layers.items():
                memory[index].append(read_pages(layer.slabs, upload(numbers, layer.slabs[0].device)))
        return self.with_pages(slabs, table, memory)


def united(
    parts: Sequence[PagedLayers], count: int | None = None
) -> tuple[list[Slab], list[np.ndarray], dict[int, list[torch.Tensor]]]:
    """The slabs that these rows have pages in, each one's table, numbered through them, and their memory in each layer.
    count: look at the first `count` pages of each row only; `None`: at all."""
    slabs: dict[Slab, tuple[PagedLayers, int]] = {}
    located = []
    for part in parts:
        present = part.present[:, :count]
        at, index = locate(part.slabs, part.table[:, :count][present])
        slabs |= {part.slabs[i]: (part, i) for i in np.unique(at).tolist() or [0]}
        located.append((part, present, at, index))
    firsts = dict(zip(slabs, np.cumsum([0, *map(len, slabs)]).tolist(), strict=False))
    tables = []
    for part, present, at, index in located:
        table = np.zeros(present.shape, dtype=np.int64)
        table[present] = np.array([firsts.get(slab, 0) for slab in part.slabs])[at] + index
        tables.append(table)
    memory = {index: [part.layers[index].slabs[i] for part, i in slabs.values()] for index in parts[0].layers}
    return list(slabs), tables, memory


@dataclass(eq=False)
class Contents(PageUser):
    """`B` rows outside of a cache.

    Contents have no references to their pages: use them, copy them (`copied`) or put them into a cache before the cache that
    they are from changes. It may free them and write to them again. A kept prompt (`keep`) has references.
    """

    groups: dict[Hashable, PagedLayers] = field(default_factory=dict)
    """by paging; all packed layers or, of an empty cache, none"""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
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
    def layers(self) -> dict[int, PackedLayer]:
        """Packed layers, by index, in order."""
        return dict(sorted(each for group in self.groups.values() for each in group.layers.items()))

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
        total = sum(x.nbytes for x in self._unpaged())
        for group in self.groups.values():
            pages = len(np.unique(group.table[group.present]))
            total += sum(pages * layer.slabs[0].shape[1:].numel() for layer in group.layers.values())
        return total

    @torch.no_grad()
    def copied(self, other: Contents | None = None, match: int = 0) -> Contents:
        """The same tokens with copied pages, in one slab for each paging. Waits for the device.

        Args:
            other: one row with the same first `match` tokens as this one. Their first pages are shared instead, as far as they
                have the same bytes in all layers. Texts that were cut into other chunks have other bytes.
        """
        count = 0 if other is None else self._equal_pages(other, match)
        begins = {} if other is None else other.groups
        return replace(self, groups={key: group.copied(begins.get(key), count) for key, group in self.groups.items()})

    def _equal_pages(self, other: Contents, match: int) -> int:
        """How many of the first full pages have the same bytes in all layers, among the first `match` tokens."""
        count = min(each.full_pages(match) for each in (self, other))
        equal = np.ones(count, dtype=bool)
        for paging, group in self.groups.items():
            tables = [each.groups[paging].table[0, :count] for each in (self, other)]
            for index, layer in group.layers.items():
                like = other.groups[paging].layers[index]
                if layer.spec != like.spec:
                    return 0
                both = list(zip((layer.slabs, like.slabs), tables, strict=True))
                one, two = (page_addresses([slabs], table)[0] + slabs[0].data_ptr() for slabs, table in both)
                if len(left := np.flatnonzero(equal & (one != two))):
                    one, two = (read_pages(slabs, upload(table[left], slabs[0].device)) for slabs, table in both)
                    equal[left] = (one == two).flatten(1).all(1).cpu().numpy()
        return int(equal.cumprod().sum())

    # ---- one row --------------------------------------------------------------------------------------------------

    def first(self, count: int) -> Contents:
        """The first `count` tokens of the one row. Pages are neither copied nor cut: `count` must be in the sink, at the end of
        a page, or past all pages."""
        lengths = np.minimum(self.lengths, count)
        groups = {key: group.first(count, lengths) for key, group in self.groups.items()}
        return replace(self, groups=groups, lengths=lengths)

    def restorable(self, match: int) -> int:
        """How many tokens of a text can be restored from this row, if both have the first `match` tokens in common. If the
        match ends with the row, or inside the window: all of them. Otherwise whole pages (`whole_pages`)."""
        paged = max(group.spec.sink + group.paged[0] for group in self.groups.values())
        in_window = match > paged and not self.native_layers
        return match if match == self.lengths[0] or in_window else self.whole_pages(match)

    def whole_pages(self, match: int) -> int:
        """How many tokens of a match with this row can be restored from pages only. They end with a page, at least `residual`
        tokens before the end of the match. 0 if the layers' pages do not end at the same tokens, or with native layers, which
        have only the state at the end."""
        specs = [group.spec for group in self.groups.values()]
        count = 0 if self.native_layers else self.full_pages(match - max(spec.residual for spec in specs))
        return specs[0].sink + count * specs[0].page_size if count else 0

    def full_pages(self, tokens: int) -> int:
        """The number of full pages of the first `tokens` tokens of this row. 0 if the layers' pages do not end at the same
        tokens."""
        groups = self.groups.values()
        (sink, size), *others = {(group.spec.sink, group.spec.page_size) for group in groups}
        return 0 if others else int(max(min(tokens - sink, *(group.paged[0] for group in groups)), 0) // size)

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
        for group in self.groups.values():
            acquired |= references_in(group.slabs, group.table)
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


def joined(parts: Sequence[Contents], tokens: int | None = None) -> Contents:
    """Contents with the one row of each of these, or its first `tokens` tokens (`Contents.first`), without padding."""
    parts = [part if tokens is None else part.first(tokens) for part in parts]
    lengths = np.concatenate([part.lengths for part in parts])
    groups = {key: _joined([part.groups[key] for part in parts], lengths) for key in parts[0].groups}
    native_layers = {
        index: {name: _cat([part.native_layers[index][name] for part in parts], dim=0) for name in tensors}
        for index, tensors in parts[0].native_layers.items()
    }
    positions = joined_positions([part.positions for part in parts])
    return Contents(groups, lengths, native_layers, seen=int(lengths.max()), positions=positions)


def _joined(parts: Sequence[PagedLayers], lengths: np.ndarray) -> PagedLayers:
    specs = {index: layer.spec for index, layer in parts[0].layers.items()}
    parts = [
        part._replace(layers={index: x.in_layout_of(specs[index]) for index, x in part.layers.items()})
        for part in parts
    ]
    slabs, tables, memory = united(parts)
    width = max(table.shape[1] for table in tables)
    table = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in tables])
    layers = {}
    for index, spec in specs.items():
        windows = zip(*(part.layers[index].windows for part in parts), strict=True)
        layers[index] = PackedLayer(spec, memory[index], [_cat(of_rows, dim=1) for of_rows in windows])
    new = PagedLayers(parts[0].spec, slabs, table, np.concatenate([part.paged for part in parts]), layers)
    return new._replace(in_tail=min(int(new.window(lengths)[1].min()), new.spec.residual))


def _cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def trim(prompts: Sequence[Contents], slab: Slab) -> None:
    """Free the pages of a slab that none of these kept prompts has."""
    users = [prompt for prompt in prompts if slab in prompt.acquired]
    used = np.any([prompt.acquired[slab] for prompt in users], axis=0)
    if not users or used.all():
        return
    new, kept = Slab(int(used.sum())), used.nonzero()[0]
    (paging,) = (paging for paging, group in users[0].groups.items() if slab in group.slabs)
    memory: dict[int, torch.Tensor] = {}
    for index, layer in users[0].groups[paging].layers.items():
        pages = layer.slabs[users[0].groups[paging].slabs.index(slab)]
        memory[index] = read_pages([pages], upload(kept, pages.device))
    for prompt in users:
        group = prompt.groups[paging]
        at = group.slabs.index(slab)
        left = [used if each is slab else np.ones(len(each), dtype=bool) for each in group.slabs]
        slabs, of_layers = list(group.slabs), {index: list(layer.slabs) for index, layer in group.layers.items()}
        slabs[at] = new
        for index, pages in memory.items():
            of_layers[index][at] = pages
        prompt.groups[paging] = group.with_pages(slabs, (np.concatenate(left).cumsum() - 1)[group.table], of_layers)
        prompt._acquire()


# ---- stores ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@torch.inference_mode(False)
def take_rows(stores: Mapping[int, PagedStore], rows: Sequence[int] | None = None) -> Contents:
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
    contents = Contents(lengths=_numbers(first.state.length)[chosen, 0])
    places: dict[tuple[Hashable, torch.device], list[torch.Tensor]] = {}
    for index, store in stores.items():
        state, spec = store.state, store.spec
        if spec.paging not in contents.groups:
            # a pool's slab is never shared outside of the pool: `copied` follows
            slabs = store.memory.pages.slabs if store.memory is not None else map(Slab, map(len, state.pool))
            paged, table = _numbers(state.paged)[chosen, 0], _numbers(state.page_table)[chosen]
            new = PagedLayers(spec, list(slabs), table[:, : -(-int(paged.max()) // spec.page_size)], paged, {})
            contents.groups[spec.paging] = new._replace(table=np.where(new.present, new.table, 0))
        group = contents.groups[spec.paging]
        if (key := (spec.paging, store.device)) not in places:
            places[key] = group.places(contents.lengths, chosen, store.device)
        windows = [
            getattr(state, name)[at[0], :, at[1]].transpose(0, 1) for name, at in zip(WINDOWS, places[key], strict=True)
        ]
        group.layers[index] = PackedLayer(spec, list(state.pool), windows)
    return contents


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """int64 on the CPU."""
    return tensor.cpu().numpy().astype(np.int64)


@torch.no_grad()
@torch.inference_mode(False)
def put_rows(stores: Mapping[int, PagedStore], contents: Contents) -> None:
    """Put rows into the empty stores of a cache's layers, in which they fit. Tensors are moved to the device of their
    store, and converted to its layout."""
    lengths = contents.lengths
    for group in contents.groups.values():
        layers = {stores[index]: layer for index, layer in group.layers.items()}
        layers = {store: layer.to(store.device).in_layout_of(store.spec) for store, layer in layers.items()}
        memory, table, adopted = next(iter(layers)).memory, group.table, np.zeros_like(group.table, dtype=bool)
        # a row may have more pages than its length needs: after `crop`, tokens stay in pages that would be in the tail
        width = table.shape[1]
        if memory.capacity is None:
            adopted = np.arange(width) < (group.paged // group.spec.page_size)[:, None]
            width = max(memory.width_for(int(lengths.max())), width)
        if adopted.any():
            memory.adopt([layers[store].slabs for store in memory.stores], group.slabs, table, adopted, width)
        else:
            memory.widen(width)
        copied = group.present & ~adopted
        sources = np.stack([*copied.nonzero(), table[copied]])
        counts = np.stack([lengths, group.paged])[:, :, None]
        rows = range(len(lengths))
        on_device = {
            device: (upload(sources, device), upload(counts, device), group.places(lengths, rows, device))
            for device in {store.device for store in layers}
        }
        for store, layer in layers.items():
            state = store.state
            (row, entry, number), (length, paged), places = on_device[store.device]
            if len(row):
                write_pages(state.pool, state.page_table[row, entry], read_pages(layer.slabs, number))
            for name, new, at in zip(WINDOWS, layer.windows, places, strict=True):
                getattr(state, name)[at[0], :, at[1]] = new.transpose(0, 1)
            state.length.copy_(length)
            state.paged.copy_(paged)
