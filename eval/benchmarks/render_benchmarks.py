"""Writes `docs/benchmarks.md` from the records: `python -m hf_lowbit_kv.eval.benchmarks.render_benchmarks [--check]`.

Of several records of one measurement on one GPU the last one counts. Each GPU has tables, or rows, of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.provenance import RESULTS, run_command
from hf_lowbit_kv.presets import PRESETS

BLANK_LINE = "\n\n"
PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
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
INTRO = """# Benchmarks

`python -m hf_lowbit_kv.eval.benchmarks.render_benchmarks` writes this page from the records in `eval/results/`.
Do not edit it by hand.
`eval/benchmarks/README.md` says how each figure is measured. `docs/accuracy.md` has the accuracy of the presets.

`make bench` repeats all of it on a GPU, the most wanted first.
`python -m hf_lowbit_kv.eval.benchmarks.bench_all --minutes 30` keeps to a time, `--only decode,start` chooses, `--list`
shows the commands. Each measurement is a process with a log (`--logs`) and appends its records. What the GPU or the
installed packages do not allow is skipped, with the reason.
"""

Record = dict[str, Any]


def render(folder: Path = RESULTS) -> str:
    """The page, from the records in `folder`."""
    sections = [
        _decode(_load(folder, "decode")),
        _generate(_load(folder, "generate")),
        _batch(_load(folder, "batch")),
        _memory(_load(folder, "memory")),
        _prompt(_load(folder, "prefill")),
    ]
    return INTRO + "".join(f"\n{section}\n" for section in sections if section)


def _load(folder: Path, kind: str) -> list[Record]:
    return [record for path in sorted(folder.glob(f"{kind}-*.jsonl")) for record in read_records(path)]


def _last(records: Iterable[Record], *keys: str) -> dict[tuple, Record]:
    """The last record of each combination of these fields, in the order in which combinations first appear."""
    found: dict[tuple, Record] = {}
    for record in records:
        found[tuple(record.get(key) for key in keys)] = record
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gpus(records: Iterable[Record]) -> list[str]:
    return sorted({record["gpu"] for record in records})


def _commits(records: Iterable[Record]) -> str:
    named = ", ".join(f"`{commit[:7]}`" for commit in sorted({record["commit"] for record in records}))
    return f"Commits of these records: {named}."


def _decode(records: list[Record]) -> str | None:
    usual = [r for r in records if (r["dtype"], r.get("query_length", 1), r["head_dim"]) == ("float16", 1, 128)]
    usual = [r for r in usual if r["shape"] in SHAPES and r.get("per_head") is not True]
    if not usual:
        return None
    found = _last(usual, "gpu", "shape", "preset", "backend")
    tables = [
        f"### {gpu.removeprefix('NVIDIA ')}\n\n{_decode_table({key[1:]: found[key] for key in found if key[0] == gpu})}"
        for gpu in sorted(_gpus(usual), key=lambda gpu: -len({key[1:3] for key in found if key[0] == gpu}))
    ]
    return f"""## Decode attention

How many times faster than the fastest of PyTorch's 16-bit attention (cuDNN, flash) in the same run: CUDA kernels / Triton
kernels. The number in brackets is what the bytes allow. One query token, float16, 32 query heads, head_dim 128; 8 KV heads
where the column does not say otherwise. An empty side has no record. `python -m hf_lowbit_kv.eval.benchmarks.bench_decode`

{BLANK_LINE.join(tables)}

