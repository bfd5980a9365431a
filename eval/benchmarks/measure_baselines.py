"""Records of WUSH-KV and OSCAR, for comparison with presets:
`python -m hf_lowbit_kv.eval.benchmarks.measure_baselines`.

Model, texts and setting are those of `measure`. The calibration uses the texts of the bundled calibration of `eigen-*`,
and as many windows. The methods are our own implementations of the papers (`baselines.py`). Records go to
`eval/results/baselines-smollm2.jsonl`. If there are several records for a baseline and text, the newest counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_lowbit_kv.calibration.steps_shown import LogLines
from hf_lowbit_kv.eval.benchmarks.baselines import BASELINES, bits_of_page, calibrated, check_names
from hf_lowbit_kv.eval.benchmarks.measure import CHUNK, CONTEXT, START, TEXTS, setting
from hf_lowbit_kv.eval.bootstrap import block_means
from hf_lowbit_kv.eval.cache_sizes import sizes
from hf_lowbit_kv.eval.local_models import load_model, varied_texts
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command
from hf_lowbit_kv.eval.texts import read_text

OUT = results_path("baselines", "smollm2")


def main(
    baseline: Annotated[list[str] | None, typer.Option(help="Repeatable [default: all].")] = None,
    text: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TEXTS)} [default: all].")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; float32 on both.")] = "cpu",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Calibrate the baselines, and measure each on every text."""
    names = check_names(baseline or list(BASELINES))
    if unknown := [name for name in text or [] if name not in TEXTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not known; allowed: {', '.join(TEXTS)}", param_hint="--text")
    console = Console(stderr=True)
    model, tokenizer = load_model(None, torch.float32, device)
    calibration = [read_text(path).content for path in varied_texts()]
    factories = calibrated(model, tokenizer, calibration, names, progress=LogLines())
    sizes_of = sizes(factories, model, CONTEXT)
    common = setting() | {"device": device_name(model.device), "backend": "torch"} | provenance(commit)
    for each in text or TEXTS:
        measured = score(
            factories, [TEXTS[each]()], model, tokenizer, CONTEXT, START, CHUNK, progress=False, parallel=True
        )
        for name, (scores,) in measured.items():
            row = {"bits_per_value": sizes_of[name].bits} | mean_row([scores], position_edges(START, CONTEXT))
            subject = {"baseline": name, "text": each, "bits_of_page": bits_of_page(factories[name]())}
            append_record(out, subject | row | {"kl_blocks": block_means(scores["kl"]).tolist()} | common)
            console.print(f"{each}: {name}, KL {row['kl']:.5f}")


if __name__ == "__main__":
    run_command(main)
