"""Tables of other pages: weights below 16 bits (docs/quantized-weights.md), figures from papers beside ours by the same
protocol (docs/protocols.md), and what fits into GPUs with 24, 48 and 80 GB (docs/what-fits.md)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.eval.weight_quantization import WEIGHT_QUANTIZATIONS
from hf_lowbit_kv.planning.cache_memory import CacheMemory, FullMemory, PresetMemory, chunk_bytes
from hf_lowbit_kv.planning.fits import CUDA_BYTES, FULL, GB, largest_fitting
from hf_lowbit_kv.planning.model_shapes import Shape, known_models, shape_of, weight_bytes

WEIGHTS_ACCURACY = RESULTS / "weights-accuracy-smollm2.jsonl"
WEIGHTS_STEPS = RESULTS / "weights-steps-nvidia-h200.jsonl"


def _newest(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The last record of each combination of values in `keys`, in the order of `WEIGHT_QUANTIZATIONS`."""
    newest = {tuple(record[key] for key in keys): record for record in current_records(path)}
    order = list(WEIGHT_QUANTIZATIONS)
    return sorted(newest.values(), key=lambda record: order.index(record["weights"]))


def _kl(record: dict[str, Any]) -> str:
    return "0" if record["kl"] < 1e-5 else f"{record['kl']:.5f}" if record["kl"] < 1e-3 else f"{record['kl']:.4f}"


def weights_accuracy_table(path: Path = WEIGHTS_ACCURACY) -> str:
    """KL relative to 16-bit weights with the full-precision cache: a row for each kind of weights, a column for each
    cache."""
    records = _newest(path, "weights", "preset")
    presets = list(dict.fromkeys(record["preset"] for record in records))
    cells = {(record["weights"], record["preset"]): record for record in records}
    rows = []
    for weights in dict.fromkeys(record["weights"] for record in records):
        first = cells[weights, presets[0]]
        shown = [_kl(cells[weights, preset]) if (weights, preset) in cells else "" for preset in presets]
        rows.append([f"`{weights}`", first["meaning"], f"{first['ppl']:.2f}", *shown])
    heads = ["16-bit cache" if preset == "dense" else f"`{preset}`" for preset in presets]
    return markdown_table(["weights", "what", "perplexity, 16-bit cache", *(f"KL, {head}" for head in heads)], rows)


def weights_steps_table(path: Path = WEIGHTS_STEPS) -> str:
    """Milliseconds of a decode step: a row for each kind of weights and shape, a column for each cache."""
    records = _newest(path, "weights", "preset", "batch", "tokens")
    presets = list(dict.fromkeys(record["preset"] for record in records))
    cells = {(record["weights"], record["batch"], record["tokens"], record["preset"]): record for record in records}
    rows = []
    for weights, batch, tokens in dict.fromkeys(key[:3] for key in cells):
        of = {preset: cells.get((weights, batch, tokens, preset)) for preset in presets}
        example = next(record for record in of.values() if record is not None)
        shown = ["" if record is None else f"{record['step_ms']:.1f}" for record in of.values()]
        mode = "" if example["mode"] == "recorded" else ", unfused"
        rows.append([f"`{weights}`{mode}", f"{example['weight_bytes'] / 1e9:.1f}", f"{batch} x {tokens}", *shown])
    heads = ["16-bit cache" if preset == "dense" else f"`{preset}`" for preset in presets]
    return markdown_table(["weights", "GB", "rows x tokens", *(f"{head}, ms" for head in heads)], rows)


#: rows of `hf-lowbit-kv eval protocol --json`, with `model`, `commit` and `date`
PROTOCOLS = RESULTS / "protocols.jsonl"
WIKITEXT = "WikiText-2 perplexity"


class Published(NamedTuple):
    """A figure as its source prints it. full: figure of the 16-bit cache in the same row. It is empty if the source
    compares with something else; then `remark` names it."""

    method: str
    bits: str
    model: str
    measure: str
    full: str
    figure: str
    source: str
    remark: str = ""


