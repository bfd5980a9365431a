"""Runs a model on the rows of a pool: prefill chunks of one row, and decode steps of any rows. `new_pool` creates a pool that
is as large as the memory allows.

A decode step of all rows in use is one call of the model; on a GPU there is one CUDA graph for each padded number of
rows. Rows that take no part in a step (prefilling rows and empty slots) are masked: they store nothing, and attend to
nothing new.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..cache.cache_argument import as_argument
from ..cache.filled_by import snapshot_of
from ..cache.implementation import selected
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.native_layers import SLIDING
from ..generation import recording
from ..generation.fusing import MAX_FUSED_ROWS, compile_ahead, compiling
from ..generation.kept_caches import kept_caches
from ..storage.paged_store import PagedStore
from .memory_budget import USABLE, activation_bytes, free_memory, pool_size
from .pool_models import longest_row
from .ring_memory import ring_shapes
from .row_pool import Row, RowPool
from .shared_prefixes import SharedPrefixes
from .slot_range import SlotRange

#: steps of fewer rows that run with the recording of more rows, before they get their own recording. Recording takes as
#: long as a few hundred steps, and saves little per step
PATIENCE = 128


@contextlib.contextmanager
def exclusive_use(model: Any) -> Iterator[None]:
    """Context in which no other call runs the model, and the model attends with `lowbit_kv`."""
    with kept_caches(model).lock, selected(model), torch.inference_mode(False), torch.no_grad():
        yield


def padded_rows(slots: int) -> list[int]:
    """The padded numbers of rows of a step: 1, 16, 64, 256, ..., and all slots. Sizes in between would save less time than
    their recordings take, because an empty row costs little. Up to `MAX_FUSED_ROWS` (16) products are fused."""
    sizes = [1] if slots > 1 else []
    while (size := MAX_FUSED_ROWS * 4 ** max(len(sizes) - 1, 0)) < slots:
        sizes.append(size)
    return [*sizes, slots]


@torch.no_grad()
def read_once(model: Any, cache: LowBitCache, tokens: int) -> None:
    """Prefill `tokens` dummy tokens, so that the layers of an empty cache know their sizes."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    positions = torch.arange(tokens, device=model.device)[None]
    model(ids, position_ids=positions, use_cache=True, logits_to_keep=1, **as_argument(cache))


def stored_layers(cache: LowBitCache) -> list[PagedStore]:
    """Stores with the sizes and parameters of a cache's layers. The cache must have read tokens."""
    return [layer.store.without_rows() for layer in cache.packed_layers if layer.store is not None]