{_commits(found.values())}"""


def _decode_table(found: dict[tuple, Record]) -> str:
    """The records of one GPU, by shape, preset and backend."""
    shapes = [shape for shape in SHAPES if any(key[0] == shape for key in found)]
    order = {name: i for i, name in enumerate(PRESETS)}
    rows = []
    for preset in sorted({key[1] for key in found}, key=lambda name: (order.get(name, len(order)), name)):
        cells = []
        for shape in shapes:
            both = [found.get((shape, preset, backend)) for backend in ("cuda", "triton")]
            ratios = " / ".join("" if record is None else f"{record['ratio']:.2f}" for record in both)
            limit = next((record["byte_limit_ratio"] for record in both if record), None)
            cells.append(f"{ratios} ({limit:.1f})" if limit else "")
        rows.append([f"`{preset}`", *cells])
    return _table(["preset", *(SHAPES[shape] for shape in shapes)], rows)


def _milliseconds(record: Record) -> str:
    return f"{record['step_ms']:.1f} ({record['limit_ms']:.1f})"


def _generate(records: list[Record]) -> str | None:
    if not records:
        return None
    found = _last(records, "gpu", "model", "cache", "mode", "backend", "batch", "tokens")
    places = sorted({(key[5], key[6]) for key in found})
    heads = ["GPU, model, cache, step", *(f"{batch} x {tokens}" for batch, tokens in places)]
    rows = []
    for row in dict.fromkeys(key[:5] for key in found):
        gpu, model, cache, mode, backend = row
        name = f"{gpu.removeprefix('NVIDIA ')}, {model}, `{cache}`, {MODES.get(mode, mode)}" + (
            f", {backend}" if backend else ""
        )
        rows.append(
            [name, *(_milliseconds(found[(*row, *place)]) if (*row, *place) in found else "" for place in places)]
        )
    return f"""## Steps of generate

Median milliseconds of a decode step. The number in brackets is the time to read weights and cache once. Random weights,
bfloat16. Columns are batch x tokens stored. `python -m hf_lowbit_kv.eval.benchmarks.bench_generate`

{_table(heads, rows)}

{_commits(found.values())}"""


def _batch(records: list[Record]) -> str | None:
    if not records:
        return None
    found = _last(records, "gpu", "model", "cache", "mode", "prompt", "new_tokens", "budget").values()
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
        for r in found
    ]
    heads = ["GPU", "model", "cache", "step", "prompt + written tokens", "memory", "rows", "tokens a second"]
    return f"""## Largest batch

The most rows that fit into the memory, weights included, and the throughput with them. An eager step is bound by Python:
compare rows with all caches, and throughput among steps of one kind.
`python -m hf_lowbit_kv.eval.benchmarks.bench_batch`

{_table(heads, rows)}

{_commits(found)}"""


def _memory(records: list[Record]) -> str | None:
    if not records:
        return None
    found = _last(records, "gpu", "preset", "batch", "tokens", "prefill_chunk").values()
    rows = [
        [
            r["gpu"].removeprefix("NVIDIA "),
            f"`{r['preset']}`",
            f"{r['batch']} x {r['tokens']}",
            "whole" if r["prefill_chunk"] is None else f"chunks of {r['prefill_chunk']}",
            f"{r['nbytes'] / 1e9:.1f}",
            f"{r['growth'] / 1e9:.1f}",
        ]
        for r in found
    ]
    heads = ["GPU", "preset", "batch x tokens", "prompt read", "cache, GB", "peak above the model, GB"]
    return f"""## Memory

8B Llama 3.1 shape, bfloat16. In 16 bits, 8 x 32768 tokens take 34.4 GB. The peak is the allocator's during `generate`.
A prompt that is read whole also needs memory for the model's own activations.
`python -m hf_lowbit_kv.eval.benchmarks.bench_memory`

{_table(heads, rows)}

{_commits(found)}"""


def _prompt(records: list[Record]) -> str | None:
    found = _last((r for r in records if r["kind"] == "model"), "gpu", "cache", "backend", "tokens", "chunk")
    if not found:
        return None
    chunks = sorted({key[4] for key in found}, key=lambda chunk: -(chunk or 10**9))
    rows = []
    for row in dict.fromkeys(key[:4] for key in found):
        cells = [found.get((*row, chunk)) for chunk in chunks]
        shown = ["" if r is None else f"{r['seconds']:.3f} ({r['cost']:.2f})" for r in cells]
        rows.append([row[0].removeprefix("NVIDIA "), f"`{row[1]}`", str(row[3]), *shown])
    heads = ["GPU", "cache", "tokens", *("whole" if chunk is None else f"chunks of {chunk}" for chunk in chunks)]
    return f"""## Reading a prompt

Seconds, and in brackets the ratio to `DynamicCache` that reads the prompt whole. 8 layers of the 8B Llama 3.1 shape, bfloat16.
`python -m hf_lowbit_kv.eval.benchmarks.bench_prompt`

{_table(heads, rows)}

{_commits(found.values())}"""


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if the page is not current.")
    ] = False,
) -> None:
    """Write docs/benchmarks.md from the records."""
    text = render()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        typer.echo(f"{PAGE.name} is not current: python -m hf_lowbit_kv.eval.benchmarks.render_benchmarks", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
