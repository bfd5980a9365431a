"""The tensors of a pool: every slot has a window, counters and a page table, and all slots share the pages.

Layers of one shape lie in one tensor, `[layers, slots, ...]`, so that a few launches move or empty a row. A layer's
part of it looks like the state of a cache with `slots` rows, so kernels see no difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch

from ..cache.low_bit_layer import LowBitLayer
from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import SCRATCH, LayerState

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
    """its parameters, see `LayerState`"""

    @classmethod
    def of(cls, layer: LowBitLayer) -> StoredLayer:
        """The shape of a layer that has read some tokens."""
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
        """Layers with the same paging have the same tokens in pages at any length, so they share page numbers."""
        return self.spec.sink, self.spec.residual, self.spec.page_size, self.spec.direct


class _Group(NamedTuple):
    """Layers of one shape, in one tensor each; the first dimension is the layer."""

    windows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """sink_k, sink_v, tail_k, tail_v: `[layers, slots, heads, tokens, head_dim]`"""
    pages: torch.Tensor
    """uint8 `[layers, pages, heads, page_bytes]`"""
    counters: torch.Tensor
    """int32 `[3, layers, slots, heads]`: length, paged, lost"""
    paging: Hashable


class _Table(NamedTuple):
    pages: torch.Tensor
    """int32 `[slots, entries]`"""
    addresses: dict[int, torch.Tensor]
    """by bytes of a page, int64 `[slots, entries]`"""


class SlotMemory:
    """Allocates memory and computes addresses. It does not know which slot and which page belongs to which row.

    Args:
        layers: in the order of the model. slots: number of rows. pages: number of pages, by paging. entries: pages that
            a single row may have, by paging.
    """

    @torch.inference_mode(False)
    def __init__(
        self, layers: Iterable[StoredLayer], slots: int, pages: dict[Hashable, int], entries: dict[Hashable, int]
    ):
        self.layers, self.slots = list(layers), slots
        shapes: dict[Hashable, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            shapes[(layer.paging, layer.page_bytes, *layer[1:5])].append(index)
        self.groups: list[_Group] = []
        self.tables: dict[tuple[Hashable, torch.device], _Table] = {}
        scratch: dict[torch.device, torch.Tensor] = {}
        states: dict[int, LayerState] = {}
        for layer in self.layers:
            count = slots * layer.heads * SCRATCH + 1
            if layer.device not in scratch or scratch[layer.device].numel() < count:
                scratch[layer.device] = torch.zeros(count, dtype=torch.int32, device=layer.device)
        for indices in shapes.values():
            first = self.layers[indices[0]]
            group = self._group(first, len(indices), pages[first.paging])
            table = self._table(first, entries[first.paging])
            self.groups.append(group)
            for place, index in enumerate(indices):
                sink_k, sink_v, tail_k, tail_v = (window[place] for window in group.windows)
                length, paged, lost = group.counters[:, place]
                states[index] = LayerState(
                    [group.pages[place]],
                    table.pages,
                    table.addresses[first.page_bytes],
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

    def _group(self, like: StoredLayer, count: int, pages: int) -> _Group:
        spec, device = like.spec, like.device

        def window(tokens: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(count, self.slots, like.heads, tokens, head_dim, dtype=like.dtype, device=device)

        windows = (
            window(spec.sink, like.head_dims[0]),
            window(spec.sink, like.head_dims[1]),
            window(spec.tail_size, like.head_dims[0]),
            window(spec.tail_size, like.head_dims[1]),
        )
        per_head = like.page_bytes // like.heads
        block = torch.zeros(count, pages, like.heads, per_head, dtype=torch.uint8, device=device)
        counters = torch.zeros(3, count, self.slots, like.heads, dtype=torch.int32, device=device)
        return _Group(windows, block, counters, like.paging)

    def _table(self, like: StoredLayer, entries: int) -> _Table:
        table = self.tables.get((like.paging, like.device))
        if table is None:
            ids = torch.zeros(self.slots, entries, dtype=torch.int32, device=like.device)
            table = self.tables[like.paging, like.device] = _Table(ids, {})
        if like.page_bytes not in table.addresses:
            table.addresses[like.page_bytes] = torch.zeros_like(table.pages, dtype=torch.int64)
        return table

    # ---- rows -----------------------------------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        """Move the row of slot `source` to slot `target`."""
        self.copy_window(source, target)
        for table in self.tables.values():
            for tensor in (table.pages, *table.addresses.values()):
                tensor[target] = tensor[source]

    def copy_window(self, source: int, target: int) -> None:
        """Copy sink, tail and counters of a row."""
        for group in self.groups:
            for tensor in group.windows:
                tensor[:, target] = tensor[:, source]
            group.counters[:, :, target] = group.counters[:, :, source]

    def copy_page(self, paging: Hashable, source: int, target: int) -> None:
        """Copy the bytes of a page, in all layers that share its number."""
        for group in self.groups:
            if group.paging == paging:
                group.pages[:, target] = group.pages[:, source]

    def empty(self, slot: int) -> None:
        """Empty the slot. A row of length 0 attends to nothing, whatever its window and table hold."""
        for group in self.groups:
            group.counters[:, :, slot] = 0

    def set_length(self, slot: int, length: int) -> None:
        """Set the slot's length to this many tokens, all of them in the sink and in pages."""
        for group in self.groups:
            sink = group.windows[0].shape[3]
            group.counters[0, :, slot] = length
            group.counters[1, :, slot] = max(length - sink, 0)

    def write_table(self, paging: Hashable, entries: list[tuple[int, int, int]]) -> None:
        """entries: (slot, entry, page)."""
        for (kind, device), table in self.tables.items():
            if kind != paging:
                continue
            slots, places, pages = torch.tensor(entries, dtype=torch.int64).T.to(device, non_blocking=True)
            table.pages[slots, places] = pages.to(torch.int32)
            for size, addresses in table.addresses.items():
                addresses[slots, places] = pages * size

    def sinks(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a row's sink, by group: `[layers, heads, sink, head_dim]` for keys and for values."""
        return [(group.windows[0][:, slot].clone(), group.windows[1][:, slot].clone()) for group in self.groups]

    def set_sinks(self, slot: int, sinks: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for group, (keys, values) in zip(self.groups, sinks, strict=True):
            group.windows[0][:, slot] = keys
            group.windows[1][:, slot] = values

    # ---- counting -------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes allocated here. The layers' parameters belong to the model's calibration and are not counted."""
        sizes = {}
        for state in self.states:
            for tensor in state._replace(parameters=[]).tensors():
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr(), tensor.device] = storage.nbytes()
        return sum(sizes.values())

    @property
    def lost(self) -> int:
        """Number of tokens that came to a full row. Waits for the device."""
        return max(int(group.counters[2].max()) for group in self.groups)
