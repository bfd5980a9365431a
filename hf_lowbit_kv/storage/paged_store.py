"""Geometry and memory of one layer: where each token is stored, which pages a row owns, and when a page is packed.

A row (one sequence) of a layer is

    [ sink | pages of `page_size` tokens, packed | tail: the newest tokens ]

`sink` and tail hold the model's dtype. The tail is a ring: the token with index `i` (counted from the end of the sink)
is in slot `i % tail_size`. Page `p` holds tokens `p * page_size` and up, whatever pieces they arrived in, so a row's
pages depend only on its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .layer_spec import LayerSpec
from .shared_pages import Holding

#: fields of `LayerState` that operations never change
READ_ONLY = ("page_table", "page_address", "parameters", "scratch")
#: numbers of `LayerState.scratch` for each row and KV head
SCRATCH = 32
#: growing caches add pages by this many per row
PAGES_PER_BLOCK = 8


class LayerState(NamedTuple):
    """The tensors of one layer. `B` rows, `H` KV heads (local ones under tensor parallelism).

    `length` and `paged` hold a row's counters once for each head, so that a kernel's program for one (row, head) owns
    its copy. All heads have the same numbers.
    """

    pool: list[torch.Tensor]
    """blocks of pages, uint8 `[pages, H, page_bytes]`: a page's key part, then its value part"""
    page_table: torch.Tensor
    """int32 `[B, P]`: the id of a row's page; ids count through the blocks of `pool` in order"""
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
    """int32 `[B, H]`: how many of them are in pages"""
    lost: torch.Tensor
    """int32 `[B, H]`: tokens that came when the row had no room, and so were not stored"""
    scratch: torch.Tensor
    """int32 `[B * H * SCRATCH + 1]`: what a kernel's blocks count together; zeros before and after every operation"""
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
        """The state of some of the rows."""
        chosen = {
            name: getattr(self, name)[rows] for name in self._fields if name not in ("pool", "scratch", "parameters")
        }
        return self._replace(**chosen)


class LayerStore:
    """The tensors of a layer, and the spec that says what they mean. Backends get this object.

    Attributes:
        key: the spec's text form.
        kernels: kernels that a backend has prepared for exactly these tensors, by kind of chunk. Setting `state` or
            `spec` empties it, because prepared kernels hold addresses.
    """

    kernels: dict[Any, Any]

    def __init__(self, state: LayerState, spec: LayerSpec):
        self.spec, self.state = spec, state

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
        """Some of the rows."""
        return LayerStore(self.state.rows(rows), self.spec)

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """By role, the parameters that it holds, `[H or 1, ...]` each: views of the records, see `LayerSpec.tensors`."""
        if self._tensors is None:
            self._tensors = self.spec.tensors(self.state)
        return self._tensors


