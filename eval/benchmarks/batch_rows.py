"""Rows that fit into a memory budget, computed: `python -m hf_lowbit_kv.eval.benchmarks.batch_rows`, in seconds, without a GPU.

The arithmetic of `bench_batch`, which measures them: the bytes of one row of the model of the Qwen3 8B shape, and how many such
rows are left beside weights, parameters and a reserve. Bytes are those that a preallocated cache of one layer allocates. What a
step needs in between is not counted but in the reserve.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from hf_lowbit_kv.eval.benchmarks.bench_batch import qwen3_8b, rows_within
from hf_lowbit_kv.eval.benchmarks.bench_generate import is_host
from hf_lowbit_kv.eval.benchmarks.contenders import low_bit_cache
from hf_lowbit_kv.eval.benchmarks.result_files import markdown_table
from hf_lowbit_kv.eval.provenance import run_command, wide_console

PROMPT, NEW_TOKENS, BUDGET, LAYERS = 100, 8192, 80e9, 36
DTYPE = torch.bfloat16
#: what a plain run counts
CACHES = (
    "DynamicCache",
    "kivi-2-sink",
    "kitty-pro",
    "eigen-3",
    "eigen-2",
    "eigen-2,sink=4",
    "eigen-2,sink=4,residual=32",
)


class Room(NamedTuple):
    """Bytes of a row of all layers, bytes that all rows share, and the rows that fit."""

    cache: str
    row: int
    shared: int
    rows: int


def room(cache: str, tokens: int = PROMPT + NEW_TOKENS, budget: float = BUDGET) -> Room:
    """What a cache, by its name in `bench_batch`, takes. Raises `ValueError` for a name that is not known."""
    config = qwen3_8b(1)
    heads, head_dim = config.num_key_value_heads, config.head_dim
    if is_host(cache):
        row, shared = 2 * heads * head_dim * DTYPE.itemsize * tokens, 0
    else:
        (layer,) = low_bit_cache(cache, config, max_cache_len=tokens).packed_layers
        layer.lazy_initialization(*(torch.zeros(1, heads, 1, head_dim, dtype=DTYPE) for _ in "kv"))
        parts = layer.store.nbytes()
        shared = parts["parameters"]
        row = sum(parts.values()) - shared
    row, shared = LAYERS * row, LAYERS * shared
    return Room(cache, row, shared, rows_within(budget, all_weight_bytes(), row, shared))


@functools.cache
def all_weight_bytes() -> int:
    """Of all weights of the model. (`bench_generate.weight_bytes`: of those that a step reads.)"""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_8b(LAYERS), dtype=DTYPE)
    return sum(parameter.nbytes for parameter in model.parameters())


def render(caches: Sequence[str] = CACHES) -> str:
    """A Markdown table; ratios are to the first."""
    found = [room(cache) for cache in caches]
    lines = ([f"`{x.cache}`", f"{x.row / 1e6:.0f}", str(x.rows), f"{x.rows / found[0].rows:.1f}x"] for x in found)
    return markdown_table(("cache", "MB a row", "rows", "ratio"), lines)


def main() -> None:
    """Print the table."""
    table = Table("cache", "MB a row", "shared MB", "rows", "ratio")
    first = room(CACHES[0])
    for each in map(room, CACHES):
        sizes = f"{each.row / 1e6:.1f}", f"{each.shared / 1e6:.1f}", str(each.rows), f"{each.rows / first.rows:.2f}"
        table.add_row(each.cache, *sizes)
    wide_console().print(table)


if __name__ == "__main__":
    run_command(main)
