"""The project's accuracy table. Each row is compared with its band: `python -m hf_lowbit_kv.eval.accuracy`.

The bands come from an independent simulation (fake quantization, no cache) of the same model and texts. If a figure
lies outside its band, better or worse, the reason must be found before the figure is published. The bands hold for the
defaults: the bundled model in float32, the default texts, 4096 tokens scored from 512. In a checkout rows go to
`perplexity-smollm2.jsonl` in `eval/results/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, default_device, default_texts, load_model
from hf_lowbit_kv.eval.perplexity import run
from hf_lowbit_kv.eval.provenance import (
    append_record,
    default_records,
    device_name,
    provenance,
    run_command,
    wide_console,
)


class Band(NamedTuple):
    """Allowed range of KL (nats), and the least top-1 agreement."""

    kl_min: float
    kl_max: float
    top1_min: float = 0.0

    def holds(self, row: dict[str, Any]) -> bool:
        return self.kl_min <= row["kl"] <= self.kl_max and row["top1"] >= self.top1_min


BANDS = {
    "int8": Band(0.0, 0.0006),
    "int6": Band(0.0, 0.0006),
    "kivi-4-sink": Band(0.0, 0.0022, top1_min=0.97),
    "kv4-sink": Band(0.0, 0.006),
    "k4v2-sink": Band(0.014 * 0.8, 0.014 * 1.2),
    "kivi-2-sink": Band(0.256 * 0.85, 0.256 * 1.15),
    "k2v4-sink": Band(0.22 * 0.85, 0.22 * 1.15),
    "kitty": Band(0.065 * 0.85, 0.065 * 1.15),
    "kitty-pro": Band(0.035 * 0.85, 0.035 * 1.15),
    # these bands are wider: only one of the two texts was simulated
    "kivi-2-hadamard-sink": Band(0.123 * 0.8, 0.123 * 1.2),
    "kitty-pro-variance": Band(0.027 * 0.8, 0.027 * 1.2),
    "kitty-random": Band(0.19 * 0.8, 0.19 * 1.2),
}


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Preset, repeatable [default: all with a band].")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text.")] = 4096,
    start: Annotated[int, typer.Option("--from", help="First position scored.")] = 512,
    chunk: Annotated[int, typer.Option(help="Tokens fed at a time; one page or less is exact decoding.")] = 128,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. Bands hold for float32.")] = "float32",
    backend: Annotated[str | None, typer.Option(help="torch, triton, cuda [default: by device].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines to append to [default: eval/results/ of a checkout, else none].")
    ] = None,
) -> None:
    """Measure presets on the bundled model and texts, compare with the bands, and record the rows."""
    where = torch.device(device) if device else default_device()
    model, tokenizer = load_model(None, getattr(torch, dtype), where)
    texts = default_texts()
    overrides = {"backend": backend} if backend else None
    rows = run(preset or list(BANDS), texts, model, tokenizer, context, start, chunk, overrides=overrides)
    setting = {
        "model": BUNDLED_MODEL,
        "texts": [path.name for path in texts],
        "context": context,
        "start": start,
        "chunk": chunk,
        "dtype": dtype,
        "device": device_name(where),
    }
    if out := out or default_records("perplexity", "smollm2"):
        for row in rows:
            append_record(out, row | setting | provenance(commit))
    bands = BANDS if dtype == "float32" else {}
    wide_console().print(table(rows, bands))
    if any(not bands[row["preset"]].holds(row) for row in rows if row["preset"] in bands):
        raise typer.Exit(1)


def table(rows: list[dict[str, Any]], bands: dict[str, Band] = BANDS) -> Table:
    """A table of the rows and their bands."""
    out = Table("preset", "bits", "ppl", "ppl_full", "KL", "band", "top-1", "")
    for row in rows:
        band = bands.get(row["preset"])
        numbers = (f"{row['bits_per_value']:.2f}", f"{row['ppl']:.2f}", f"{row['ppl_full']:.2f}", f"{row['kl']:.5f}")
        limits = f"{band.kl_min:.4g} to {band.kl_max:.4g}" if band else "none"
        verdict = "" if band is None else ("within" if band.holds(row) else "OUTSIDE")
        out.add_row(row["preset"], *numbers, limits, f"{row['top1']:.3f}", verdict)
    return out


if __name__ == "__main__":
    run_command(main)
