"""One text that the prefix store keeps: its window, and its pages, which texts with the same beginning share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.cache_contents import CacheContents, common_prefix, whole_pages
from ..cache.model_positions import joined_positions
from ..cache.native_layer_contents import NativeContents
from ..storage.content_digests import EmbeddedRows, rows_digest
from ..storage.layer_contents import LayerContents
from ..storage.layer_spec import LayerSpec
from ..storage.page_pool import PinnedPages, Slab
from ..storage.paged_store import read_pages


class PageRange:
    """Consecutive pages of a row, of every packed layer: by layer, uint8 `[n, H, page_bytes]`. Never written.

    Args:
        paging: of each layer.
    """

    def __init__(self, pages: dict[int, torch.Tensor], paging: Mapping[int, Hashable]):
        self._paging = paging
        self._set(pages)

    def _set(self, pages: dict[int, torch.Tensor]) -> None:
        self.pages = pages
        # pin the pages before any cache uses them, so that no cache treats one of them as free
        self._counts = {self._paging[index]: PinnedPages(len(slab)) for index, slab in pages.items()}

    def slab_of(self, index: int) -> Slab:
        """The reference counts of a layer's pages."""
        return self._counts[self._paging[index]].slab

    @property
    def count(self) -> int:
        """Largest number of pages of a layer: with a partial page, layers may differ by one."""
        return max(map(len, self.pages.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.pages.values())

    def trim(self, count: int) -> None:
        """Keep the first `count` pages."""
        self._set({index: slab[:count].clone() for index, slab in self.pages.items()})


#: ranges of pages, and how many pages of each
Shared = Sequence[tuple[PageRange, int]]


@dataclass(eq=False)
class KeptPrompt:
    """A text, and the contents of a cache that has read it.

    Attributes:
        seed: identifies the model and the kind of cache.
        ids: int64 `[n]` on the CPU.
        page_ranges: pages in order; for each range, how many of its pages belong to this text.
        contents: everything but the pages; one row.
    """

    seed: str
    ids: torch.Tensor
    page_ranges: list[tuple[PageRange, int]]
    contents: CacheContents
    header: dict[str, Any]
    """the description of model and cache in a file"""
    rows: EmbeddedRows | None = None
    """the last ones that it suits"""

    def suits(self, model: Any) -> bool:
        """Whether its tokens have the embeddings now that it was read with, as far as these are known."""
        rows, embedded = EmbeddedRows.of(model), self.header.get("embedded")
        if rows is not self.rows and embedded is not None and rows_digest(model, self.ids) not in (embedded, None):
            return False
        self.rows = rows
        return True

    @staticmethod
    def of(
        seed: str, ids: torch.Tensor, contents: CacheContents, header: dict[str, Any], shared: Shared = ()
    ) -> KeptPrompt:
        """A text whose first pages are in `shared` already, and all others in one slab of each layer."""
        pages = {index: layer.slabs[0] for index, layer in contents.layers.items()}
        page_range = PageRange(pages, {index: layer.spec.paging for index, layer in contents.layers.items()})
        page_ranges = list(shared)
        if page_range.count or not page_ranges:  # an empty one has the shapes of pages, for a file
            page_ranges.append((page_range, page_range.count))
        layers = {index: x._replace(slabs=[]) for index, x in contents.layers.items()}
        return KeptPrompt(seed, ids, page_ranges, contents._replace(layers=layers), header)

    @property
    def native_layers(self) -> dict[int, NativeContents]:
        return self.contents.native_layers

    @property
    def paging(self) -> list[tuple[LayerSpec, int]]:
        """For each packed layer, its spec and how many tokens are in pages."""
        return [(layer.spec, layer.paged[0]) for layer in self.contents.layers.values()]

    @property
    def window_bytes(self) -> int:
        windows = [x for layer in self.contents.layers.values() for x in layer.tensors()]
        return sum(x.nbytes for x in windows) + sum(
            x.nbytes for contents in self.native_layers.values() for x in contents.tensors().values()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the text with all its pages, those that other texts share too."""
        pages = [slab[:count] for page_range, count in self.page_ranges for slab in page_range.pages.values()]
        return sum(x.nbytes for x in pages) + self.window_bytes

    def matches(self, ids: torch.Tensor) -> int:
        """Length of the common prefix of this text and `ids` `[n]`."""
        return common_prefix(self.ids, ids)


def usable(prompt: KeptPrompt, match: int) -> int:
    """How many tokens of a match can be restored from pages only. 0 if native layers need the exact end."""
    if prompt.native_layers:
        return 0
    return whole_pages(prompt.paging, match)


def pages_in_common(prompt: KeptPrompt, match: int, paged: Sequence[int]) -> int:
    """Number of full pages that a kept prompt and a row may share, if they share `match` tokens. 0 if layers differ.

    Args:
        paged: by packed layer, tokens of the row in pages.
    """
    specs, of_prompt = zip(*prompt.paging, strict=True)
    if len({(spec.sink, spec.page_size) for spec in specs}) != 1:
        return 0
    sink, size = specs[0].sink, specs[0].page_size
    return max(min(match - sink, *paged, *of_prompt), 0) // size


@torch.no_grad()
def equal_pages(prompt: KeptPrompt, cache: Any, row: int, count: int) -> int:
    """How many of the first `count` pages of a kept prompt and of a cache's row have the same bytes in all layers. Texts that
    were cut into other chunks have other bytes. Waits for the device."""
    stores = {index: cache.layers[index].store for index in prompt.contents.layers}
    if not count or any(store.spec != prompt.contents.layers[index].spec for index, store in stores.items()):
        return 0
    index, store = next(iter(stores.items()))
    kept = [(page_range.pages[index], pages) for page_range, pages in prompt.page_ranges]
    at = torch.cat([slab.data_ptr() + torch.arange(pages) * slab.stride(0) for slab, pages in kept])[:count]
    same = store.state.page_address[row, :count].cpu() + store.state.pool[0].data_ptr() == at
    first = int(same.long().cumprod(0).sum())  # the row reads these where they lie
    equal = torch.ones(count - first, dtype=torch.bool, device=store.device)
    for index, store in stores.items() if first < count else ():
        of_row = read_pages(store.state.pool, store.state.page_table[row, first:count])
        of_text = torch.cat([page_range.pages[index][:pages] for page_range, pages in prompt.page_ranges])[first:count]
        equal &= (of_row == of_text).flatten(1).all(1).to(equal.device)
    return first + int(equal.long().cumprod(0).sum())


def contents_for(prompts: Sequence[KeptPrompt], tokens: int | None = None) -> CacheContents:
    """The contents for a cache with these rows: the first `tokens` tokens of each, see `LayerContents.first`; `None`: all."""
    layers = {index: _layer(prompts, index, tokens) for index in prompts[0].contents.layers}
    native_layers = {
        index: _joined([prompt.native_layers[index] for prompt in prompts]) for index in prompts[0].native_layers
    }
    return CacheContents(
        layers, native_layers, None, joined_positions([prompt.contents.positions for prompt in prompts])
    )


def _layer(prompts: Sequence[KeptPrompt], index: int, tokens: int | None) -> LayerContents:
    parts = [prompt.contents.layers[index] for prompt in prompts]
    spec = parts[0].spec
    slabs: list[torch.Tensor] = []
    counts: list[Slab] = []
    first: dict[int, int] = {}
    rows = []
    for prompt, part in zip(prompts, parts, strict=True):
        left, ids = -(-part.paged[0] // spec.page_size), []
        for page_range, pages in prompt.page_ranges:
            slab = page_range.pages[index]
            if id(slab) not in first:
                first[id(slab)] = sum(map(len, slabs))
                slabs.append(slab)
                counts.append(page_range.slab_of(index))
            used = min(pages, len(slab), left)
            ids.append(torch.arange(used) + first[id(slab)])
            left -= used
        rows.append(torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64))
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, ids_of_row in enumerate(rows):
        table[row, : len(ids_of_row)] = ids_of_row
    windows = [part.sinks[0] for part in parts], [part.tails[0] for part in parts]
    stored = LayerContents(spec, slabs, table, [part.paged[0] for part in parts], *windows, counts)
    if tokens is not None:
        stored = stored.first(tokens)
    in_tail = min(tail[0].shape[1] for tail in stored.tails)
    return stored._replace(seen=max(stored.lengths), in_tail=min(in_tail, spec.residual))


def _joined(rows: Sequence[NativeContents]) -> NativeContents:
    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

    pairs = [row.tokens for row in rows if row.tokens is not None]
    tokens = (joined([pair[0] for pair in pairs]), joined([pair[1] for pair in pairs])) if pairs else None
    return NativeContents(
        rows[0].seen, tokens, {name: joined([row.states[name] for row in rows]) for name in rows[0].states}
    )
