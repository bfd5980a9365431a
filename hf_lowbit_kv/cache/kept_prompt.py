"""One text that the prefix store keeps: contents of a cache, whose pages texts with the same beginning share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ..storage.content_digests import EmbeddedRows, rows_digest
from ..storage.layer_contents import equal_pages
from ..storage.page_pool import PageUser, Slab
from ..storage.paged_store import read_pages
from .cache_contents import CacheContents, common_prefix, pages_of


class KeptPrompt(PageUser):
    """A text, and the contents of a cache that has read it. It has references to its pages, so no cache that reads them
    where they lie takes them for free ones.

    Args:
        seed: identifies the model and the kind of cache.
        ids: int64 `[n]` on the CPU.
        contents: one row.
        header: the description of model and cache in a file.
    """

    def __init__(self, seed: str, ids: torch.Tensor, contents: CacheContents, header: dict[str, Any]):
        super().__init__()
        self.seed, self.ids, self.header = seed, ids, header
        self._rows: EmbeddedRows | None = None  # the last ones that it suits
        self.set_contents(contents)

    def set_contents(self, contents: CacheContents) -> None:
        counts: dict[Hashable, list[Slab]] = {}
        layers = {
            index: layer._replace(shared=counts.setdefault(layer.spec.paging, layer.shared))
            for index, layer in contents.layers.items()
        }
        acquired: dict[Slab, np.ndarray] = {}
        for layer in layers.values():
            ends = np.cumsum([len(slab) for slab in layer.shared])
            pages = np.bincount(layer.table[0].numpy(), minlength=ends[-1]).astype(np.int32)
            acquired |= zip(layer.shared, np.split(pages, ends[:-1]), strict=True)
        self.contents = contents._replace(layers=layers)
        self.set_references(acquired)

    def suits(self, model: Any) -> bool:
        """Whether its tokens have the embeddings now that it was read with, as far as these are known."""
        rows, embedded = EmbeddedRows.of(model), self.header.get("embedded")
        if rows is not self._rows and embedded is not None and rows_digest(model, self.ids) not in (embedded, None):
            return False
        self._rows = rows
        return True

    @property
    def device(self) -> torch.device:
        return next(iter(self.contents.layers.values())).sinks[0][0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the text with all its pages, those that other texts share too."""
        native = (x.nbytes for layer in self.contents.native_layers.values() for x in layer.tensors.values())
        return sum(layer.nbytes for layer in self.contents.layers.values()) + sum(native)

    def matches(self, ids: torch.Tensor) -> int:
        """Length of the common prefix of this text and `ids` `[n]`."""
        return common_prefix(self.ids, ids)


@torch.no_grad()
def sharing_pages(contents: CacheContents, prompt: KeptPrompt | None = None, match: int = 0) -> CacheContents:
    """The same contents with copied pages, except those that a kept prompt has with the same bytes in all layers: these are
    shared. Texts that were cut into other chunks have other bytes. Waits for the device.

    Args:
        match: tokens that the two texts have in common.
    """
    first = {} if prompt is None else prompt.contents.layers
    equal = torch.zeros(0, dtype=torch.bool)
    if prompt is not None and all(layer.spec == first[index].spec for index, layer in contents.layers.items()):
        count = min(pages_of(each, match) for each in (contents, prompt.contents))
        for index, layer in contents.layers.items():
            equal = equal_pages(layer, first[index], count) & (equal if len(equal) else True)
    count = int(equal.long().cumprod(0).sum())
    layers = {i: layer.copied(first[i] if count else None, count) for i, layer in contents.layers.items()}
    return contents._replace(layers=layers)


def trim(prompts: Sequence[KeptPrompt], slab: Slab) -> None:
    """Free the pages of a slab that none of these prompts has."""
    users = [prompt for prompt in prompts if slab in prompt.acquired]
    used = np.any([prompt.acquired[slab] for prompt in users], axis=0)
    if not users or used.all():
        return
    new, indices = Slab(int(used.sum())), torch.from_numpy(used.nonzero()[0])
    pages = {
        i: read_pages([memory], indices.to(memory.device))
        for i, layer in users[0].contents.layers.items()
        for memory, counts in zip(layer.slabs, layer.shared, strict=True)
        if counts is slab
    }
    for prompt in users:
        layers = dict(prompt.contents.layers)
        layers |= {i: layers[i].trimmed(slab, used, new, memory) for i, memory in pages.items()}
        prompt.set_contents(prompt.contents._replace(layers=layers))
