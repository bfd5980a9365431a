"""Tables of docs/what-fits.md: the longest context, and the most rows, of known models on GPUs with 24, 48 and 80 GB.

`python -m hf_lowbit_kv.eval.benchmarks.memory_table` (part of `make results`) writes the tables into the page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from hf_lowbit_kv.eval.benchmarks.result_files import markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS, run_command
from hf_lowbit_kv.planning.cache_memory import CacheMemory, FullMemory, PresetMemory, chunk_bytes
from hf_lowbit_kv.planning.fits import CUDA_BYTES, FULL, GB, largest_fitting
from hf_lowbit_kv.planning.model_shapes import Shape, known_models, shape_of, weight_bytes

PAGE = RESULTS.parents[1] / "docs" / "what-fits.md"
MEMORIES = (24, 48, 80)
PRESETS = ("int8", "kivi-4-sink", "k4v2-sink", "eigen-2")
#: tokens of each row when rows are counted
ROW = 32768
MODELS = (
    "HuggingFaceTB/SmolLM3-3B",
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "openai/gpt-oss-20b",
    "google/gemma-3-27b-it",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)


@functools.cache
def _counted(name: str) -> tuple[Shape, dict[str, CacheMemory]]:
    shape = shape_of(name)
    return shape, {FULL: FullMemory(shape), **{preset: PresetMemory(shape, preset) for preset in PRESETS}}


def cell(name: str, weights: str, preset: str, memory: int) -> str:
    """`LONGEST / ROWS` for a GPU with `memory` bytes. LONGEST is thousands of tokens in one row, or `all` if the
    model's whole context fits. ROWS counts rows of `ROW` tokens. A dash means that nothing fits, or that a row is
    longer than the model's context."""
    shape, counters = _counted(name)
    left = memory - weight_bytes(shape, weights) - chunk_bytes(shape, packed=preset != FULL) - CUDA_BYTES
    full_length = shape.config.max_position_embeddings
    if counters[preset].nbytes(full_length) <= left:
        shown = "all"
    else:
        thousands = largest_fitting(lambda number: counters[preset].nbytes(1000 * number) <= left)
        shown = f"{thousands}k" if thousands else "-"
    rows = _rows_that_fit(counters[preset], left) if full_length >= ROW else 0
    return f"{shown} / {rows or '-'}"


def _rows_that_fit(counter: CacheMemory, left: int) -> int:
    """How many rows of `ROW` tokens fit into `left` bytes. The sizes of one and two rows give an estimate, which is
    then checked and corrected."""
    one, two = counter.nbytes(ROW, 1), counter.nbytes(ROW, 2)
    rows = max(1 + (left - one) // (two - one), 0)
    while rows and counter.nbytes(ROW, rows) > left:
        rows -= 1
    while counter.nbytes(ROW, rows + 1) <= left:
        rows += 1
    return rows


def _rows(memory: int) -> Iterator[list[str]]:
    for name in MODELS:
        shape, _ = _counted(name)
        published = known_models()[name]["weights"]
        for weights in dict.fromkeys((published, "int4")):
            if weights == "int4" and published == "mxfp4":
                continue
            size = weight_bytes(shape, weights)
            if size + CUDA_BYTES >= memory * GB:
                continue
            cells = [cell(name, weights, preset, memory * GB) for preset in (FULL, *PRESETS)]
            full_length = shape.config.max_position_embeddings
            yield [f"{name.split('/')[1]} ({full_length // 1024}k)", f"{weights}, {size / GB:.1f}", *cells]


def memory_table(memory: int) -> str:
    """The table for GPUs with `memory` GB."""
    head = ["model (its context)", "weights, GB", "16-bit cache", *(f"`{preset}`" for preset in PRESETS)]
    return markdown_table(head, _rows(memory))


def filled(page: str, memories: Sequence[int] = MEMORIES) -> str:
    """The page with new tables."""
    for memory in memories:
        begin, end = f"<!-- results: fits-{memory} -->\n", "<!-- end of results -->"
        before, rest = page.split(begin)
        page = before + begin + memory_table(memory) + end + rest.split(end, 1)[1]
    return page


def main() -> None:
    """Write the tables into docs/what-fits.md."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
