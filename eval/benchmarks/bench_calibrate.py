"""Seconds that calibration takes on a large model: `python -m hf_lowbit_kv.eval.benchmarks.bench_calibrate`.

A model of the 8B Llama 3.1 shape with random weights reads random tokens, in the usual number of windows. The other
work of `hf-lowbit-kv calibrate` (loading a model, tokenizing, writing a file) is not counted. Records go to
`calibrate-<gpu>.jsonl` in `eval/results/`. `--memory 24GB` limits PyTorch's memory to that of such a GPU, less 1 GB for
CUDA. A calibration that does not fit fails, and the failure is printed.
"""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.byte_sizes import parse_size
from hf_lowbit_kv.eval.benchmarks.random_models import PeakMemory, limit_memory, random_8b, wait
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Layers, Out, PresetNames, Run, Tiny
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.planning.fits import CUDA_BYTES

#: number of texts, and tokens of each: more than a calibration reads
TEXTS, TOKENS = 8, 32768


class RandomTokens:
    """Replaces a tokenizer: returns `TOKENS` random ids for any text."""

    def __init__(self, vocabulary: int):
        self.vocabulary, self.random = vocabulary, torch.Generator().manual_seed(0)

    def __call__(self, text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=torch.randint(0, self.vocabulary, (1, TOKENS), generator=self.random))


def measure(model: Any, preset: str, **options: Any) -> dict[str, Any]:
    """A record without provenance: `seconds` in total, `parts` of them (`reading`, `gradients`, `fitting`), `samples`
    windows of `length` tokens, and `growth`, the most bytes allocated beyond the model.

    Args:
        **options: further arguments of `calibrate`.
    """
    began = time.perf_counter()
    ends: dict[str, float] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if done == total:
            wait(model.device)
            ends[stage] = time.perf_counter() - began

    with PeakMemory(model.device) as peak:
        tokenizer = RandomTokens(model.config.vocab_size)
        calibration = lb.calibrate(model, tokenizer, ["text"] * TEXTS, preset, progress=progress, **options)
    parts, last = {}, 0.0
    for stage, end in ends.items():
        parts[stage], last = end - last, end
    return {
        "preset": preset,
        "seconds": time.perf_counter() - began,
        "parts": parts,
        "samples": calibration.source[0]["samples"],
        "length": calibration.source[0]["length"],
        "gradients": calibration.source[0]["gradients"],
        "offload": bool(options.get("offload")),
        "growth": peak.growth,
    }


def main(
    preset: PresetNames = None,
    layers: Layers = 32,
    samples: Annotated[int | None, typer.Option(help="Windows to read [default: as calibrate].")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window [default: as calibrate].")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="As `calibrate --offload`.")] = False,
    memory: Annotated[str | None, typer.Option(help="Of a smaller GPU, e.g. 24GB [default: all there is].")] = None,
    tiny: Tiny = False,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Time the calibration of each preset, and append a JSON line for each."""
    run = Run("calibrate", device, commit, out, memory=memory)
    if memory is not None:
        limit_memory(run.device, parse_size(memory) - CUDA_BYTES)
    model = random_8b(run, layers, tiny)
    for name in preset or ["vecinfer-2", "eigen-2"]:
        timed = functools.partial(measure, model, name, samples=samples, length=length, offload=offload)
        if (record := run.attempt(name, timed)) is not None:
            run.add(record)
    run.end("preset", "offload", "seconds:.1f", "parts", "samples", "length", "growth:GB")


if __name__ == "__main__":
    run_command(main)