class PoolSteps:
    """Chunks and decode steps of one model on one pool.

    Args:
        model: a transformers model, unwrapped, with our attention implementation selected whenever it is called here.
        template: an initialized cache of the model (`read_once`).
        pool: a pool with the layers of this cache.
        record: whether decode steps are recorded if the device has CUDA graphs.
    """

    def __init__(self, model: Any, template: LowBitCache, pool: RowPool, record: bool = True):
        self.model, self.pool, self.template = model, pool, template
        self.device = model.device
        self._chunk = SlotRange(template, pool, 1)
        if record and self.device.type == "cuda":
            self._chunk.expect_steps(padded_rows(pool.slots))
            compile_ahead(model, pool.slots)
        self._batches: dict[int, SlotRange] = {}
        self._make_graph = recording.graphs_for(self.device) if record else None
        self._recorders: dict[int, recording.Recorder] = {}
        self._steps: dict[int, recording.RecordedStep] = {}
        self._served: Counter[int] = Counter()  # by padded rows, steps that a recording of more rows served
        #: int64 `[slots]`: the newest token of every row, which is not stored yet
        with torch.inference_mode(False):
            self.newest = torch.zeros(pool.slots, dtype=torch.long, device=self.device)
        self.taken = 0
        """decode steps that were run"""

    def check_model(self) -> None:
        """Raise `ValueError` if weights or adapters are others than those that have read the rows. Waits for
        the device."""
        filled_by, now = self.template.facts.filled_by, snapshot_of(self.model, self.template.packed_sizes)
        if filled_by is not None and (reason := filled_by.difference(now)) is not None:
            raise ValueError(
                f"the model has changed between two results: {reason}. All rows are freed; change weights and adapters before "
                "a call or after its last result"
            )

    def check_fits(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise `ValueError` if no row can ever hold this many tokens."""
        limit, longest = prompt_tokens + new_tokens, longest_row(self.model)
        if limit <= self.pool.longest:
            return
        if longest is not None and limit > longest:
            reason = f"the {longest} tokens that the model reads: lower max_new_tokens or shorten the prompt"
        else:
            reason = f"the {self.pool.longest} tokens of a row: lower max_new_tokens or give the pool more memory"
        raise ValueError(f"{prompt_tokens} prompt tokens plus max_new_tokens={new_tokens} exceed {reason}")

    def begin(self) -> None:
        """Prepare for a model that may have changed: recordings are compared with it before their next use."""
        self._steps.clear()
        for batch in self._batches.values():
            batch.cache.get_mask_sizes(1, 0)  # MLA layers check whether weights have changed

    def leave(self, row: Row) -> None:
        """The row leaves the pool."""
        slot = row.slot
        if (moved := self.pool.leave(row)) is not None:
            self.newest[slot] = self.newest[len(self.pool.rows)]
            assert moved.slot == slot

    def as_cache(self, row: Row) -> LowBitCache:
        """The row as a cache of one row, valid until the next chunk is prefilled."""
        self.pool.flush()
        self._chunk.place(row.slot)
        self._chunk.begin(row.length)
        return self._chunk.cache

    @torch.no_grad()
    def prefill(self, row: Row, ids: torch.Tensor) -> torch.Tensor:
        """Store the next tokens of a row's text.

        Args:
            ids: int64 `[n]`, on any device.

        Returns:
            logits of the next token, `[vocabulary]`.
        """
        tokens = len(ids)
        self.pool.extend(row, tokens)
        cache = self.as_cache(row)
        positions = torch.arange(row.length, row.length + tokens, device=self.device)[None]
        ids = ids.to(self.device, non_blocking=True)[None]
        out = self.model(ids, position_ids=positions, use_cache=True, logits_to_keep=1, **as_argument(cache))
        row.length += tokens
        return out.logits[0, -1]

    @torch.no_grad()
    def decode(self, rows: Sequence[Row]) -> torch.Tensor:
        """Store the newest token of each of these rows, and attend with it.

        Returns:
            logits of the next tokens by slot, `[padded rows, vocabulary]`; those of other slots are meaningless.
        """
        padded = self._padded(len(self.pool.rows))
        batch = self._batch(padded)
        numbers = batch.begin_step(rows)
        for row in rows:
            self.pool.extend(row, 1)
            row.length += 1
        self.pool.flush()
        inputs = {
            "input_ids": self.newest[:padded, None],
            "position_ids": numbers[0][:, None],
            "attention_mask": numbers[1][:, None],
            "use_cache": True,
            **as_argument(batch.cache),
        }
        self.taken += 1
        step = self._step(padded)
        out = self.model(**inputs) if step is None else step(self.model, **inputs)
        return out.logits[:, -1]

    def _padded(self, used: int) -> int:
        """The padded number of rows of a step with `used` rows."""
        sizes = [size for size in padded_rows(self.pool.slots) if size >= used]
        recorded = [size for size in sizes if size in self._recorders and self._recorders[size].count]
        if not recorded or recorded[0] == sizes[0]:
            return sizes[0]
        if self._served[sizes[0]] == 0:
            compile_ahead(self.model, sizes[0])
        self._served[sizes[0]] += 1
        return sizes[0] if self._served[sizes[0]] > PATIENCE and not compiling(self.model) else recorded[0]

    def _batch(self, rows: int) -> SlotRange:
        if rows not in self._batches:
            self._batches[rows] = SlotRange(self.template, self.pool, rows, self.device)
        return self._batches[rows]

    def _step(self, rows: int) -> recording.RecordedStep | None:
        """The recorded step that replaces the model for this many rows; `None`: there is none."""
        if self._make_graph is None:
            return None
        if rows not in self._steps:
            recorder = self._recorders.setdefault(rows, recording.Recorder(self._make_graph))
            self._steps[rows] = recording.RecordedStep(recorder)
        return self._steps[rows]

    def free(self) -> None:
        """Free the memory of the pool and of recorded steps, even if something still refers to this object."""
        self._steps.clear()
        self._recorders.clear()
        for slots in (self._chunk, *self._batches.values()):
            slots.free()
        self._batches.clear()
        self.pool.free()


def new_pool(
    model: Any,
    make_cache: Callable[[int], LowBitCache],
    chunk_size: int,
    *,
    memory: int | None = None,
    share: float = USABLE,
    limits: Sequence[int] | None = None,
    max_rows: int | None = None,
    tokens: int | None = None,
    share_prefixes: bool = True,
    record: bool = True,
    agree: Callable[[list[int]], list[int]] = list,
    may_be_shorter: bool = False,
) -> tuple[PoolSteps, SharedPrefixes]:
    """Measure the free memory, and allocate a pool.

    Args:
        model: unwrapped, with our attention implementation selected.
        make_cache: makes an empty cache for this many tokens.
        chunk_size: tokens per prefill chunk.
        memory: bytes; `None`: the part `share` of the memory that is free after a chunk was prefilled.
        limits, max_rows, may_be_shorter: see `pool_size`.
        tokens: allocate pages for this many tokens, instead of as many as fit into `memory`.
        record: whether decode steps are recorded if the device has CUDA graphs.
        agree: under tensor parallelism, returns the minimum of each number over all ranks, so that all ranks have the same
            pool.

    Raises:
        ValueError: there is no room for a single row.
    """
    # on a CPU activations are not measured, so two tokens suffice
    read = max(chunk_size, 2) if model.device.type == "cuda" else 2
    template = make_cache(read)
    needed = activation_bytes(model.device, lambda: read_once(model, template, read))
    layers, rings = stored_layers(template), ring_shapes(template)
    for layer in template.layers:  # the rows of the pool take its place
        if isinstance(layer, LowBitLayer):
            layer.store = None
        elif isinstance(layer, SLIDING):
            layer.keys, layer.values, layer.is_initialized = None, None, False
    share_prefixes = share_prefixes and not rings  # pages restore no sliding window
    if memory is None:
        memory = int(share * max(free_memory(model.device) - needed, 0))
    size = pool_size(layers, memory, limits, longest_row(model), max_rows, share_prefixes, rings, may_be_shorter)
    slots, tokens, max_length = agree([size.slots, tokens or size.tokens, size.max_length])
    pool = RowPool(layers, slots, tokens, max_length, rings)
    return PoolSteps(model, template, pool, record), SharedPrefixes(pool, slots if share_prefixes else 0)
