"""Geometry and memory of one layer: where each token is stored, which pages a row owns, and when a page is packed.

A row (one sequence) of a layer is

    [ sink | pages of `page_size` tokens, packed | tail: the newest tokens ]

`sink` and tail hold the model's dtype. The tail is a ring: the token with index `i` (counted from the end of the sink)
is in slot `i % tail_size`. Page `p` holds tokens `p * page_size` and up, for any split of the text into passes, so a row's
pages depend only on its tokens.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .layer_spec import LayerSpec
from .page_pool import PageTables, Slab, upload

#: fields of `LayerState` that operations never change
READ_ONLY = ("page_table", "page_address", "parameters", "scratch")
#: numbers of `LayerState.scratch` for each row and KV head
SCRATCH = 32
#: pages per row of a slab that a growing cache adds
SLAB_PAGES_PER_ROW = 8


class LayerState(NamedTuple):
    """The tensors of one layer. `B` rows, `H` KV heads (local ones under tensor parallelism).

    `length` and `paged` hold a row's counters once for each head, so that a kernel's program for one (row, head) owns
    its copy. All heads have the same numbers.
    """

    pool: list[torch.Tensor]
    """slabs of pages, uint8 `[pages, H, page_bytes]`: a page's key part, then its value part"""
    page_table: torch.Tensor
    """int32 `[B, P]`: the id of a row's page; ids count through the slabs of `pool` in order"""
    page_address: torch.Tensor
    """int64 `[B, P]`: where that page starts, in bytes from the start of `pool[0]`"""
    sink_k: torch.Tensor
    """`[B, H, sink, head_dim]`, model dtype"""
    sink_v: torch.Tensor
    tail_k: torch.Tensor
    """`[B, H, tail_size, head_dim]`, model dtype"""
    tail_v: torch.Tensor
    length: torch.Tensor
    """int32 `[B, H]`: tokens stored, sink counted, padding not"""
    paged: torch.Tensor
    """int32 `[B, H]`: number of stored tokens that are in pages"""
    lost: torch.Tensor
    """int32 `[B, H]`: tokens that were dropped because the row was full"""
    scratch: torch.Tensor
    """int32 `[B * H * SCRATCH + 1]`: what a kernel's CTAs count together; zeros before and after every operation"""
    parameters: list[torch.Tensor]
    """records, uint8 `[H or 1, bytes]`, one for each role that has parameters, in the order of `ROLES`; read only"""

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of keys and of values."""
        return self.sink_k.shape[-1], self.sink_v.shape[-1]

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in order."""
        return [x for field in self for x in (field if isinstance(field, (list, tuple)) else (field,))]

    def rows(self, rows: slice) -> LayerState:
        """The state of a range of rows. The pool is shared."""
        chosen = {
            name: getattr(self, name)[rows] for name in self._fields if name not in ("pool", "scratch", "parameters")
        }
        return self._replace(**chosen)


class LayerStore:
    """The tensors of a layer, and the spec that defines their meaning. Backends get this object.

    Attributes:
        key: the spec's text form.
        kernels: kernels that a backend has prepared for exactly these tensors, by shape of the inputs. Setting `state` or
            `spec` empties it, because prepared kernels hold addresses.
    """

    kernels: dict[Any, Any]

    def __init__(self, state: LayerState, spec: LayerSpec):
        self.spec, self.state = spec, state
        self.batch_size, self.num_heads = state.length.shape
        self.head_dim_k, self.head_dim_v = state.head_dims
        self.dtype, self.device = state.sink_k.dtype, state.length.device

    @property
    def spec(self) -> LayerSpec:
        return self._spec

    @spec.setter
    def spec(self, spec: LayerSpec) -> None:
        self._spec = spec
        self.key = spec.key  # computed here, because a compiled step only reads it
        self._forget()

    @property
    def state(self) -> LayerState:
        return self._state

    @state.setter
    def state(self, state: LayerState) -> None:
        self._state = state
        self._forget()

    def _forget(self) -> None:
        """A copy starts without prepared kernels."""
        self.kernels = {}
        self._tensors: dict[str, tuple[torch.Tensor, ...]] | None = None

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("kernels", "_tensors")}

    def __setstate__(self, attributes):
        self.__dict__.update(attributes)
        self._forget()

    def rows(self, rows: slice) -> LayerStore:
        """A store of a range of rows, on the same memory."""
        return LayerStore(self.state.rows(rows), self.spec)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one KV head."""
        return sum(self.spec.part_bytes(self.head_dim_k, self.head_dim_v, self.dtype))

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens. A store without an owner has the room already."""

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """By role, the parameters that it holds, `[H or 1, ...]` each: views of the records, see `LayerSpec.tensors`."""
        if self._tensors is None:
            self._tensors = self.spec.tensors(self.state)
        return self._tensors