class PagedStore(LayerStore):
    """Owns a layer's `LayerState`: allocation, growth, sharing of pages between rows, and byte counts.

    Args:
        capacity: tokens per row (preallocated, addresses never change), or `None` to grow by blocks.
        parameters: the layer's records, see `LayerState`.
    """

    #: True if `page_table` is `arange` over one unshared block
    _in_order = False

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
    ):
        self.spec, self.capacity = spec, capacity
        self.batch_size, self.num_heads = batch_size, num_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_v
        self.dtype, self.device = dtype, torch.device(device)
        self.holding = Holding()

        def window(tokens: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(batch_size, num_heads, tokens, head_dim, dtype=dtype, device=device)

        def counters() -> torch.Tensor:
            return torch.zeros(batch_size, num_heads, dtype=torch.int32, device=device)

        self.state = LayerState(
            pool=[],
            page_table=torch.zeros(batch_size, 0, dtype=torch.int32, device=device),
            page_address=torch.zeros(batch_size, 0, dtype=torch.int64, device=device),
            sink_k=window(spec.sink, head_dim_k),
            sink_v=window(spec.sink, head_dim_v),
            tail_k=window(spec.tail_size, head_dim_k),
            tail_v=window(spec.tail_size, head_dim_v),
            length=counters(),
            paged=counters(),
            lost=counters(),
            scratch=self._new_scratch(batch_size),
            parameters=list(parameters),
        )
        self._add_pages(max(spec.pages_for(capacity or 0), 1))
        if capacity is not None:
            self._mark_static()

    @classmethod
    def of(cls, spec: LayerSpec, state: LayerState, capacity: int | None) -> PagedStore:
        """A store for a state whose memory and pages somebody else manages, e.g. some rows of a pool."""
        store = cls.__new__(cls)
        store.spec, store.capacity, store.state = spec, capacity, state
        store.batch_size, store.num_heads = state.length.shape
        store.head_dim_k, store.head_dim_v = state.head_dims
        store.dtype, store.device = state.sink_k.dtype, state.length.device
        store.holding = Holding()
        return store

    # ---- capacity -------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        return sum(self.spec.part_bytes(self.head_dim_k, self.head_dim_v, self.dtype))

    @property
    def token_bytes(self) -> float:
        """Bytes of a packed token, for all KV heads together."""
        return self.num_heads * self.page_bytes / self.spec.page_size

    @property
    def pages_per_row(self) -> int:
        return self.state.page_table.shape[1]

    @property
    def num_pages(self) -> int:
        return sum(block.shape[0] for block in self.state.pool)

    def _new_scratch(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows * self.num_heads * SCRATCH + 1, dtype=torch.int32, device=self.device)

    def _new_block(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, self.num_heads, self.page_bytes, dtype=torch.uint8, device=self.device)

    @torch.inference_mode(False)
    def _add_pages(self, pages_per_row: int) -> None:
        """Give every row this many more pages, in one new block. Packed tokens are not copied."""
        state = self.state
        first = self.num_pages
        count = self.batch_size * pages_per_row
        ids = torch.arange(first, first + count, dtype=torch.int32, device=self.device)
        table = torch.cat([state.page_table, ids.view(self.batch_size, pages_per_row)], dim=1)
        # everything is allocated before anything changes: memory may run out here, and stored tokens must stay readable
        pool = [*state.pool, self._new_block(count)]
        # only for the new pages: for all pages the cost on the CPU would grow with the number of blocks
        starts = self._starts_of(pool[-1], pool).view(self.batch_size, pages_per_row)
        address = torch.cat([state.page_address, starts], dim=1)
        self.state = state._replace(pool=pool, page_table=table, page_address=address)
        self._in_order = first == 0

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens. A growing store adds blocks; a preallocated store has the room
        already."""
        if self.capacity is None and (missing := self.spec.pages_for(length) - self.pages_per_row) > 0:
            self._add_pages(-(-missing // PAGES_PER_BLOCK) * PAGES_PER_BLOCK)

    def _page_starts(self, pool: list[torch.Tensor]) -> torch.Tensor:
        """int64 `[num_pages]`: byte offset of each page id of these blocks from the start of `pool[0]`."""
        return torch.cat([self._starts_of(block, pool) for block in pool])

    def _starts_of(
        self, block: torch.Tensor, pool: list[torch.Tensor], device: torch.device | str | None = None
    ) -> torch.Tensor:
        """int64 `[pages]`: the same of the pages of one of these blocks. device: of the result; `None`: that of the
        pages."""
        first, size = block.data_ptr() - pool[0].data_ptr(), block.stride(0)
        return torch.arange(first, first + block.shape[0] * size, size, device=device or self.device, dtype=torch.int64)

    def _refresh_addresses(self) -> None:
        """Recompute `page_address`, in place where its size allows (addresses of static tensors must not change)."""
        state = self.state
        address = self._page_starts(state.pool)[state.page_table.long()]
        if state.page_address.shape == address.shape:
            state.page_address.copy_(address)
        else:
            self.state = state._replace(page_address=address)

    def _mark_static(self) -> None:
        for tensor in self.state.tensors():
            torch._dynamo.mark_static_address(tensor)

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "holding"}

    def __setstate__(self, attributes):
        # a copy has other addresses: copy.deepcopy and pickle both come here
        super().__setstate__(attributes)
        self.holding = Holding()  # it has all blocks to itself
        self._refresh_addresses()
        if self.capacity is not None:
            self._mark_static()

    # ---- rows -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens, but keep the memory and its addresses."""
        state = self.state
        state.length.zero_()
        state.paged.zero_()
        state.lost.zero_()
        state.scratch.zero_()  # an interrupted launch may have left its counts
        self._leave_shared_blocks()
        if not self._in_order:
            self._spread_pages(self.state.paged)  # rows may have shared pages
            self._in_order = len(self.state.pool) == 1 and self.holding.closed(self.state.pool) is None

    def _leave_shared_blocks(self) -> None:
        """Keep only blocks that this store owns, in a state without tokens."""
        if (closed := self.holding.closed(self.state.pool)) is None:
            return
        self._in_order = False
        owned = [block for block in self.state.pool if self.holding.owns(block)]
        for block in self.state.pool:
            self.holding.let_go(block)
        closed = self.holding.closed(owned) if owned else None
        usable = sum(map(len, owned)) - (0 if closed is None else int(closed.sum()))
        missing = self.batch_size * self.pages_per_row - usable
        pool = [*owned, self._new_block(missing)] if missing > 0 else owned
        table = torch.zeros_like(self.state.page_table)  # ids have changed, and nothing is stored
        self.state = self.state._replace(pool=pool)
        self.state.page_table.copy_(table)
        if self.capacity is not None:
            self._mark_static()

    @torch.inference_mode(False)
    def select_rows(self, rows: torch.Tensor) -> None:
        """Row `b` becomes a copy of row `rows[b]`. Full pages are shared; windows and an open page are copied.

        After its shared pages a row's table names free pages, which no row uses. The CPU does not wait for the
        device unless the number of rows changes (or has changed before).
        """
        state, rows = self.state, rows.to(self.device).clone()  # inference tensors cannot index outside it
        if self.capacity is not None and len(rows) != self.batch_size:
            raise ValueError(
                f"a preallocated cache (max_cache_len={self.capacity}) is fixed to {self.batch_size} rows; "
                f"{len(rows)} were requested. Use a growing cache, or repeat the prompt before the first call."
            )
        self._in_order = False
        names = ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged", "lost", "page_table")
        chosen = {name: getattr(state, name)[rows] for name in names}
        if self.capacity is not None:
            for name, tensor in chosen.items():
                getattr(state, name).copy_(tensor)
            self.own_pages()
            return
        chosen["page_address"] = state.page_address[rows]
        before = self.state, self.batch_size
        try:
            if len(rows) != self.batch_size:
                chosen["scratch"] = self._new_scratch(len(rows))
            self.batch_size, self.state = len(rows), state._replace(**chosen)
            self.own_pages()
        except BaseException:  # memory may run out: the rows are what they were
            self.state, self.batch_size = before
            raise

    @torch.inference_mode(False)
    def own_pages(self) -> None:
        """Give each table entry that names no full page a page that no other row refers to. Needed after rows were
        chosen or `paged` was lowered, because later tokens are packed there."""
        closed = self.holding.closed(self.state.pool)
        usable = self.num_pages - (0 if closed is None else int(closed.sum()))
        if (
            usable < self.batch_size * self.pages_per_row
        ):  # there are fewer pages than entries: rows were added, or pages are shared
            self._add_missing_pages()
        open_pages = self._read_open_pages() if self.spec.direct else None
        self._spread_pages(self.state.paged)
        if open_pages is not None:  # this comes last: a page that is free now may have belonged to another row before
            self._write_open_pages(open_pages)

    def _full_entries(self, paged: torch.Tensor) -> torch.Tensor:
        """bool `[B, P]`: whether that entry of a row's table names a full page, one that may be shared."""
        return torch.arange(self.pages_per_row, device=self.device) < paged[:, :1] // self.spec.page_size

    def _spread_pages(self, paged: torch.Tensor) -> None:
        """Put a separate page into each table entry that names no full page. Everything runs on the device."""
        self._in_order = False
        table, full = self.state.page_table, self._full_entries(paged)
        free = torch.argsort(self._taken(full), stable=True)  # free ids first, in ascending order
        rank = (torch.cumsum(~full.flatten(), 0) - 1).clamp(min=0).view_as(full)
        table.copy_(torch.where(full, table, free[rank].to(table.dtype)))
        self._refresh_addresses()

    def _taken(self, full: torch.Tensor) -> torch.Tensor:
        """int8 `[num_pages]`: 1 for pages that the table's entries `full` name, and for pages that this store may not
        write."""
        taken = torch.zeros(self.num_pages, dtype=torch.int8, device=self.device)
        if (closed := self.holding.closed(self.state.pool)) is not None:
            taken.copy_(closed)
        return taken.scatter_reduce_(0, self.state.page_table.long().flatten(), full.flatten().to(torch.int8), "amax")

    def _add_missing_pages(self) -> None:
        """Add pages until each table entry can have a separate or a shared page. Waits for the device."""
        full = self._full_entries(self.state.paged)
        free = int((self._taken(full) == 0).sum())
        if (missing := int((~full).sum()) - free) > 0:
            self.state = self.state._replace(pool=[*self.state.pool, self._new_block(missing)])
            if self.capacity is not None:
                self._mark_static()

    def _open_entries(self) -> torch.Tensor:
        """int64 `[B]`: column of each row's first page that is not full."""
        return (self.state.paged[:, 0] // self.spec.page_size).long().clamp(max=self.pages_per_row - 1)

    def _read_open_pages(self) -> torch.Tensor:
        """uint8 `[B, H, page_bytes]`: the contents of each row's open page (direct mode)."""
        return read_pages(self.state.pool, self.state.page_table.gather(1, self._open_entries()[:, None])[:, 0])

    def _write_open_pages(self, contents: torch.Tensor) -> None:
        self.write_pages(self.state.page_table.gather(1, self._open_entries()[:, None])[:, 0], contents)

    def write_pages(self, ids: torch.Tensor, contents: torch.Tensor) -> None:
        """Write `contents`, uint8 `[n, H, page_bytes]`, to the pages `ids` `[n]`."""
        ids = ids.long()
        pool, first, parts = self.state.pool, 0, []
        for block in pool:
            in_block = slice(None) if len(pool) == 1 else (ids >= first) & (ids < first + block.shape[0])
            part = contents[in_block]
            pair, words = (block, part), (words_of(block), words_of(part))
            parts.append((words if words[0].dtype == words[1].dtype else pair, ids[in_block] - first))
            first += block.shape[0]
        for (block, part), place in parts:  # nothing is allocated between writes
            block[place] = part

    def widen(self, pages_per_row: int) -> None:
        """Give every row this many more pages; works for a preallocated store too."""
        self._add_pages(pages_per_row)
        if self.capacity is not None:
            self._mark_static()

    def take_pool(self, pool: list[torch.Tensor], table: torch.Tensor) -> None:
        """Replace the rows' pages: blocks, and ids int32 `[B, P]` on the CPU that count through them."""
        address = torch.cat([self._starts_of(block, pool, "cpu") for block in pool])[table.long()]
        self.state = self.state._replace(
            pool=pool, page_table=table.to(self.device), page_address=address.to(self.device)
        )
        self._in_order = False

    # ---- counting -------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Allocated bytes: `codes`, `metadata`, `window` (sink and tail in use), `parameters`, `unused` (capacity
        without tokens, tables and counters). Shared pages count once. If several stores share them, they count in the
        store that owns their block. Reads lengths from the device."""
        state = self.state
        blocks = [block for block in state.pool if self.holding.owns(block)]
        records = [record for record in state.parameters if self.holding.counts(record)]
        other = [*state.pool, *state.parameters]
        total = sum(tensor.nbytes for tensor in [*state.tensors(), *blocks, *records]) - sum(x.nbytes for x in other)
        codes, packed = self._packed_bytes(only_owned=True)
        stored = {
            "codes": codes,
            "metadata": packed - codes,
            "window": self._window_bytes(),
            "parameters": sum(record.nbytes for record in records),
        }
        return stored | {"unused": total - sum(stored.values())}

    def stored_bytes(self) -> int:
        """Bytes of pages in use, window and parameters. Shared bytes that count in another store are included."""
        parameters = sum(record.nbytes for record in self.state.parameters)
        return self._packed_bytes(only_owned=False)[1] + self._window_bytes() + parameters

    def _packed_bytes(self, only_owned: bool) -> tuple[int, int]:
        """Bytes of codes, and of everything, of pages in use; of all or of those in blocks that this store owns."""
        state, spec = self.state, self.spec
        used = torch.arange(self.pages_per_row, device=self.device) < -(-state.paged[:, :1] // spec.page_size)
        ids = torch.unique(state.page_table[used]).long()
        if only_owned and not all(owned := [self.holding.owns(block) for block in state.pool]):
            lengths = torch.tensor([len(block) for block in state.pool])
            ids = ids[torch.tensor(owned).repeat_interleave(lengths).to(self.device)[ids]]
        pages, head_dims = ids.numel() * self.num_heads, (self.head_dim_k, self.head_dim_v)
        codes = sum(f.code_bytes(d, spec.page_size, self.dtype) for f, d in zip(spec.formats, head_dims, strict=True))
        return pages * codes, pages * self.page_bytes

    def _window_bytes(self) -> int:
        numbers = int((self.state.length[:, 0] - self.state.paged[:, 0]).sum()) * self.num_heads
        return numbers * (self.head_dim_k + self.head_dim_v) * self.dtype.itemsize


def words_of(pages: torch.Tensor) -> torch.Tensor:
    """Pages, uint8 `[..., page_bytes]`, as numbers of 8 bytes where their size allows it: PyTorch copies chosen pages number
    by number."""
    aligned = pages.shape[-1] % 8 == 0 and pages.is_contiguous() and pages.storage_offset() % 8 == 0
    return pages.view(torch.int64) if aligned else pages


def read_pages(pool: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Bytes of the pages `ids` (any shape): uint8 `[*ids.shape, H, page_bytes]`."""
    ids = ids.long()
    if len(pool) == 1:
        return words_of(pool[0])[ids].view(torch.uint8)
    out = pool[0].new_empty((*ids.shape, *pool[0].shape[1:]))
    first = 0
    for block in pool:
        in_block = (ids >= first) & (ids < first + block.shape[0])
        out[in_block] = block[ids[in_block] - first]
        first += block.shape[0]
    return out
