"""Accuracy of packed caches with quantized weights: `python -m hf_lowbit_kv.eval.quantized_weights`.

torchao and bitsandbytes quantize the weights while transformers loads the model (`weight_quantization`). Every
combination of weights and cache is compared with 16-bit weights and the full-precision cache, so a row shows both
losses together. In a checkout rows go to `weights-accuracy-<model>.jsonl` in `eval/results/`.
`bench_generate weights` in `eval/benchmarks/` measures times.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoTokenizer

from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.eval.local_models import (
    BUNDLED_MODEL,
    bundled_model,
    default_device,
    default_dtype,
    default_texts,
)
from hf_lowbit_kv.eval.perplexity import as_rows, score
from hf_lowbit_kv.eval.provenance import (
    append_record,
    default_records,
    device_name,
    provenance,
    run_command,
    wide_console,
)
from hf_lowbit_kv.eval.weight_quantization import (
    SIXTEEN_BITS,
    WEIGHT_QUANTIZATIONS,
    check_weights,
    load_quantized,
    stored_bytes,
)

#: `dense` keeps keys and values in the model's dtype, so its rows show only the loss from the weights
PRESETS = ("dense", "int8", "kivi-4-sink", "k4v2-sink")


def main(
    weights: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(WEIGHT_QUANTIZATIONS)} [default: all].")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help=f"Repeatable [default: {', '.join(PRESETS)}].")] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder [default: the bundled model].")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text.")] = 2048,
    start: Annotated[int, typer.Option("--from", help="First position scored.")] = 512,
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: the GPU, if there is one].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines to append to [default: eval/results/ of a checkout, else none].")
    ] = None,
) -> None:
    """Measure presets under each kind of weights, and record the rows."""
    names = weights or list(WEIGHT_QUANTIZATIONS)
    for name in names:
        check_weights(name)
    where = torch.device(device) if device else default_device()
    dtype = default_dtype(where)
    source = str(bundled_model()) if model is None else model
    shown = BUNDLED_MODEL if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(source)
    reference = load_quantized(source, SIXTEEN_BITS, where, dtype)
    setting = {
        "model": shown,
        "texts": [path.name for path in default_texts()],
        "context": context,
        "start": start,
        "device": device_name(where),
        "dtype": str(dtype).removeprefix("torch."),
    }
    records = out or default_records("weights-accuracy", "smollm2" if model is None else shown.split("/")[-1])
    rows: list[dict[str, Any]] = []
    for name in names:
        loaded = reference if name == SIXTEEN_BITS else load_quantized(source, name, where, dtype)
        measured = measure(loaded, reference, tokenizer, name, preset or PRESETS, context, start)
        for row in measured:
            if records is not None:
                append_record(records, row | setting | provenance(commit))
        rows += measured
        del loaded
    wide_console().print(table(rows))


def measure(
    model: Any, reference: Any, tokenizer: Any, weights: str, presets: Any, context: int, start: int
) -> list[dict[str, Any]]:
    """One row for each preset with these weights: `weights`, `meaning`, `preset`, `ppl`, `ppl_reference`, `kl` (from
    `reference` with its full-precision cache, nats), `kl_error`, `top1`, `weight_bytes`, `bits_per_value` (at `context` tokens,
    the window in 16 bits; see `sizes`)."""
    factories = {preset: functools.partial(from_preset, preset, model) for preset in presets}
    texts = default_texts()
    measured = score(factories, texts, model, tokenizer, context, start, parallel=True, reference=reference)
    rows = []
    for row in as_rows(measured, factories, model, context, start):
        kept = {key: row[key] for key in ("ppl", "kl", "kl_error", "top1", "bits_per_value")}
        about = {"weights": weights, "meaning": WEIGHT_QUANTIZATIONS[weights].meaning, "preset": row["preset"]}
        rows.append(about | kept | {"ppl_reference": row["ppl_full"], "weight_bytes": stored_bytes(model)})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """A table of the rows."""
    out = Table("weights", "cache", "ppl", "KL", "top-1", "weights MB", "bits of the cache")
    for row in rows:
        numbers = f"{row['ppl']:.2f}", f"{row['kl']:.5f}", f"{row['top1']:.3f}", f"{row['weight_bytes'] / 1e6:.1f}"
        out.add_row(row["weights"], row["preset"], *numbers, f"{row['bits_per_value']:.2f}")
    return out


if __name__ == "__main__":
    run_command(main)
