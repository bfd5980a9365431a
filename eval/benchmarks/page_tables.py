"""The page `docs/benchmarks.md`, from the records of speed and memory, and tables of other pages: weights below 16 bits,
several GPUs, and what fits into a GPU. If there are several records of a measurement on a GPU, the last one counts. On
`docs/benchmarks.md` each GPU has its own tables, or rows."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from hf_lowbit_kv.eval.benchmarks import packed_layer
from hf_lowbit_kv.eval.benchmarks.result_files import (
    Record,
    crossed,
    current_records,
    listed,
    markdown_table,
    newest,
)
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.eval.weight_quantization import WEIGHT_QUANTIZATIONS
from hf_lowbit_kv.planning.cache_memory import CacheMemory, FullMemory, PresetMemory, chunk_bytes
from hf_lowbit_kv.planning.fits import CUDA_BYTES, FULL, GB, largest_fitting
from hf_lowbit_kv.planning.model_shapes import Shape, known_models, shape_of, weight_bytes
from hf_lowbit_kv.presets import PAPER_PRESETS, PRESETS

BENCHMARKS = "docs/benchmarks.md"
SHAPES = {
    "gqa_b8_32k": "batch 8, 32k tokens",
    "gqa_b1_128k": "batch 1, 128k tokens",
    "gqa_b32_8k": "batch 32, 8k tokens",
    "mha_b8_8k": "32 KV heads, batch 8, 8k tokens",
}
MODES = {"tuned": "compiled, tuned"}
BENCHMARKS_INTRO = """# Benchmarks

