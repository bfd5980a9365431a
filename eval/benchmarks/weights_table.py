"""Tables of docs/quantized-weights.md, from the records: accuracy and decode steps of caches with weights below 16
bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.eval.weight_quantization import WEIGHT_QUANTIZATIONS

ACCURACY = RESULTS / "weights-accuracy-smollm2.jsonl"
STEPS = RESULTS / "weights-steps-nvidia-h200.jsonl"


def _newest(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The last record of each combination of values in `keys`, in the order of `WEIGHT_QUANTIZATIONS`."""
    newest = {tuple(record[key] for key in keys): record for record in current_records(path)}
    order = list(WEIGHT_QUANTIZATIONS)
    return sorted(newest.values(), key=lambda record: order.index(record["weights"]))


def _kl(record: dict[str, Any]) -> str:
    return "0" if record["kl"] < 1e-5 else f"{record['kl']:.5f}" if record["kl"] < 1e-3 else f"{record['kl']:.4f}"


def accuracy_table(path: Path = ACCURACY) -> str:
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


def steps_table(path: Path = STEPS) -> str:
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
