"""Writes the page `docs/benchmarks.md` from the records of speed and memory. If there are several records of a measurement
on a GPU, the last one counts. Each GPU has its own tables, or rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_lowbit_kv.eval.benchmarks import packed_layer
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.presets import PAPER_PRESETS, PRESETS

NEWLINE = "\n"
BENCHMARKS = "docs/benchmarks.md"
SHAPES = {
    "gqa_b8_32k": "batch 8, 32k tokens",
    "gqa_b1_128k": "batch 1, 128k tokens",
    "gqa_b32_8k": "batch 32, 8k tokens",
    "mha_b8_8k": "32 KV heads, batch 8, 8k tokens",
}
MODES = {
    "tuned": "compiled, tuned",
    "compiled": "compiled",
    "eager": "eager",
    "recorded": "recorded",
}
BENCHMARKS_INTRO = """# Benchmarks

`python -m hf_lowbit_kv.eval.benchmarks.tables` (`make results`) writes this page from the records in `eval/results/`.
Do not edit it by hand.
`eval/benchmarks/README.md` says how each figure is measured. [results.md](results.md) has the accuracy of the presets.

`make bench` repeats all of it on a GPU. `eval/benchmarks/bench.sh` has its commands, each with the page that quotes its
figures.
"""

Record = dict[str, Any]


def benchmarks_page(folder: Path = RESULTS) -> str:
    """The page, made from the records in `folder`."""
    sections = [
        _decode(_load(folder, "decode")),
        _generate(_load(folder, "generate")),
        _batch(_load(folder, "batch")),
        _memory(_load(folder, "memory")),
        _prompt(_load(folder, "prefill")),
    ]
    return BENCHMARKS_INTRO + "".join(f"\n{section}\n" for section in sections if section)


def _load(folder: Path, kind: str) -> list[Record]:
    return [record for path in sorted(folder.glob(f"{kind}-*.jsonl")) for record in current_records(path)]


def _last(records: Iterable[Record], *keys: str) -> dict[tuple, Record]:
    """The last record of each combination of values in these fields, in the order in which combinations first
    appear."""
    newest: dict[tuple, Record] = {}
    for record in records:
        newest[tuple(record.get(key) for key in keys)] = record
    return newest


def _gpus(records: Iterable[Record]) -> list[str]:
    return sorted({record["gpu"] for record in records})


def _commits(records: Iterable[Record]) -> str:
    named = ", ".join(f"`{commit[:7]}`" for commit in sorted({record["commit"] for record in records}))
    return f"Commits of these records: {named}."


def _decode(records: list[Record]) -> str | None:
    one_token = [r for r in records if (r["dtype"], r.get("query_length", 1)) == ("float16", 1)]
    one_token = [r for r in one_token if r.get("per_head") is not True]
    usual = [r for r in one_token if r["shape"] in SHAPES and r["head_dim"] == 128]
    if not usual:
        return None
    newest = _last(usual, "gpu", "shape", "preset", "backend")
    tables = [
        f"### {gpu.removeprefix('NVIDIA ')}\n\n{_decode_table({key[1:]: newest[key] for key in newest if key[0] == gpu})}"
        for gpu in sorted(_gpus(usual), key=lambda gpu: -len({key[1:3] for key in newest if key[0] == gpu}))
    ]
    return f"""## Decode attention

Speed-up over the fastest of PyTorch's 16-bit attention (cuDNN, flash) in the same run. Each cell: speed-up CUDA / Triton
(memory-bandwidth limit), then microseconds. One query token, float16, 32 query heads, head_dim 128; 8 KV heads unless the
column names another number. An empty side has no record.
`python -m hf_lowbit_kv.eval.benchmarks.bench_decode`

