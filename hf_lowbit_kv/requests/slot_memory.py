"""The tensors of a pool of rows. Each slot has a full-precision window, counters, a page table and, in models with sliding
windows, rings. All slots share the pages.

Layers of one shape share tensors, `[layers, slots, ...]`, so that a few launches move or empty a row. A layer's part of
them looks like the state of a cache with `slots` rows, so kernels see no difference.

Rows can also read pages of other owners in place, for example of kept prompts: those slabs are adopted after the pool's own
slab. The pool's own tensors keep their addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..cache.ring_layer import Pair
from ..storage.page_pool import upload
from ..storage.paged_store import COUNTERS, SCRATCH, WINDOWS, PagedStore
from ..storage.row_memory import page_addresses
from .ring_memory import RingMemory, RingShape

#: entries of a page table are a multiple of this, so that every slot's part of it begins at a multiple of 16 bytes
TABLE_STEP = 4


@dataclass
class _Group:
    """Layers of one shape, in one tensor each; the first dimension is the layer."""

    windows: list[torch.Tensor]
    """`WINDOWS`, `[layers, slots, heads, tokens, head_dim]` each"""
    pages: torch.Tensor
    """uint8 `[layers, pages, heads, page_bytes]`"""
    counters: torch.Tensor
    """`COUNTERS`, int32 `[3, layers, slots, heads]`"""
    addresses: torch.Tensor
    """int64 `[layers, slots, entries]`: the layers' `page_address`"""
    layers: list[int]
    paging: Hashable


