"""How long a user waits for the first tokens in a fresh process: `python -m hf_lowbit_kv.eval.benchmarks.bench_start`.

A model of the 8B Llama 3.1 shape with random weights continues a random prompt. Each way to run the steps is measured
in its own processes. The first one has empty folders for compiled kernels (`cold`). The next one finds the kernels that
the first one kept.

- `import_s`: from the start of the process until torch, transformers and this package are imported.
- `first_token_s`, `tenth_token_s`: from the call of `lb.generate`, with loaded weights, until the GPU has its logits.
- `step_ms`: median of later steps, by the GPU's clock.
- `limit_ms`: weights and stored bytes, read once at the bandwidth measured in the same process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import NAME
from hf_lowbit_kv.eval.benchmarks.random_models import StepClock, llama_8b, random_model, wait, weight_bytes
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Out, Rows, Run, Tiny
from hf_lowbit_kv.eval.benchmarks.timing import read_bandwidth
from hf_lowbit_kv.eval.provenance import run_command

#: environment variables for folders of compiled kernels
FOLDERS = ("HF_LOWBIT_KV_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
NEW_TOKENS = 48
_MARK = "bench_start: "


def measure(
    started: float, step_kind: str, preset: str, tokens: int, batch: int, device: str, tiny: bool
) -> dict[str, Any]:
    """Measure one call of `lb.generate` in this process. started: start of the process, seconds since the epoch."""
    import_s = time.time() - started
    where = torch.device(device)
    model = random_model(llama_8b(32, tiny), torch.bfloat16 if where.type == "cuda" else torch.float32, where)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=where)
    clock: Any = StepClock(where)
    wait(where)
    clock(None, None)
    out = lb.generate(
        *(model, ids, preset, NEW_TOKENS),
        step=step_kind,  # type: ignore[arg-type]
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        logits_processor=[clock],
    )
    times = clock.steps_ms(skip=0)  # the first is until the first token
    nbytes = out[NAME].nbytes
    moved = weight_bytes(model) + nbytes.codes + nbytes.metadata + nbytes.window
    return {
        "how": step_kind,
        "preset": preset,
        "batch": batch,
        "tokens": tokens,
        "import_s": import_s,
        "first_token_s": times[0] / 1e3,
        "tenth_token_s": sum(times[:10]) / 1e3,
        "step_ms": statistics.median(times[13:]),
        "limit_ms": moved / read_bandwidth(where) * 1e3,
        "model": "tiny" if tiny else "llama-8b-shape-32-layers",
    }


def in_a_fresh_process(folders: Path, arguments: list[str]) -> dict[str, Any]:
    """The record of a new process, which keeps compiled kernels only below `folders`."""
    cache_folders = {name: str(folders / name.lower()) for name in FOLDERS}
    for path in cache_folders.values():
        Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
    module = "hf_lowbit_kv.eval.benchmarks.bench_start"
    command = [sys.executable, "-m", module, "--child", str(time.time()), *arguments]
    done = subprocess.run(command, env={**os.environ, **cache_folders}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(lines[0].removeprefix(_MARK))


def main(
    step_kinds: Annotated[
        list[str] | None, typer.Option("--how", help="recorded, compiled or eager; repeatable [recorded].")
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset.")] = "kivi-2",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1000,
    batch: Rows = 1,
    device: Device = "cuda",
    tiny: Tiny = False,
    child: Annotated[float | None, typer.Option(hidden=True, help="When the process was started.")] = None,
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, print a table, and append a JSON line for each process."""
    ways = step_kinds or ["recorded"]
    if child is not None:
        print(_MARK + json.dumps(measure(child, ways[0], preset, tokens, batch, device, tiny)), flush=True)
        return
    run = Run("start", device, commit, out)
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            for cold in (True, False):
                arguments = ["--how", way, "--preset", preset, "--tokens", str(tokens), "--batch", str(batch)]
                arguments += ["--device", device, *(["--tiny"] if tiny else [])]
                run.add({**in_a_fresh_process(Path(folder), arguments), "cold": cold})
    run.end("how", "cold", "import_s:.2f", "first_token_s:.2f", "tenth_token_s:.2f", "step_ms:.2f", "limit_ms:.2f")


if __name__ == "__main__":
    run_command(main)