{NEWLINE.join(tables)}
{_commits(newest.values())}{_steps(one_token)}"""


def _place(preset: str) -> tuple[int, str]:
    """Order of a preset in tables: listed presets, those of papers, others by name."""
    order = [*PRESETS, *PAPER_PRESETS]
    return (order.index(preset) if preset in order else len(order)), preset


def _decode_table(newest: dict[tuple, Record]) -> str:
    """A table of one GPU's records, by shape, preset and backend."""
    shapes = [shape for shape in SHAPES if any(key[0] == shape for key in newest)]
    rows = []
    for preset in sorted({key[1] for key in newest}, key=_place):
        cells = []
        for shape in shapes:
            both = [newest.get((shape, preset, backend)) for backend in ("cuda", "triton")]
            ratios = " / ".join("" if record is None else f"{record['ratio']:.2f}" for record in both)
            times = " / ".join("" if record is None else f"{1e3 * record['ms']:.0f}" for record in both)
            limit = next((record["byte_limit_ratio"] for record in both if record), None)
            cells.append(f"{ratios} ({limit:.1f}), {times} us" if limit else "")
        rows.append([f"`{preset}`", *cells])
    return markdown_table(["preset", *(SHAPES[shape] for shape in shapes)], rows)


def _steps(records: list[Record]) -> str:
    """Decode steps on all shapes, from the records that have decode steps."""
    cuda = (r for r in records if r.get("step_behind_ratio") and r["backend"] == "cuda")
    newest = _last(cuda, "gpu", "shape", "preset")
    if not newest:
        return ""
    tables = [
        _step_tables({key[1:3]: r for key, r in newest.items() if key[0] == gpu}, gpu) for gpu in _gpus(newest.values())
    ]
    return f"""

### Decode steps

Attention and storing the token, as in a model: directly after another kernel, so that the GPU's caches are cold. Each cell:
speed-up over the fastest of PyTorch's 16-bit attention in the same place (which stores nothing), then microseconds. Below 1
PyTorch's attention is faster. CUDA kernels. Default: 4 query heads for each KV head, head_dim 128.
`eval/benchmarks/packed_layer.py` has the shapes.

{NEWLINE.join(tables)}
{_commits(newest.values())}"""


def _step_tables(newest: dict[tuple, Record], gpu: str) -> str:
    """Two tables of one GPU's steps, by shape and preset: presets on the usual shapes; other shapes, each in a row,
    because there are too many for columns."""

    def presets_on(shapes: Sequence[str]) -> list[str]:
        return sorted({preset for shape, preset in newest if shape in shapes}, key=_place)

    def cell(shape: str, preset: str) -> str:
        record = newest.get((shape, preset))
        return f"{record['step_behind_ratio']:.2f}, {1e3 * record['step_behind_ms']:.0f} us" if record else ""

    measured = [name for name in packed_layer.SHAPES if any(key[0] == name for key in newest)]
    usual = [name for name in measured if name in SHAPES]
    others = [name for name in measured if name not in SHAPES]
    tables = []
    if usual:
        rows = [[f"`{preset}`", *(cell(shape, preset) for shape in usual)] for preset in presets_on(usual)]
        tables.append(markdown_table(["preset", *(SHAPES[shape] for shape in usual)], rows))
    if others:
        shown = presets_on(others)
        rows = [[packed_layer.SHAPES[shape].words(), *(cell(shape, preset) for preset in shown)] for shape in others]
        tables.append(markdown_table(["other shapes", *(f"`{preset}`" for preset in shown)], rows))
    return f"#### {gpu.removeprefix('NVIDIA ')}\n\n{NEWLINE.join(tables)}"


def _milliseconds(record: Record) -> str:
    return f"{record['step_ms']:.1f} ({record['limit_ms']:.1f})"


