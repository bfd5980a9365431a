"""The bundled model on the offline tasks, by preset: `python -m hf_lowbit_kv.eval.lm_eval_records`.

The same as `hf-lowbit-kv eval lm-eval`, and the rows go to `eval/results/lm-eval-smollm2.jsonl`. `docs/lm-eval.md` shows them.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_lowbit_kv.eval.lm_eval_model import LowBitLM
from hf_lowbit_kv.eval.lm_eval_run import comparison, evaluate, quiet
from hf_lowbit_kv.eval.models import BUNDLED_MODEL, default_device
from hf_lowbit_kv.eval.offline_tasks import OFFLINE_TASKS
from hf_lowbit_kv.eval.reading import FULL
from hf_lowbit_kv.eval.results import append_record, device_name, provenance, results_path, run_command

OUT = results_path("lm-eval", "smollm2")
PRESETS = ("kivi-2", "kitty-pro")


def main(
    task: Annotated[list[str] | None, typer.Option(help="Task, repeatable [default: the offline ones].")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help=f"Preset, repeatable [default: {', '.join(PRESETS)}].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows read at a time; changes no result.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task, at most.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Evaluate full precision and presets on tasks, and record the rows."""
    quiet()
    where = torch.device(device) if device else default_device()
    lm = LowBitLM(batch_size=batch_size, device=str(where), dtype=getattr(torch, dtype))
    setting = {"model": BUNDLED_MODEL, "dtype": dtype, "device": device_name(where)}
    setting["lm_eval"] = metadata.version("lm_eval")
    options = [] if limit is None else ["--limit", str(limit)]
    for name in (FULL, *(preset or PRESETS)):  # what is measured is kept, whatever becomes of the next preset
        rows = evaluate(lm, [name], task or OFFLINE_TASKS, options)
        for row in rows:
            append_record(out, row | setting | provenance(commit))
        for line in comparison(rows):
            print(f"{line['task']}, {line['metric']}, {name}: {line[name]}")


if __name__ == "__main__":
    run_command(main)
