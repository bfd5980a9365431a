"""The memory of one layer: its tensors, and where each token is stored.

A row (one sequence) of a layer is

    [ sink | pages of `page_size` tokens, packed | tail: the newest tokens ]

`sink` and tail hold the model's dtype. The tail is a ring: the token with index `i` (counted from the end of the sink)
is in slot `i % tail_size`. Page `p` holds tokens `p * page_size` and up, for any split of the text into passes, so a row's
pages depend only on its tokens.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .layer_spec import LayerSpec
from .page_pool import Slab

if TYPE_CHECKING:
    from .row_memory import RowMemory

#: fields of `LayerState` that operations never change
READ_ONLY = ("page_table", "page_address", "parameters", "scratch")
#: what rows have of their own: in the model's dtype, and int32
WINDOWS, COUNTERS = ("sink_k", "sink_v", "tail_k", "tail_v"), ("length", "paged", "lost")
#: numbers of `LayerState.scratch` for each row and KV head
SCRATCH = 32


class LayerState(NamedTuple):
    """The tensors of one layer. `B` rows, `H` KV heads (local ones under tensor parallelism).

    `length` and `paged` hold a row's counters once for each head, so that a kernel's program for one (row, head) owns
    its copy. All heads have the same numbers.
    """

    pool: list[torch.Tensor]
    """slabs of pages, uint8 `[pages, H, page_bytes]`: a page's key part, then its value part"""
    page_table: torch.Tensor
    """int32 `[B, P]`: the number of a row's page; numbers count through the slabs of `pool` in order"""
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