class SlotMemory:
    """Allocates memory and computes addresses. The assignment of slots and pages to rows is elsewhere (`RowPool`).

    Args:
        layers: in the order of the model, stores with their sizes and parameters.
        slots: number of rows.
        tokens: tokens for which there are pages.
        max_length: largest number of tokens of a single row.
        rings: of the sliding layers, in order.
    """

    @torch.inference_mode(False)
    def __init__(
        self, layers: Sequence[PagedStore], slots: int, tokens: int, max_length: int, rings: Sequence[RingShape]
    ):
        self.slots, self.rings = slots, RingMemory(rings, slots, max_length)
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for index, layer in enumerate(layers):
            sizes = layer.page_bytes, layer.num_heads, layer.state.head_dims, layer.dtype, layer.device
            alike[(layer.spec.paging, *sizes)].append(index)
        self.groups = [self._group(layers[of[0]], of, tokens, max_length) for of in alike.values()]
        #: by paging and device, int32 `[slots, entries]`: the layers' `page_table`
        self.tables: dict[tuple[Hashable, torch.device], torch.Tensor] = {}
        scratch: dict[torch.device, torch.Tensor] = {}
        for layer in sorted(layers, key=lambda layer: layer.num_heads):  # the last one needs most
            scratch[layer.device] = layer.state.length.new_zeros(slots * layer.num_heads * SCRATCH + 1)
        stores: dict[int, PagedStore] = {}
        for group in self.groups:
            device = group.pages.device
            if (group.paging, device) not in self.tables:
                self.tables[group.paging, device] = torch.zeros_like(group.addresses[0], dtype=torch.int32)
            for place, index in enumerate(group.layers):
                of_rows: dict[str, Any] = {
                    "page_table": self.tables[group.paging, device],
                    "page_address": group.addresses[place],
                    **{name: window[place] for name, window in zip(WINDOWS, group.windows, strict=True)},
                    **dict(zip(COUNTERS, group.counters[:, place], strict=True)),
                }
                state = layers[index].state._replace(pool=[group.pages[place]], scratch=scratch[device], **of_rows)
                stores[index] = PagedStore.over(state, layers[index].spec)
        #: for each layer, in order: a store of all slots
        self.stores = [stores[index] for index in range(len(layers))]

    def _group(self, like: PagedStore, layers: list[int], tokens: int, max_length: int) -> _Group:
        spec, device, rows = like.spec, like.device, (len(layers), self.slots)
        windows = [
            torch.zeros(*rows, *x.shape[1:], dtype=x.dtype, device=device)
            for x in (getattr(like.state, name) for name in WINDOWS)
        ]
        # a cropped prefix may have all its tokens in pages
        pages, entries = (max(-(-count // spec.page_size), 1) for count in (tokens, max_length - spec.sink))
        slab = torch.zeros(len(layers), pages, like.num_heads, like.page_bytes, dtype=torch.uint8, device=device)
        counters = torch.zeros(len(COUNTERS), *rows, like.num_heads, dtype=torch.int32, device=device)
        addresses = torch.zeros(*rows, -(-entries // TABLE_STEP) * TABLE_STEP, dtype=torch.int64, device=device)
        return _Group(windows, slab, counters, addresses, layers, spec.paging)

    # ---- slabs of others -----------------------------------------------------------------------------------------

    def adopt(self, paging: Hashable, place: int, slabs: Sequence[torch.Tensor]) -> None:
        """Let rows read pages of another owner.

        Args:
            place: index among the slabs of the pool: that of a dropped slab with the same number of pages, or the next new
                index.
            slabs: for each layer of this paging, in order, uint8 `[n, heads, page_bytes]` on the layer's device, in its
                layout.
        """
        for index, slab in zip(self.layers_of(paging), slabs, strict=True):
            self.stores[index].state.pool[place : place + 1] = [slab]  # views of the state have the same list

    def drop(self, paging: Hashable, place: int) -> None:
        """Drop an adopted slab that no row uses. Its page numbers stay reserved, without memory. Tables of empty slots may
        still contain them, but nothing reads those tables."""
        for index in self.layers_of(paging):
            pool = self.stores[index].state.pool
            pool[place] = pool[0][:1].expand(len(pool[place]), -1, -1)

    def layers_of(self, paging: Hashable) -> list[int]:
        return [index for index, store in enumerate(self.stores) if store.spec.paging == paging]

    def _groups_of(self, paging: Hashable) -> list[_Group]:
        return [group for group in self.groups if group.paging == paging]

    # ---- rows -----------------------------------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        """Move the row of slot `source` to slot `target`."""
        self.copy_window(source, target)
        for table in self.tables.values():
            table[target] = table[source]
        for group in self.groups:
            group.addresses[:, target] = group.addresses[:, source]

    def copy_window(self, source: int, target: int) -> None:
        """Copy the full-precision window (sink and tail), the rings and the counters of a row."""
        self.rings.copy(source, target)
        for group in self.groups:
            for tensor in group.windows:
                tensor[:, target] = tensor[:, source]
            group.counters[:, :, target] = group.counters[:, :, source]

    def copy_page(self, paging: Hashable, source: int, target: int) -> None:
        """Copy the bytes of a page, in all layers that share its number."""
        for group in self._groups_of(paging):
            group.pages[:, target] = group.pages[:, source]

    def write_page(self, paging: Hashable, page: int, contents: Sequence[torch.Tensor]) -> None:
        """Fill a page of the pool. contents: for each layer of this paging, in order, uint8 `[heads, page_bytes]`."""
        for index, content in zip(self.layers_of(paging), contents, strict=True):
            self.stores[index].state.pool[0][page] = content

    def empty(self, slot: int) -> None:
        """Empty the slot. A row of length 0 attends to nothing, so its window and table need no reset."""
        for group in self.groups:
            group.counters[:, :, slot] = 0

    def write_table(self, paging: Hashable, entries: list[tuple[int, int, int]]) -> None:
        """Write entries of page tables. entries: (slot, index in the slot's table, page number)."""
        numbers = np.array(entries, dtype=np.int64).T
        for device in {group.pages.device for group in self._groups_of(paging)}:
            groups = [group for group in self._groups_of(paging) if group.pages.device == device]
            pools = [self.stores[index].state.pool for group in groups for index in group.layers]
            uploaded = upload(np.concatenate([numbers, page_addresses(pools, numbers[2])]), device)
            slots, columns, pages = uploaded[:3]
            self.tables[paging, device][slots, columns] = pages.to(torch.int32)
            for group, of_group in zip(
                groups, uploaded[3:].split([len(group.layers) for group in groups]), strict=True
            ):
                group.addresses[:, slots, columns] = of_group

    def sinks(self, slot: int) -> list[Pair]:
        """Copies of a row's sink, by group: `[layers, heads, sink, head_dim]` for keys and for values."""
        return [(group.windows[0][:, slot].clone(), group.windows[1][:, slot].clone()) for group in self.groups]

    def set_window(
        self, slot: int, length: int, paged: dict[Hashable, int], sinks: list[Pair], tails: list[Pair]
    ) -> None:
        """Fill an empty slot.

        Args:
            length: tokens of the row.
            paged: by paging, how many of them are in pages.
            sinks: by group, the sink's keys and values.
            tails: by group, the tokens after the pages, in order; empty: there are none.
        """
        for number, group in enumerate(self.groups):
            group.counters[0, :, slot] = length
            group.counters[1, :, slot] = paged[group.paging]
            for window, new in zip(group.windows[:2], sinks[number], strict=True):
                window[:, slot, :, : new.shape[2]] = new
            for window, new in zip(group.windows[2:], tails[number] if tails else (), strict=bool(tails)):
                first, ring = paged[group.paging], window.shape[3]
                places = torch.arange(first, first + new.shape[2], device=window.device) % max(ring, 1)
                window[:, slot].index_copy_(2, places, new)

    # ---- counting -------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that the pool has allocated, without the layers' parameters and adopted slabs, which have other owners."""
        sizes = {}
        for state in (store.state for store in self.stores):
            for tensor in state._replace(parameters=[], pool=state.pool[:1]).tensors():
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr(), tensor.device] = storage.nbytes()
        return sum(sizes.values()) + self.rings.nbytes

    @property
    def lost(self) -> int:
        """Largest number of tokens that a row has lost because it was full. Waits for the device."""
        return max(int(group.counters[2].max()) for group in self.groups)
