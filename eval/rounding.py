"""How far rounding alone moves log-likelihoods: `python -m hf_lowbit_kv.eval.rounding`.

The same answers are scored by lm-eval's own model (one pass over each text, no cache), by the full-precision cache in chunks,
and by the preset `dense`, in float32 with several batch sizes. Everything is compared with the full-precision cache in
float64. A test shows on a small model that this agrees with lm-eval's own model in float64 to 1e-9, so what is left is
rounding. Records, with all log-likelihoods, go to `eval/results/rounding-smollm2.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.table import Table

from hf_lowbit_kv.eval import offline_tasks
from hf_lowbit_kv.eval.lm_eval_model import LowBitLM
from hf_lowbit_kv.eval.lm_eval_run import quiet
from hf_lowbit_kv.eval.models import BUNDLED_MODEL, bundled_model, default_device
from hf_lowbit_kv.eval.reading import FULL
from hf_lowbit_kv.eval.results import append_record, device_name, provenance, results_path, run_command, wide_console

OUT = results_path("rounding", "smollm2")
#: lm-eval's own model in the column of caches
NO_CACHE = "none"


class Run(NamedTuple):
    """One way of scoring. cache: a preset, `FULL`, or `NO_CACHE`."""

    cache: str
    dtype: str
    batch_size: int


#: the first is what all are compared with
RUNS = (
    Run(FULL, "float64", 8),
    Run("dense", "float64", 8),
    *(Run(cache, "float32", batch) for cache in (FULL, "dense") for batch in (1, 8)),
    Run(NO_CACHE, "float32", 1),
)


def main(
    items: Annotated[int, typer.Option(min=1, max=50, help="HellaSwag items; each has four answers.")] = 6,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Score HellaSwag answers in several ways on the bundled model, and record how far they differ."""
    quiet()
    where = torch.device(device) if device else default_device()
    setting = {"model": BUNDLED_MODEL, "items": items, "threads": torch.get_num_threads(), "device": device_name(where)}
    requests, exact, rows = answers(items), list[float](), []
    for run in RUNS:
        found = logprobs(run, requests, str(where))
        exact = exact or found
        off = differences(found, exact)
        rows.append((run, off))
        append_record(out, run._asdict() | off | {"logprobs": found} | setting | provenance(commit))
    wide_console().print(table(rows))


def answers(items: int) -> list[Instance]:
    """The answers of the task `hellaswag_100`'s first items, four of each."""
    rows = offline_tasks.hellaswag()["test"].select(range(items))
    return [
        Instance("loglikelihood", {}, (row["query"], f" {choice}"), index, metadata=("hellaswag_100", index, 1))
        for index, row in enumerate(rows)
        for choice in row["choices"]
    ]


def logprobs(run: Run, requests: list[Instance], device: str) -> list[float]:
    """Log-likelihood of each answer, nats."""
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, run.dtype), "batch_size": run.batch_size}
    lm = HFLM(str(bundled_model()), **options) if run.cache == NO_CACHE else LowBitLM(preset=run.cache, **options)
    return [answer[0] for answer in lm.loglikelihood(requests)]


def differences(found: list[float], exact: list[float]) -> dict[str, float]:
    """`mean` and `max` of how far two lists differ, nats."""
    off = [abs(a - b) for a, b in zip(found, exact, strict=True)]
    return {"mean": sum(off) / len(off), "max": max(off)}


def table(rows: list[tuple[Run, dict[str, float]]]) -> Table:
    """How far each run is from the first one."""
    out = Table("cache", "dtype", "batch", "mean difference, nats", "largest")
    for run, off in rows:
        out.add_row(run.cache, run.dtype, str(run.batch_size), f"{off['mean']:.1e}", f"{off['max']:.1e}")
    return out


if __name__ == "__main__":
    run_command(main)