class PagedStore(LayerStore):
    """Owns a layer's `LayerState`: allocation, growth, sharing of pages between rows, and byte counts.

    Args:
        capacity: tokens per row (preallocated, addresses never change), or `None` to grow by slabs.
        parameters: the layer's records, see `LayerState`.
        tables: page numbers, which layers with the same paging share; `None`: of this layer only.
    """

    # The decorators make sure that a store made inside `torch.inference_mode()` can be written outside it.
    @torch.inference_mode(False)
    def __init__(
        self,
        spec: LayerSpec,
        batch_size: int,
        num_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int | None = None,
        parameters: Sequence[torch.Tensor] = (),
        tables: PageTables | None = None,
    ):
        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def window(tokens: int, head_dim: int) -> torch.Tensor:
            return zeros(batch_size, num_heads, tokens, head_dim, dtype=dtype)

        state = LayerState(
            pool=[],
            page_table=zeros(batch_size, 0),
            page_address=zeros(batch_size, 0, dtype=torch.int64),
            sink_k=window(spec.sink, head_dim_k),
            sink_v=window(spec.sink, head_dim_v),
            tail_k=window(spec.tail_size, head_dim_k),
            tail_v=window(spec.tail_size, head_dim_v),
            length=zeros(batch_size, num_heads),
            paged=zeros(batch_size, num_heads),
            lost=zeros(batch_size, num_heads),
            scratch=zeros(batch_size * num_heads * SCRATCH + 1),
            parameters=list(parameters),
        )
        super().__init__(state, spec)
        self.capacity = capacity
        self.tables = tables or PageTables(batch_size, max(spec.pages_for(capacity or 0), 1))
        self._slabs: list[Slab] = []  # those of `state.pool`
        self._version = -1  # that of the tables when `_follow` last ran
        self._follow()

    # ---- capacity -------------------------------------------------------------------------------------------------

    @property
    def token_bytes(self) -> float:
        """Bytes of a packed token, for all KV heads together."""
        return self.num_heads * self.page_bytes / self.spec.page_size

    @property
    def pages_per_row(self) -> int:
        return self.state.page_table.shape[1]

    @property
    def num_pages(self) -> int:
        return sum(slab.shape[0] for slab in self.state.pool)

    def _new_slab(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, self.num_heads, self.page_bytes, dtype=torch.uint8, device=self.device)

    def width_for(self, length: int) -> int:
        """Pages per row, as a growing store adds them, for rows of `length` tokens."""
        missing = max(self.spec.pages_for(length) - self.pages_per_row, 0)
        return self.pages_per_row + -(-missing // SLAB_PAGES_PER_ROW) * SLAB_PAGES_PER_ROW

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens. A growing store adds slabs; a preallocated store has the room
        already."""
        if self.capacity is None and self.spec.pages_for(length) > self.pages_per_row:
            self.widen(self.width_for(length))

    def widen(self, pages: int) -> None:
        """Give every row at least this many pages; works for a preallocated store too. Packed tokens are not copied."""
        with self._changing():
            if pages > self.tables.width:
                self.tables.widen(pages - self.tables.width)
            self._follow()

    @torch.inference_mode(False)
    def adopt(
        self,
        memory: Sequence[torch.Tensor],
        slabs: Sequence[Slab] | None,
        table: np.ndarray,
        adopted: np.ndarray,
        width: int,
    ) -> None:
        """Attach slabs that hold packed pages to a growing store whose rows are empty.

        Args:
            memory: the slabs' pages, uint8 `[n, H, page_bytes]` each.
            slabs: their reference counts; `None`: nobody else uses these slabs.
            table: int64 `[B, P]`: page numbers, counted through these slabs.
            adopted: bool `[B, P]`: entries that use a page of `slabs`; the others get a page of a new slab.
            width: pages of each row.
        """
        with self._changing() as first:
            if first:
                full = np.zeros((self.batch_size, max(width, self.tables.width)), dtype=bool)
                ids = full.astype(np.int64)
                full[:, : adopted.shape[1]], ids[:, : table.shape[1]] = adopted, table
                self.tables.adopt(slabs or [Slab(len(pages)) for pages in memory], ids, full)
            named = self.tables.slabs[-len(memory) :]
            self._follow(dict(zip(named, memory, strict=True)))

    # ---- page numbers ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[bool]:
        """Context in which page numbers change if this layer is the first of those that share them; yields whether it is. If
        memory runs out, the old numbers are restored."""
        before, first = self.tables.__getstate__(), self._version == self.tables.version
        try:
            yield first
        except BaseException:
            if first:
                self.tables.undo(before)
            raise

    @torch.inference_mode(False)
    def _follow(
        self,
        memory: dict[Slab, torch.Tensor] | None = None,
        chosen: torch.Tensor | None = None,
        windows: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Update slabs, page table and addresses after `tables` has changed. Everything is allocated before a growing store
        changes: memory may run out, and stored tokens must stay readable.

        Args:
            memory: pages of the slabs that are allocated already; the others are allocated here.
            chosen: int64 `[new B]`, the old row of each row, if rows were selected.
            windows: the other tensors of these rows, by field of `LayerState`.
        """
        tables, state, change = self.tables, self.state, self.tables.change
        if self._version == tables.version:
            return
        known = dict(zip(self._slabs, state.pool, strict=True)) | (memory or {})
        pool = []
        for slab in tables.slabs:  # a comprehension would keep the store alive in the traceback, if memory runs out
            pool.append(known[slab] if slab in known else self._new_slab(len(slab)))
        is_next_version = self._version == tables.version - 1 and (chosen is None) == (change.chosen is None)
        in_place = self.capacity is not None and state.page_table.shape == tables.table.shape
        if is_next_version and chosen is None and tables.slabs == self._slabs and not len(change.entries[0]):
            self._version = tables.version  # nothing to write: most crops change no page number
            return
        entries = change.entries if is_next_version else tuple(np.indices(tables.table.shape).reshape(2, -1))
        written = self._table_entries(pool, *entries)
        new = [
            _resized(tensor, tables.table.shape, chosen if is_next_version else None, in_place)
            for tensor in (state.page_table, state.page_address)
        ]
        for tensor, numbers in zip(new, written[2:], strict=True):
            tensor[written[0], written[1]] = numbers.to(tensor.dtype)
        if is_next_version and len(change.copied[0]):
            source, target = (upload(ids, self.device) for ids in change.copied)
            write_pages(pool, target, read_pages(pool, source))
        replaced: dict[str, Any] = {"page_table": new[0], "page_address": new[1], **(windows or {})}
        if in_place:
            for name, tensor in replaced.items():
                if tensor is not getattr(state, name):
                    getattr(state, name).copy_(tensor)
            replaced = {}
        if replaced or len(pool) != len(state.pool) or any(map(operator.is_not, pool, state.pool)):
            self.state = state._replace(pool=pool, **replaced)
            if self.capacity is not None:
                self._mark_static()
        self.batch_size, self._slabs, self._version = tables.rows, list(tables.slabs), tables.version

    def _table_entries(self, pool: list[torch.Tensor], rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """For entries of the page table, int64 `[4, n]` on the device: row, column, page number, address in bytes."""
        numbers = self.tables.table[rows, columns]
        slab, index = self.tables.locate(numbers)
        starts = np.array([each.data_ptr() - pool[0].data_ptr() for each in pool], dtype=np.int64)
        sizes = np.array([each.stride(0) for each in pool], dtype=np.int64)
        return upload(np.stack([rows, columns, numbers, starts[slab] + sizes[slab] * index]), self.device)

    def _mark_static(self) -> None:
        for tensor in self.state.tensors():
            torch._dynamo.mark_static_address(tensor)

    def __setstate__(self, attributes):
        # a copy has other addresses: copy.deepcopy and pickle both come here
        super().__setstate__(attributes)
        self._version = -1
        self._follow()

    # ---- rows -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens, but keep the memory and its addresses."""
        state = self.state
        state.length.zero_()
        state.paged.zero_()
        state.lost.zero_()
        state.scratch.zero_()  # an interrupted launch may have left its counts
        with self._changing() as first:
            if first:
                self.tables.reset()
            self._follow()

    @torch.inference_mode(False)
    def select_rows(self, rows: torch.Tensor) -> None:
        """Row `b` becomes a copy of row `rows[b]`. Full pages are shared; windows and a partial page are copied.

        After its shared pages a row's table names free pages, which no row uses. Waits for the device, once for all layers
        that share page numbers.
        """
        state, rows = self.state, rows.to(self.device).clone()  # inference tensors cannot index outside it
        if self.capacity is not None and len(rows) != self.batch_size:
            raise ValueError(
                f"a preallocated cache (max_cache_len={self.capacity}) is fixed to {self.batch_size} rows; "
                f"{len(rows)} were requested. Use a growing cache, or repeat the prompt before the first call."
            )
        with self._changing() as first:
            if first:
                numbers = torch.cat([rows.long(), state.paged[:, 0].long()]).cpu().numpy()
                chosen, paged = numbers[: len(rows)], numbers[len(rows) :]
                self.tables.select_rows(paged[chosen], self.spec.page_size, chosen)
            names = ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged", "lost")
            windows = {name: getattr(state, name)[rows] for name in names}
            if len(rows) != self.batch_size:
                windows["scratch"] = state.scratch.new_zeros(len(rows) * self.num_heads * SCRATCH + 1)
            self._follow(chosen=rows, windows=windows)

    @torch.inference_mode(False)
    def own_pages(self) -> None:
        """Give each table entry that names no full page a page that no other row refers to. Needed after `paged` was
        lowered, because later tokens are packed there. Waits for the device where pages are shared."""
        with self._changing() as first:
            if first and not self.tables.exclusive:
                paged = self.state.paged[:, 0].cpu().numpy().astype(np.int64)
                self.tables.select_rows(paged, self.spec.page_size)
            self._follow()

    def write_pages(self, ids: torch.Tensor, contents: torch.Tensor) -> None:
        """Write `contents`, uint8 `[n, H, page_bytes]`, to the pages `ids` `[n]`."""
        write_pages(self.state.pool, ids, contents)

    # ---- counting -------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Allocated bytes: `codes`, `metadata`, `window` (sink and tail in use), `parameters`, `unused` (capacity
        without tokens, tables and counters). Shared pages count once. If several stores share them, they count in the
        store that owns their slab. Reads lengths from the device."""
        state = self.state
        slabs = [memory for memory, slab in zip(state.pool, self._slabs, strict=True) if self._owns(slab)]
        records = [record for record in state.parameters if _counts_in(record, self)]
        other = [*state.pool, *state.parameters]
        total = sum(tensor.nbytes for tensor in [*state.tensors(), *slabs, *records]) - sum(x.nbytes for x in other)
        codes, packed = self._packed_bytes(only_owned=True)
        stored = {
            "codes": codes,
            "metadata": packed - codes,
            "window": self._window_bytes(),
            "parameters": sum(record.nbytes for record in records),
        }
        return stored | {"unused": total - sum(stored.values())}

    def _owns(self, slab: Slab) -> bool:
        return slab.owner is self.tables

    def stored_bytes(self) -> int:
        """Bytes of pages in use, window and parameters. Shared bytes that count in another store are included."""
        parameters = sum(record.nbytes for record in self.state.parameters)
        return self._packed_bytes(only_owned=False)[1] + self._window_bytes() + parameters

    def _packed_bytes(self, only_owned: bool) -> tuple[int, int]:
        """Bytes of codes, and of everything, of pages in use; of all or of those in slabs that this store owns."""
        state, spec = self.state, self.spec
        used = torch.arange(self.pages_per_row, device=self.device) < -(-state.paged[:, :1] // spec.page_size)
        ids = torch.unique(state.page_table[used]).long()
        if only_owned and not all(owned := list(map(self._owns, self._slabs))):
            lengths = torch.tensor([len(slab) for slab in state.pool])
            ids = ids[torch.tensor(owned).repeat_interleave(lengths).to(self.device)[ids]]
        pages, head_dims = ids.numel() * self.num_heads, (self.head_dim_k, self.head_dim_v)
        codes = sum(f.code_bytes(d, spec.page_size, self.dtype) for f, d in zip(spec.formats, head_dims, strict=True))
        return pages * codes, pages * self.page_bytes

    def _window_bytes(self) -> int:
        numbers = int((self.state.length[:, 0] - self.state.paged[:, 0]).sum()) * self.num_heads
        return numbers * (self.head_dim_k + self.head_dim_v) * self.dtype.itemsize


#: for each record that forks share, the sharing stores, oldest first
_readers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def share_records(stores: Sequence[PagedStore]) -> None:
    """Let these stores share their records, which count in the oldest living store."""
    for record in stores[0].state.parameters:
        readers = _readers.setdefault(record, [])
        readers += [
            weakref.ref(store, readers.remove) for store in stores if all(ref() is not store for ref in readers)
        ]


def _counts_in(record: torch.Tensor, store: PagedStore) -> bool:
    return next((reader() for reader in _readers.get(record) or ()), store) is store


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], chosen: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    """Rows `chosen` (`None`: all) of a page table or of addresses `[B, P]`, zero-padded to `shape`. in_place: `tensor` itself
    may be returned."""
    new = tensor if chosen is None else tensor[chosen]
    if new.shape == shape:
        return new if in_place or new is not tensor else new.clone()
    wide = new.new_zeros(shape)
    if len(new) == len(wide):
        width = min(new.shape[1], shape[1])
        wide[:, :width] = new[:, :width]
    return wide


def write_pages(pool: list[torch.Tensor], ids: torch.Tensor, contents: torch.Tensor) -> None:
    """Write `contents`, uint8 `[n, H, page_bytes]`, to the pages `ids` `[n]`."""
    ids = ids.long()
    first, parts = 0, []
    for slab in pool:
        in_slab = slice(None) if len(pool) == 1 else (ids >= first) & (ids < first + slab.shape[0])
        part = contents[in_slab]
        pair, words = (slab, part), (words_of(slab), words_of(part))
        parts.append((words if words[0].dtype == words[1].dtype else pair, ids[in_slab] - first))
        first += slab.shape[0]
    for (slab, part), index in parts:  # nothing is allocated between writes
        slab[index] = part


def words_of(pages: torch.Tensor) -> torch.Tensor:
    """Pages, uint8 `[..., page_bytes]`, viewed as int64 if alignment allows it. PyTorch copies indexed pages number by number,
    so this takes an eighth of the copies."""
    aligned = pages.shape[-1] % 8 == 0 and pages.is_contiguous() and pages.storage_offset() % 8 == 0
    return pages.view(torch.int64) if aligned else pages


def read_pages(pool: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Bytes of the pages `ids` (any shape): uint8 `[*ids.shape, H, page_bytes]`."""
    ids = ids.long()
    if len(pool) == 1:
        return words_of(pool[0])[ids].view(torch.uint8)
    out = pool[0].new_empty((*ids.shape, *pool[0].shape[1:]))
    first = 0
    for slab in pool:
        in_slab = (ids >= first) & (ids < first + slab.shape[0])
        out[in_slab] = slab[ids[in_slab] - first]
        first += slab.shape[0]
    return out