class PagedStore:
    """The tensors of a layer (`LayerState`), and the spec that defines their meaning. Backends get this object.

    Args:
        capacity: tokens per row (preallocated, addresses never change), or `None` to grow by slabs. Unused with `memory`.
        parameters: the layer's records, see `LayerState`.
        memory: that of the rows, which layers with the same paging share; `None`: it is of this layer only.

    Attributes:
        memory: changes which pages the rows have. `None` in a store over tensors of others (`over`), such as a pool's:
            only their owner may change, empty or count them.
        key: the spec's text form.
        kernels: kernels that a backend has prepared for exactly these tensors, by shape of the inputs. Setting `state` or
            `spec` empties it, because prepared kernels hold addresses.
    """

    memory: RowMemory
    kernels: dict[Any, Any]
    key: str
    _tensors: dict[str, tuple[torch.Tensor, ...]] | None

    # The decorator makes sure that a store made inside `torch.inference_mode()` can be written outside it.
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
        memory: RowMemory | None = None,
    ):
        from .row_memory import RowMemory  # which imports this file

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
        self._initialize(state, spec, memory or RowMemory.of(spec, batch_size, capacity))
        self.memory.join(self)

    @classmethod
    def over(cls, state: LayerState, spec: LayerSpec) -> PagedStore:
        """A store over these tensors. Who allocated them says which pages its rows have."""
        store = cls.__new__(cls)
        store._initialize(state, spec, None)
        return store

    def _initialize(self, state: LayerState, spec: LayerSpec, memory: Any) -> None:
        self.spec, self.state, self.memory = spec, state, memory
        self.batch_size, self.num_heads = state.length.shape
        self.head_dim_k, self.head_dim_v = state.head_dims
        self.dtype, self.device = state.sink_k.dtype, state.length.device

    def __setattr__(self, name: str, value: Any) -> None:  # no properties: steps read these often
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if name == "spec":
            self.key = value.key  # computed here, because a compiled step only reads it
        if name == "state" and before is not None and before.parameters is value.parameters:
            self.kernels = {}  # each chunk of a prompt changes the state, and no parameter
        elif name in ("spec", "state"):
            self._forget()

    def _forget(self) -> None:
        """Prepared kernels and views are those of other tensors."""
        self.__dict__.update(kernels={}, _tensors=None)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("kernels", "_tensors")}

    def rows(self, rows: slice) -> PagedStore:
        """A store over the tensors of a range of rows, see `over`."""
        return PagedStore.over(self.state.rows(rows), self.spec)

    def without_rows(self) -> PagedStore:
        """A store with the sizes and parameters of this one, which has no rows and no pages."""
        state = self.state.rows(slice(0, 0))
        copied: dict[str, Any] = {name: x.clone() for name, x in state._asdict().items() if isinstance(x, torch.Tensor)}
        return PagedStore.over(state._replace(pool=[], **copied), self.spec)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one KV head."""
        return sum(self.spec.part_bytes(self.head_dim_k, self.head_dim_v, self.dtype))

    @property
    def token_bytes(self) -> float:
        """Bytes of a packed token, for all KV heads together."""
        return self.num_heads * self.page_bytes / self.spec.page_size

    def row_bytes(self, *fields: str) -> int:
        """Bytes of a row in these fields of `LayerState`."""
        return sum(x.shape[1:].numel() * x.itemsize for x in (getattr(self.state, name) for name in fields))

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """By role, the parameters that it holds, `[H or 1, ...]` each: views of the records, see `LayerSpec.tensors`."""
        if self._tensors is None:
            self._tensors = self.spec.tensors(self.state)
        return self._tensors

    # ---- capacity -------------------------------------------------------------------------------------------------

    @property
    def pages_per_row(self) -> int:
        return self.state.page_table.shape[1]

    @property
    def num_pages(self) -> int:
        return sum(slab.shape[0] for slab in self.state.pool)

    def new_slab(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, self.num_heads, self.page_bytes, dtype=torch.uint8, device=self.device)

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens, in all layers of the rows. No-op over tensors of others."""
        if self.memory is not None:
            self.memory.reserve(length)

    # ---- tensors --------------------------------------------------------------------------------------------------

    def set_state(self, state: LayerState) -> None:
        """Have these tensors. A preallocated store keeps its own where the new ones have their shape, and copies."""
        replaced: dict[str, Any] = {}
        for name, new in state._asdict().items():
            old = getattr(self.state, name)
            if isinstance(new, list):
                if len(new) != len(old) or any(map(operator.is_not, new, old)):
                    replaced[name] = new
            elif self.memory.capacity is not None and new.shape == old.shape:
                if new is not old:
                    old.copy_(new)
            elif new is not old:
                replaced[name] = new
        if replaced:
            self.state = self.state._replace(**replaced)
            if self.memory.capacity is not None:
                self._mark_static()
        self.batch_size = len(self.state.length)

    def _mark_static(self) -> None:
        for tensor in self.state.tensors():
            torch._dynamo.mark_static_address(tensor)

    def __setstate__(self, attributes):
        # a copy has other addresses: copy.deepcopy and pickle both come here
        self.__dict__.update(attributes)
        self._forget()
        if self.memory is not None:
            self.memory.join(self)

    def fork(self, state: LayerState, memory: RowMemory) -> PagedStore:
        """A store with these tensors, of these rows. The caller adds it to the memory."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, state=state, memory=memory)
        new._forget()
        if memory.capacity is not None:
            new._mark_static()
        return new

    def reset(self) -> None:
        """Forget all tokens, but keep the memory and its addresses."""
        self.memory.reset()  # first: it may complete a change of rows, counters too
        state = self.state
        state.length.zero_()
        state.paged.zero_()
        state.lost.zero_()
        state.scratch.zero_()  # an interrupted launch may have left its counts

    # ---- counting -------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Allocated bytes: `codes`, `metadata`, `window` (sink and tail in use), `parameters`, `unused` (capacity
        without tokens, tables and counters). Shared pages count once. If several stores share them, they count in the
        store that owns their slab. Reads lengths from the device."""
        state = self.state
        slabs = [pages for pages, slab in zip(state.pool, self.memory.pages.slabs, strict=True) if self._owns(slab)]
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
        return slab.owner is self.memory.pages

    def stored_bytes(self) -> int:
        """Bytes of pages in use, window and parameters. Shared bytes that count in another store are included."""
        parameters = sum(record.nbytes for record in self.state.parameters)
        return self._packed_bytes(only_owned=False)[1] + self._window_bytes() + parameters

    def _packed_bytes(self, only_owned: bool) -> tuple[int, int]:
        """Bytes of codes, and of everything, of pages in use; of all or of those in slabs that this store owns."""
        state, spec = self.state, self.spec
        used = torch.arange(self.pages_per_row, device=self.device) < -(-state.paged[:, :1] // spec.page_size)
        ids = torch.unique(state.page_table[used]).long()
        if only_owned and not all(owned := list(map(self._owns, self.memory.pages.slabs))):
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


def page_writes(
    pool: list[torch.Tensor], ids: torch.Tensor, contents: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slab, index and contents of the writes that put `contents`, uint8 `[n, H, page_bytes]`, into the pages `ids` `[n]`. The
    writes then allocate nothing."""
    ids = ids.long()
    first, writes = 0, []
    for slab in pool:
        in_slab = slice(None) if len(pool) == 1 else (ids >= first) & (ids < first + slab.shape[0])
        part = contents[in_slab]
        pair, words = (slab, part), (words_of(slab), words_of(part))
        target, new = words if words[0].dtype == words[1].dtype else pair
        writes.append((target, ids[in_slab] - first, new))
        first += slab.shape[0]
    return writes


def write_pages(pool: list[torch.Tensor], ids: torch.Tensor, contents: torch.Tensor) -> None:
    """Write `contents`, uint8 `[n, H, page_bytes]`, to the pages `ids` `[n]`."""
    for slab, index, new in page_writes(pool, ids, contents):
        slab[index] = new


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