def _generate(records: list[Record]) -> str | None:
    if not records:
        return None
    newest = _last(records, "gpu", "model", "cache", "mode", "backend", "batch", "tokens")
    places = sorted({(key[5], key[6]) for key in newest})
    heads = ["GPU, model, cache, step", *(f"{batch} x {tokens}" for batch, tokens in places)]
    rows = []
    for row in dict.fromkeys(key[:5] for key in newest):
        gpu, model, cache, mode, backend = row
        name = f"{gpu.removeprefix('NVIDIA ')}, {model}, `{cache}`, {MODES.get(mode, mode)}" + (
            f", {backend}" if backend else ""
        )
        rows.append(
            [name, *(_milliseconds(newest[(*row, *place)]) if (*row, *place) in newest else "" for place in places)]
        )
    return f"""## Steps of generate

Median milliseconds of a decode step. The number in brackets is the time to read weights and cache once. Random weights,
bfloat16. Columns are batch x tokens stored. `python -m hf_lowbit_kv.eval.benchmarks.bench_generate`

{markdown_table(heads, rows)}
{_commits(newest.values())}"""


def _batch(records: list[Record]) -> str | None:
    if not records:
        return None
    newest = _last(records, "gpu", "model", "cache", "mode", "prompt", "new_tokens", "budget").values()
    rows = [
        [
            r["gpu"].removeprefix("NVIDIA "),
            r["model"],
            f"`{r['cache']}`",
            r["mode"],
            f"{r['prompt']} + {r['new_tokens']}",
            f"{r['budget'] / 1e9:.0f} GB",
            str(r["rows"]),
            f"{r['throughput']:.0f}",
        ]
        for r in newest
    ]
    heads = ["GPU", "model", "cache", "step", "prompt + written tokens", "memory", "rows", "tokens per second"]
    return f"""## Largest batch

The most rows that fit into the memory, weights included, and the throughput with them. An eager step is bound by Python:
compare rows with all caches, and throughput among steps of one kind.
`python -m hf_lowbit_kv.eval.benchmarks.bench_batch`

{markdown_table(heads, rows)}
{_commits(newest)}"""


def _memory(records: list[Record]) -> str | None:
    if not records:
        return None
    newest = _last(records, "gpu", "preset", "batch", "tokens", "prefill_chunk").values()
    rows = [
        [
            r["gpu"].removeprefix("NVIDIA "),
            f"`{r['preset']}`",
            f"{r['batch']} x {r['tokens']}",
            "whole" if r["prefill_chunk"] is None else f"chunks of {r['prefill_chunk']}",
            f"{r['nbytes'] / 1e9:.1f}",
            f"{r['growth'] / 1e9:.1f}",
        ]
        for r in newest
    ]
    heads = ["GPU", "preset", "batch x tokens", "prompt read", "cache, GB", "peak above the model, GB"]
    return f"""## Memory

8B Llama 3.1 shape, bfloat16. In 16 bits, 8 x 32768 tokens take 34.4 GB. The peak is the allocator's during `generate`.
A prompt that is read whole also needs memory for the model's own activations.
`python -m hf_lowbit_kv.eval.benchmarks.bench_memory generate`

{markdown_table(heads, rows)}
{_commits(newest)}"""


def _prompt(records: list[Record]) -> str | None:
    newest = _last((r for r in records if r["kind"] == "model"), "gpu", "cache", "backend", "tokens", "chunk")
    if not newest:
        return None
    chunks = sorted({key[4] for key in newest}, key=lambda chunk: -(chunk or 10**9))
    rows = []
    for row in dict.fromkeys(key[:4] for key in newest):
        cells = [newest.get((*row, chunk)) for chunk in chunks]
        shown = ["" if r is None else f"{r['seconds']:.3f} ({r['cost']:.2f})" for r in cells]
        rows.append([row[0].removeprefix("NVIDIA "), f"`{row[1]}`", str(row[3]), *shown])
    heads = ["GPU", "cache", "tokens", *("whole" if chunk is None else f"chunks of {chunk}" for chunk in chunks)]
    return f"""## Reading a prompt

Seconds, and in brackets the ratio to `DynamicCache` that reads the prompt whole. 8 layers of the 8B Llama 3.1 shape, bfloat16.
`python -m hf_lowbit_kv.eval.benchmarks.bench_prompt model`

{markdown_table(heads, rows)}
{_commits(newest.values())}"""
