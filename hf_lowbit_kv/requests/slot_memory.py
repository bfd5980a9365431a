"""The tensors of a pool of rows. Each slot has a full-precision window, counters, a page table and, in models with sliding
windows, rings. All slots share the pages.

Layers of one shape share tensors, `[layers, slots, ...]`, so that a few launches move or empty a row. A layer's part of
them looks like the state of a cache with `slots` rows, so kernels see no difference.

Rows can also read pages of other owners in place, for example of kept prompts: those slabs are attached after the pool's own
slab. The pool's own tensors keep their addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..cache.low_bit_layer import LowBitLayer
from ..storage.layer_spec import LayerSpec
from ..storage.page_pool import locate, upload
from ..storage.paged_store import SCRATCH, LayerState
from .ring_memory import RingMemory

Pair = tuple[torch.Tensor, torch.Tensor]
#: entries of a page table are a multiple of this, so that every slot's part of it begins at a multiple of 16 bytes
TABLE_STEP = 4


class StoredLayer(NamedTuple):
    """The spec and the sizes of one layer."""

    spec: LayerSpec
    """as its backend stores it"""
    heads: int
    """KV heads of this process"""
    head_dims: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    records: list[torch.Tensor]
    """as `LayerState.parameters`"""

    @classmethod
    def of(cls, layer: LowBitLayer) -> StoredLayer:
        """The spec and the sizes of a layer that has read some tokens."""
        store = layer.store
        assert store is not None, "the layer has read no token"
        sizes = store.num_heads, (store.head_dim_k, store.head_dim_v), store.dtype, store.device
        return cls(layer.spec, *sizes, store.state.parameters)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, for all KV heads."""
        return self.heads * sum(self.spec.part_bytes(*self.head_dims, self.dtype))

    @property
    def window_bytes(self) -> int:
        """Bytes of a row's sink and tail."""
        return self.heads * sum(self.head_dims) * (self.spec.sink + self.spec.tail_size) * self.dtype.itemsize

    @property
    def counter_bytes(self) -> int:
        """Bytes of a row's counters."""
        return 4 * self.heads * (3 + SCRATCH)

    @property
    def paging(self) -> Hashable:
        return self.spec.paging


@dataclass
class _Group:
    """Layers of one shape, in one tensor each; the first dimension is the layer."""

    windows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """sink_k, sink_v, tail_k, tail_v: `[layers, slots, heads, tokens, head_dim]`"""
    pages: torch.Tensor
    """uint8 `[layers, pages, heads, page_bytes]`"""
    counters: torch.Tensor
    """int32 `[3, layers, slots, heads]`: length, paged, lost"""
    addresses: torch.Tensor
    """int64 `[layers, slots, entries]`: the layers' `page_address`"""
    layers: list[int]
    paging: Hashable


