"""Where the bundled model finds a needle, by preset, depth and length: `python -m hf_lowbit_kv.eval.needle_records`.

Records go to `eval/results/needle-smollm2.jsonl`; the notebook `choose_a_preset` draws the newest ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_lowbit_kv.eval import needle
from hf_lowbit_kv.eval.models import BUNDLED_MODEL, default_device, load_model
from hf_lowbit_kv.eval.results import append_record, device_name, provenance, results_path, run_command

OUT = results_path("needle", "smollm2")
PRESETS = ("k4v2-sink", "eigen-2", "kivi-2-sink", "kivi-2")
LENGTHS, DEPTHS, TRIALS = (512, 1024, 2048), (0.0, 0.25, 0.5, 0.75, 1.0), 1


def main(
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset, repeatable [default: those of the picture].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, torch, triton [default: by device].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Hide needles in an essay, read it through each preset's cache in float32, and record what is found."""
    where = torch.device(device) if device else default_device()
    model, tokenizer = load_model(None, torch.float32, where)
    overrides = {"backend": backend} if backend else None
    setting = {"model": BUNDLED_MODEL, "trials": TRIALS, "dtype": "float32", "device": device_name(where)}
    setting["backend"] = backend or "the default"
    rows = needle.run(preset or PRESETS, model, tokenizer, LENGTHS, DEPTHS, TRIALS, batch_size=20, overrides=overrides)
    for row in rows:
        append_record(out, row | setting | provenance(commit))
    for name in dict.fromkeys(row["preset"] for row in rows):
        found = [row["found"] for row in rows if row["preset"] == name]
        print(f"{name}: {sum(found) / len(found):.0%} found")


if __name__ == "__main__":
    run_command(main)