Speed and memory: [attention of one layer](#decode-attention), [a layer's step as in a model](#decode-steps),
[whole models](#steps-of-generate), [batches](#largest-batch), [memory](#memory) and [prompts](#reading-a-prompt).
In rows of whole models a `recorded` step is a CUDA graph (`step="recorded"`), `unfused` the same
with the model's own layers. `compiled` is transformers' own compilation, `compiled, tuned` with `lb.generate`'s settings.
`DynamicCache`, `StaticCache` and `quanto-4` are transformers' caches. [results.md](results.md) has the accuracy.

`make bench` repeats all of it on a GPU (`eval/benchmarks/README.md`), and `make results` writes this page from the records in
`eval/results/`.
"""


def benchmarks_page(folder: Path = RESULTS) -> str:
    """The page, made from the records in `folder`."""
    sections = {"decode": _decode, "generate": _generate, "batch": _batch, "memory": _memory, "prefill": _prompt}
    loaded = {section: _load(folder, kind) for kind, section in sections.items()}
    texts = [section(records) for section, records in loaded.items() if records]
    return BENCHMARKS_INTRO + "".join(f"\n{text}\n" for text in texts if text)


def _load(folder: Path, kind: str) -> list[Record]:
    """Current records of all GPUs, whose names are shortened."""
    records = [record for path in sorted(folder.glob(f"{kind}-*.jsonl")) for record in current_records(path)]
    return [record | {"gpu": record["gpu"].removeprefix("NVIDIA ")} for record in records]


def _commits(records: Iterable[Record]) -> str:
    named = ", ".join(f"`{commit[:7]}`" for commit in sorted({record["commit"] for record in records}))
    return f"Commits of these records: {named}."


def _preset_order(preset: str) -> tuple[int, str]:
    """Order of a preset in tables: listed presets, those of papers, others by name."""
    order = [*PRESETS, *PAPER_PRESETS]
    return (order.index(preset) if preset in order else len(order)), preset


def _decode(records: list[Record]) -> str | None:
    one_token = [r for r in records if (r["dtype"], r.get("query_length", 1)) == ("float16", 1)]
    one_token = [r for r in one_token if r.get("per_head") is not True]
    usual = [r for r in one_token if r["shape"] in SHAPES and r["head_dim"] == 128]
    if not usual:
        return None
    last = newest(usual, "gpu", "shape", "preset", "backend")
    cells: dict[str, dict[tuple, Record]] = {}
    for (gpu, shape, preset, backend), record in last.items():
        cells.setdefault(gpu, {}).setdefault((preset, shape), {"preset": preset})[backend] = record
    tables = [
        f"### {gpu}\n\n"
        + crossed(own, {"preset": "`{preset}`"}, _of(SHAPES, own), _decode_cell, lambda key: _preset_order(*key))
        for gpu, own in sorted(sorted(cells.items()), key=lambda item: -len(item[1]))
    ]
    tables_shown = "\n".join(tables)
    return f"""## Decode attention

Speed-up over the fastest of PyTorch's 16-bit attention (cuDNN, flash) in the same run. Each cell: speed-up CUDA / Triton
(memory-bandwidth limit), then microseconds. One query token, float16, 32 query heads, head_dim 128; 8 KV heads unless the
column names another number. An empty side has no record.
`python -m hf_lowbit_kv.eval.benchmarks.bench_decode`

{tables_shown}
{_commits(last.values())}{_steps(one_token)}"""


def _of(heads: Mapping[str, str], cells: Collection[tuple]) -> dict[str, str]:
    """The heads of columns that have a cell in at least half of the rows."""
    rows = len({key[:-1] for key in cells})
    return {name: head for name, head in heads.items() if 2 * sum(key[-1] == name for key in cells) >= rows}


def _decode_cell(by_backend: Record) -> str:
    both = [by_backend.get(backend) for backend in ("cuda", "triton")]
    ratios = " / ".join("" if record is None else f"{record['ratio']:.2f}" for record in both)
    times = " / ".join("" if record is None else f"{1e3 * record['ms']:.0f}" for record in both)
    limit = next((record["byte_limit_ratio"] for record in both if record), None)
    return f"{ratios} ({limit:.1f}), {times} us" if limit else ""


def _steps(records: list[Record]) -> str:
    """Decode steps on all shapes, from the records that have decode steps."""
    last = newest(
        (r for r in records if r.get("step_behind_ratio") and r["backend"] == "cuda"), "gpu", "shape", "preset"
    )
    if not last:
        return ""
    tables = "\n".join(
        f"#### {gpu}\n\n" + _step_tables({key[1:]: r for key, r in last.items() if key[0] == gpu})
        for gpu in sorted({key[0] for key in last})
    )
    return f"""

### Decode steps

Attention and storing the token, as in a model: directly after another kernel, so that the GPU's caches are cold. Each cell:
speed-up over the fastest of PyTorch's 16-bit attention in the same place (which stores nothing), then microseconds. Below 1
PyTorch's attention is faster. CUDA kernels. Default: 4 query heads for each KV head, head_dim 128.
`eval/benchmarks/packed_layer.py` has the shapes.

{tables}
{_commits(last.values())}"""


def _step_tables(last: dict[tuple, Record]) -> str:
    """Two tables of one GPU's steps, by shape and preset: presets on the usual shapes; other shapes, each in a row,
    because there are too many for columns."""

    def cell(record: Record) -> str:
        return f"{record['step_behind_ratio']:.2f}, {1e3 * record['step_behind_ms']:.0f} us"

    order = list(packed_layer.SHAPES)
    usual = {(preset, shape): r for (shape, preset), r in last.items() if shape in SHAPES}
    others = {key: r for key, r in last.items() if key[0] in order and key[0] not in SHAPES}
    heads = {shape: SHAPES[shape] for shape in order if shape in SHAPES}
    tables = []
    if usual:
        preset = {"preset": "`{preset}`"}
        tables.append(crossed(usual, preset, _of(heads, usual), cell, lambda key: _preset_order(*key)))
    if others:
        shape = {"other shapes": lambda record: packed_layer.SHAPES[record["shape"]].words()}
        columns = {preset: f"`{preset}`" for preset in sorted({key[1] for key in others}, key=_preset_order)}
        tables.append(crossed(others, shape, columns, cell, lambda key: order.index(*key)))
    return "\n".join(tables)


def _generate(records: list[Record]) -> str:
    last = newest(records, "gpu", "model", "cache", "mode", "backend", "batch", "tokens")
    sizes = sorted({key[5:] for key in last})

    def name(r: Record) -> str:
        named = r["gpu"], r["model"], f"`{r['cache']}`", MODES.get(r["mode"], r["mode"]), r["backend"]
        return ", ".join(filter(None, named))

    table = crossed(
        {(*key[:5], key[5:]): record for key, record in last.items()},
        {"GPU, model, cache, step": name},
        {size: "{} x {}".format(*size) for size in sizes},
        "{step_ms:.1f} ({limit_ms:.1f})",
    )
    return f"""## Steps of generate

Median milliseconds of a decode step. The number in brackets is the time to read weights and cache once. Random weights,
bfloat16. Columns are batch x tokens stored. `python -m hf_lowbit_kv.eval.benchmarks.bench_generate caches`

{table}
{_commits(last.values())}"""


def _batch(records: list[Record]) -> str:
    last = newest(records, "gpu", "model", "cache", "mode", "prompt", "new_tokens", "budget").values()
    columns = {
        "GPU": "{gpu}",
        "model": "{model}",
        "cache": "`{cache}`",
        "step": "{mode}",
        "prompt + written tokens": "{prompt} + {new_tokens}",
        "memory": lambda r: f"{r['budget'] / 1e9:.0f} GB",
        "rows": "{rows}",
        "tokens per second": "{throughput:.0f}",
    }
    return f"""## Largest batch

The most rows that fit into the memory, weights included, and the throughput with them. An eager step is bound by Python:
compare rows with all caches, and throughput among steps of one kind.
`python -m hf_lowbit_kv.eval.benchmarks.bench_memory batch`

{listed(last, columns)}
{_commits(last)}"""


def _memory(records: list[Record]) -> str:
    last = newest(records, "gpu", "preset", "batch", "tokens", "prefill_chunk").values()
    columns = {
        "GPU": "{gpu}",
        "preset": "`{preset}`",
        "batch x tokens": "{batch} x {tokens}",
        "prompt read": lambda r: "whole" if r["prefill_chunk"] is None else f"chunks of {r['prefill_chunk']}",
        "cache, GB": lambda r: f"{r['nbytes'] / 1e9:.1f}",
        "peak above the model, GB": lambda r: f"{r['growth'] / 1e9:.1f}",
    }
    return f"""## Memory

8B Llama 3.1 shape, bfloat16. In 16 bits, 8 x 32,768 tokens take 34.4 GB. The peak is the allocator's during `generate`.
A prompt that is read whole also needs memory for the model's own activations.
`python -m hf_lowbit_kv.eval.benchmarks.bench_memory generate`

{listed(last, columns)}
{_commits(last)}"""


def _prompt(records: list[Record]) -> str | None:
    last = newest((r for r in records if r["kind"] == "model"), "gpu", "cache", "backend", "tokens", "chunk")
    if not last:
        return None
    chunks = sorted({key[-1] for key in last}, key=lambda chunk: -(chunk or 10**9))
    table = crossed(
        last,
        {"GPU": "{gpu}", "cache": "`{cache}`", "tokens": "{tokens}"},
        {chunk: "whole" if chunk is None else f"chunks of {chunk}" for chunk in chunks},
        "{seconds:.3f} ({cost:.2f})",
    )
    return f"""## Reading a prompt

Seconds, and in brackets the ratio to `DynamicCache` that reads the prompt whole. 8 layers of the 8B Llama 3.1 shape, bfloat16.
`python -m hf_lowbit_kv.eval.benchmarks.bench_prompt model`

{table}
{_commits(last.values())}"""


# ---- weights below 16 bits ----------------------------------------------------------------------------------------------

WEIGHTS_ACCURACY = RESULTS / "weights-accuracy-smollm2.jsonl"
WEIGHTS_STEPS = RESULTS / "weights-steps-nvidia-h200.jsonl"


def _by_weights(path: Path, *keys: str) -> dict[tuple, Record]:
    """The newest records, in the order of `WEIGHT_QUANTIZATIONS`. The last of `keys` is `preset`."""
    order = list(WEIGHT_QUANTIZATIONS)
    return dict(sorted(newest(current_records(path), *keys).items(), key=lambda item: order.index(item[0][0])))


def _caches(cells: Iterable[tuple], head: str) -> dict[str, str]:
    """Heads of columns for presets, the last part of keys."""
    names = {"dense": "16-bit cache"}
    return {preset: head.format(names.get(preset, f"`{preset}`")) for preset in dict.fromkeys(key[-1] for key in cells)}


def weights_accuracy_table(path: Path = WEIGHTS_ACCURACY) -> str:
    """KL relative to 16-bit weights with the full-precision cache: a row for each kind of weights, a column for each
    cache."""
    cells = _by_weights(path, "weights", "preset")
    rows = {"weights": "`{weights}`", "what": "{meaning}", "perplexity, 16-bit cache": "{ppl:.2f}"}

    def kl(r: Record) -> str:
        return "0" if r["kl"] < 1e-5 else f"{r['kl']:.5f}" if r["kl"] < 1e-3 else f"{r['kl']:.4f}"

    return crossed(cells, rows, _caches(cells, "KL, {}"), kl)


def weights_steps_table(path: Path = WEIGHTS_STEPS) -> str:
    """Milliseconds of a decode step: a row for each kind of weights and shape, a column for each cache."""
    cells = _by_weights(path, "weights", "batch", "tokens", "preset")
    rows = {
        "weights": lambda r: f"`{r['weights']}`{'' if r['mode'] == 'recorded' else ', unfused'}",
        "GB": lambda r: f"{r['weight_bytes'] / 1e9:.1f}",
        "rows x tokens": "{batch} x {tokens}",
    }
    return crossed(cells, rows, _caches(cells, "{}, ms"), "{step_ms:.1f}")


# ---- several GPUs -----------------------------------------------------------------------------------------------------


def parallel_table(folder: Path = RESULTS) -> str:
    """Recorded steps on one GPU and on two, from the newest records in which both ran on the same kind of GPU."""
    records = [record for path in sorted(folder.glob("parallel-*.jsonl")) for record in current_records(path)]
    keys = "gpu", "shape", "layers", "preset", "batch", "tokens"
    last = newest((record for record in records if record["mode"] == "recorded"), *keys, "ranks")
    pairs = [
        [last[(*key, ranks)] for ranks in (1, 2)]
        for key in dict.fromkeys(key[:-1] for key in last)
        if {(*key, 1), (*key, 2)} <= last.keys()
    ]
    columns = {
        "GPU, shape, cache": lambda pair: "{gpu}: {shape}, {layers} layers, `{preset}`".format(**pair[0]),
        "rows x tokens": lambda pair: f"{pair[0]['batch']} x {pair[0]['tokens'] // 1024}k",
        "one GPU: ms": lambda pair: f"{pair[0]['step_ms']:.2f}",
        "two: ms": lambda pair: f"{pair[1]['step_ms']:.2f}",
        "cache of a GPU": lambda pair: f"{max(pair[1]['nbytes']) / max(pair[0]['nbytes']):.2f}",
        "peak of a GPU": lambda pair: f"{max(pair[1]['peak_bytes']) / max(pair[0]['peak_bytes']):.2f}",
        "time": lambda pair: f"**{pair[1]['step_ms'] / pair[0]['step_ms']:.2f}**",
    }
    return listed(pairs, columns)


# ---- what fits --------------------------------------------------------------------------------------------------------

FITS_PRESETS = ("int8", "kivi-4-sink", "k4v2-sink", "eigen-2")
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
    return shape, {FULL: FullMemory(shape), **{preset: PresetMemory(shape, preset) for preset in FITS_PRESETS}}


def cell(name: str, weights: str, preset: str, memory: int) -> str:
    """`LONGEST / ROWS` for a GPU with `memory` bytes. LONGEST is thousands of tokens in one row, or `all` if the
    model's whole context fits. ROWS counts rows of `ROW` tokens. A dash means that nothing fits, or that a row is
    longer than the model's context."""
    shape, counters = _counted(name)
    left, nbytes = memory - weight_bytes(shape, weights) - CUDA_BYTES, counters[preset].nbytes
    left -= chunk_bytes(shape, packed=preset != FULL)
    full_length = shape.config.max_position_embeddings
    if nbytes(full_length) <= left:
        shown = "all"
    else:
        thousands = largest_fitting(lambda number: nbytes(1000 * number) <= left)
        shown = f"{thousands}k" if thousands else "-"
    rows = largest_fitting(lambda number: nbytes(ROW, number) <= left) if full_length >= ROW else 0
    return f"{shown} / {rows or '-'}"


def _fits_rows(memory: int) -> Iterator[list[str]]:
    for name in MODELS:
        shape, _ = _counted(name)
        published = known_models()[name]["weights"]
        for weights in dict.fromkeys((published, "int4")):
            if weights == "int4" and published == "mxfp4":
                continue
            size = weight_bytes(shape, weights)
            if size + CUDA_BYTES >= memory * GB:
                continue
            cells = [cell(name, weights, preset, memory * GB) for preset in (FULL, *FITS_PRESETS)]
            full_length = shape.config.max_position_embeddings
            yield [f"{name.split('/')[1]} ({full_length // 1024}k)", f"{weights}, {size / GB:.1f}", *cells]


@functools.cache
def fits_table(memory: int) -> str:
    """The longest context, and the most rows, of known models on GPUs with `memory` GB."""
    head = ["model (its context)", "weights, GB", "16-bit cache", *(f"`{preset}`" for preset in FITS_PRESETS)]
    return markdown_table(head, _fits_rows(memory))
