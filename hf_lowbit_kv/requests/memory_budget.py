"""How many rows and pages a pool gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..generation.prefill import GpuMemory
from ..storage.paged_store import COUNTERS, SCRATCH, WINDOWS, PagedStore
from .ring_memory import RingShape
from .slot_memory import TABLE_STEP

#: default for the share of the free memory that a pool takes
USABLE = 0.9
#: default for the largest number of rows
MAX_ROWS = 128
#: if requests are not known beforehand: a row gets pages for at least this many tokens
EXPECTED_TOKENS = 4096


class PoolSize(NamedTuple):
    slots: int
    tokens: int
    """for which there are pages"""
    max_length: int
    """tokens that one row may hold"""


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device."""
    if device.type == "cuda":
        return GpuMemory(device).free_at_once()
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 2**30  # this machine does not say how much memory is free


def slot_bytes(layers: Sequence[PagedStore], sinks: bool) -> int:
    """Bytes of a slot without its page table: window and counters. sinks: add one more sink, for a kept prefix."""
    total = 0
    for layer in layers:
        total += layer.row_bytes(*WINDOWS, *COUNTERS) + layer.num_heads * SCRATCH * torch.int32.itemsize
        total += layer.row_bytes("sink_k", "sink_v") if sinks else 0
    return total


def _rounded(layers: Sequence[PagedStore], tokens: int) -> int:
    """Tokens of the pages that a row of this many tokens takes."""
    return max(max(layer.spec.pages_for(tokens), 1) * layer.spec.page_size for layer in layers)


def _table_bytes(layers: Sequence[PagedStore], max_length: int) -> int:
    """Bytes of a slot's page tables. An entry is a page's number, and an address in each layer."""
    numbers = {(layer.spec.paging, layer.device): layer.spec for layer in layers}
    sizes = [*((4, spec) for spec in numbers.values()), *((8, layer.spec) for layer in layers)]
    return sum(size * (spec.pages_for(max_length) + TABLE_STEP) for size, spec in sizes)


def pool_size(
    layers: Sequence[PagedStore],
    memory: int,
    limits: Sequence[int] | None,
    longest: int | None,
    max_rows: int | None,
    sinks: bool,
    rings: Sequence[RingShape] = (),
    may_be_shorter: bool = False,
) -> PoolSize:
    """The number of slots and pages for this memory.

    Args:
        memory: bytes.
        limits: the maximum length in tokens of each row that will come; `None`: not known beforehand. Rows that do not fit
            even into an empty pool get no memory.
        longest: tokens of the longest text that the model was made for, if known: no row may hold more.
        sinks: whether prefixes are kept.
        rings: the rings of each row, for sliding-window layers.
        may_be_shorter: than `limits`. Then a limit beyond the longest possible row counts as that row.

    Raises:
        ValueError: there is no room for the window and a page of a single row.
    """
    each = sum(layer.token_bytes for layer in layers)
    page = max(layer.spec.page_size for layer in layers)
    # about the longest row for any division of the memory; every slot has a page table of this length
    possible = int(max(memory - slot_bytes(layers, sinks), 0) / each)
    bounds = [*([max(limits)] if limits else []), *([longest] if longest else [])]
    max_length = min([possible + page, *bounds])
    of_rings = sum(ring.row_bytes(max_length) for ring in rings)
    fixed = slot_bytes(layers, sinks) + _table_bytes(layers, max_length) + of_rings

    def tokens_beside(slots: int) -> int:
        return int((memory - slots * fixed) / each) // page * page

    if (single_row := tokens_beside(1)) < page:
        raise ValueError(
            f"memory={memory} bytes are too few: the 16-bit windows of a row take {fixed}, and a page {int(page * each)}"
        )
    max_length = max(min(max_length, _room(layers, single_row)), 1)
    slots = MAX_ROWS if max_rows is None else max_rows
    if limits is None:
        slots = max(min(slots, int(memory // (fixed + EXPECTED_TOKENS * each))), 1)
        tokens = max(tokens_beside(slots), page)
        max_length = min(max_length, _room(layers, tokens))
        return PoolSize(slots, min(tokens, max(slots * _rounded(layers, max_length), page)), max_length)
    if may_be_shorter:
        limits = [min(limit, max_length) for limit in limits]
    # rows that no pool could hold are refused, and get no pages
    needs = sorted((_rounded(layers, limit) for limit in limits if limit <= max_length), reverse=True) or [page]
    typical, largest = max(sum(needs) / len(needs), page), needs[0]
    fitting = min(int(memory // (fixed + typical * each)), int((memory - largest * each) // fixed))
    slots = max(min(slots, len(needs), fitting), 1)
    return PoolSize(slots, max(min(tokens_beside(slots), sum(needs[:slots])), page), max_length)


def _room(layers: Sequence[PagedStore], tokens: int) -> int:
    """Tokens that a row can hold if it has all pages of a pool for `tokens` tokens."""
    return min(layer.spec.room(tokens // layer.spec.page_size) for layer in layers)


def activation_bytes(device: torch.device, read: Any) -> int:
    """Peak bytes that prefilling one chunk allocates; 0 if that cannot be measured. read: prefills a chunk."""
    if device.type == "cuda":
        return GpuMemory(device).peak(read)
    read()
    return 0