def _arxiv(number: str) -> str:
    return f"[arXiv {number}](https://arxiv.org/abs/{number})"


_WUSH, _OSCAR = _arxiv("2609.38121"), _arxiv("2605.17757")
PUBLISHED = (
    Published("WUSH-KV", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "10.51", _WUSH, "sink 16, newest 128"),
    Published("WUSH-KV", "3 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "9.82", _WUSH, "sink 16, newest 128"),
    Published("WUSH-KV", "4 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "9.73", _WUSH, "sink 16, newest 128"),
    Published("OSCAR", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "13.74", _WUSH, "measured by WUSH-KV"),
    Published("random rotation", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "14.22", _WUSH, "measured by WUSH-KV"),
    Published("Hadamard", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "258", _WUSH, "measured by WUSH-KV"),
    Published("OSCAR", "2.28", "Qwen/Qwen3-8B", "mean of 5 reasoning tasks", "70.84", "69.42", _OSCAR),
    Published("OSCAR", "2.28", "Qwen/Qwen3-4B", "mean of 5 reasoning tasks", "75.64", "71.86", _OSCAR),
    Published("KIVI", "2.25", "Qwen/Qwen3-8B", "AIME25", "66.0", "52.3", "OSCAR's README"),
    Published("Kitty", "2.39", "Qwen/Qwen3-8B", "AIME25", "66.0", "59.7", "OSCAR's README"),
    Published("OSCAR", "2.38", "Qwen/Qwen3-8B", "AIME25", "66.0", "66.7", "OSCAR's README"),
    Published("KVarN", "keys 4, values 2", "Qwen/Qwen3-4B", "AIME24", "61.1", "60.0", _arxiv("2606.03458")),
    Published("OScaR", "2, groups of 32", "meta-llama/Llama-3.1-8B", "LongBench-E", "41.70", "41.75", _arxiv("2605.19660")),
    Published("CommVQ", "2", "an 8B Llama", "LongBench", "48.05", "47.98", _arxiv("2506.18879"), "trained"),
    Published("CommVQ", "1", "an 8B Llama", "LongBench", "48.05", "44.94", _arxiv("2506.18879"), "trained"),
    Published("AQUA-KV", "2.09", "meta-llama/Llama-3.1-8B", "perplexity", "", "6.14", _arxiv("2501.19392"), "HIGGS: 7.55"),
)  # fmt: skip


def paper_table(path: Path = PROTOCOLS) -> str:
    """The published figures. Those of the protocol `wikitext` are shown with ours."""
    records = current_records(path)
    head = ["method", "bits", "model", "measure", "16 bits", "theirs", "source", "remark", "ours"]
    body = (
        [
            row.method,
            row.bits,
            row.model.split("/")[-1],
            row.measure,
            row.full,
            row.figure,
            row.source,
            row.remark,
            _ours(row, records),
        ]
        for row in PUBLISHED
    )
    return markdown_table(head, body)


def _ours(row: Published, records: list[dict[str, Any]]) -> str:
    """Our figure on the same model by the same protocol; empty if there is no record."""
    if row.measure != WIKITEXT:
        return ""
    same = [
        record
        for record in records
        if (record["model"], record["protocol"], record["residual"]) == (row.model, "wikitext", 128)
        and "wikitext" in record["text"]
    ]
    return ", ".join(f"`{record['preset']}` {record['ppl']:.2f} (16 bits {record['ppl_full']:.2f})" for record in same)


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
            cells = [cell(name, weights, preset, memory * GB) for preset in (FULL, *PRESETS)]
            full_length = shape.config.max_position_embeddings
            yield [f"{name.split('/')[1]} ({full_length // 1024}k)", f"{weights}, {size / GB:.1f}", *cells]


@functools.cache
def fits_table(memory: int) -> str:
    """The longest context, and the most rows, of known models on GPUs with `memory` GB."""
    head = ["model (its context)", "weights, GB", "16-bit cache", *(f"`{preset}`" for preset in PRESETS)]
    return markdown_table(head, _fits_rows(memory))