class SlotMemory:
    """Allocates memory and computes addresses. The assignment of slots and pages to rows is elsewhere (`RowPool`).

    Args:
        layers: in the order of the model.
        slots: number of rows.
        pages: number of pages, by paging (`LayerSpec.paging`).
        entries: largest number of pages of a single row, by paging.
        rings: the rings of the slots.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        layers: Iterable[StoredLayer],
        slots: int,
        pages: dict[Hashable, int],
        entries: dict[Hashable, int],
        rings: RingMemory,
    ):
        self.layers, self.slots, self.rings = list(layers), slots, rings
        shapes: dict[Hashable, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            shapes[(layer.paging, layer.page_bytes, *layer[1:5])].append(index)
        self.groups: list[_Group] = []
        #: by paging and device, int32 `[slots, entries]`: the layers' `page_table`
        self.tables: dict[tuple[Hashable, torch.device], torch.Tensor] = {}
        scratch: dict[torch.device, torch.Tensor] = {}
        states: dict[int, LayerState] = {}
        for layer in self.layers:
            count = slots * layer.heads * SCRATCH + 1
            if layer.device not in scratch or scratch[layer.device].numel() < count:
                scratch[layer.device] = torch.zeros(count, dtype=torch.int32, device=layer.device)
        for indices in shapes.values():
            first = self.layers[indices[0]]
            group = self._group(first, indices, pages[first.paging], entries[first.paging])
            if (first.paging, first.device) not in self.tables:
                table = torch.zeros(slots, entries[first.paging], dtype=torch.int32, device=first.device)
                self.tables[first.paging, first.device] = table
            self.groups.append(group)
            for place, index in enumerate(indices):
                sink_k, sink_v, tail_k, tail_v = (window[place] for window in group.windows)
                length, paged, lost = group.counters[:, place]
                states[index] = LayerState(
                    [group.pages[place]],
                    self.tables[first.paging, first.device],
                    group.addresses[place],
                    sink_k,
                    sink_v,
                    tail_k,
                    tail_v,
                    length,
                    paged,
                    lost,
                    scratch[first.device],
                    self.layers[index].records,
                )
        #: for each layer, in order: the state of all slots
        self.states = [states[index] for index in range(len(self.layers))]

    def _group(self, like: StoredLayer, indices: list[int], pages: int, entries: int) -> _Group:
        spec, device, count = like.spec, like.device, len(indices)

        def window(tokens: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(count, self.slots, like.heads, tokens, head_dim, dtype=like.dtype, device=device)

        windows = (
            window(spec.sink, like.head_dims[0]),
            window(spec.sink, like.head_dims[1]),
            window(spec.tail_size, like.head_dims[0]),
            window(spec.tail_size, like.head_dims[1]),
        )
        per_head = like.page_bytes // like.heads
        slab = torch.zeros(count, pages, like.heads, per_head, dtype=torch.uint8, device=device)
        counters = torch.zeros(3, count, self.slots, like.heads, dtype=torch.int32, device=device)
        addresses = torch.zeros(count, self.slots, entries, dtype=torch.int64, device=device)
        return _Group(windows, slab, counters, addresses, indices, like.paging)

    # ---- slabs of others -----------------------------------------------------------------------------------------

    def attach(self, paging: Hashable, place: int, slabs: Sequence[torch.Tensor]) -> None:
        """Let rows read pages of another owner.

        Args:
            place: index among the slabs of the pool: that of a detached slab with the same number of pages, or the next new
                index.
            slabs: for each layer of this paging, in order, uint8 `[n, heads, page_bytes]` on the layer's device, in its
                layout.
        """
        for index, slab in zip(self.layers_of(paging), slabs, strict=True):
            self.states[index].pool[place : place + 1] = [slab]  # views of the state have the same list

    def detach(self, paging: Hashable, place: int) -> None:
        """Drop an attached slab that no row uses. Its page numbers stay reserved, without memory. Tables of empty slots may
        still contain them, but nothing reads those tables."""
        for index in self.layers_of(paging):
            pool = self.states[index].pool
            pool[place] = pool[0][:1].expand(len(pool[place]), -1, -1)

    def layers_of(self, paging: Hashable) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if layer.paging == paging]

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
            self.states[index].pool[0][page] = content

    def empty(self, slot: int) -> None:
        """Empty the slot. A row of length 0 attends to nothing, so its window and table need no reset."""
        for group in self.groups:
            group.counters[:, :, slot] = 0

    def write_table(self, paging: Hashable, entries: list[tuple[int, int, int]]) -> None:
        """Write entries of page tables. entries: (slot, index in the slot's table, page number)."""
        numbers = np.array(entries, dtype=np.int64).T
        slab, place = locate(self.states[self.layers_of(paging)[0]].pool, numbers[2])
        for device in {group.pages.device for group in self._groups_of(paging)}:
            groups = [group for group in self._groups_of(paging) if group.pages.device == device]
            addresses = [self._addresses(group, slab, place) for group in groups]
            uploaded = upload(np.concatenate([numbers, *addresses]), device)
            slots, columns, pages = uploaded[:3]
            self.tables[paging, device][slots, columns] = pages.to(torch.int32)
            for group, of_group in zip(groups, uploaded[3:].split([*map(len, addresses)]), strict=True):
                group.addresses[:, slots, columns] = of_group

    def _addresses(self, group: _Group, slab: np.ndarray, place: np.ndarray) -> np.ndarray:
        """int64 `[layers, n]`: where these pages start, in bytes from the start of the layer's own slab."""
        starts = np.zeros((len(group.layers), slab.max() + 1), dtype=np.int64)
        pools = [self.states[index].pool for index in group.layers]
        for number in {*slab.tolist()} - {0}:
            starts[:, number] = [pool[number].data_ptr() - pool[0].data_ptr() for pool in pools]
        return starts[:, slab] + place * self.layers[group.layers[0]].page_bytes

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
        """Bytes that the pool has allocated, without the layers' parameters and attached slabs, which have other owners."""
        sizes = {}
        for state in self.states:
            for tensor in state._replace(parameters=[], pool=state.pool[:1]).tensors():
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr(), tensor.device] = storage.nbytes()
        return sum(sizes.values()) + self.rings.nbytes

    @property
    def lost(self) -> int:
        """Largest number of tokens that a row has lost because it was full. Waits for the device."""
        return max(int(group.counters[2].max()) for group in self.groups)
