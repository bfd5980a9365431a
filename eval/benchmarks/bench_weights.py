"""Decode steps with quantized weights: `python -m hf_lowbit_kv.eval.benchmarks.bench_weights`.

transformers quantizes the random weights of a model of the 8B Llama 3.1 shape while it loads them. The model decodes
with caches that are filled with random keys and values. `lb.generate` records its steps if it can. `decoding_steps`
says whether it did, or why not. Steps are timed only after the recorded logits agree with the eager logits of the same
cache (`agreement`).

Fields: `weights`, `meaning`, `preset`, `batch`, `tokens`, `step_ms` (median time of a step of `generate`),
`decoding_steps`, `weight_bytes` (all parameters as stored, embedding and head included), `cache_bytes` (stored tokens),
`allocated_bytes` (of the whole process, with both), `logits_error`, `tokens_equal`.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.eval.benchmarks.bench_generate import DisagreementError, agreement, shape_8b
from hf_lowbit_kv.eval.benchmarks.bench_memory import random_model
from hf_lowbit_kv.eval.benchmarks.contenders import HEADROOM, make
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.eval.weight_quantization import WEIGHT_QUANTIZATIONS, check_weights, load_quantized, stored_bytes

PRESETS = ("dense", "int8", "kivi-4-sink")
#: rows and tokens of the caches
SHAPES = ((1, 32768), (8, 32768))
STEPS, ROUNDS = 16, 2


def measure(model: Any, weights: str, preset: str, batch: int, tokens: int, mode: str = "recorded") -> dict[str, Any]:
    """A record without provenance. mode: `recorded`, or `unfused`: only the model's own operations.

    Raises:
        DisagreementError: recorded steps and eager steps give different results.
    """
    contender = make(preset, mode, model, batch, tokens + HEADROOM)
    contender.compile()
    contender.fill(tokens)
    checked = agreement(contender)
    samples = [ms for _ in range(ROUNDS) for ms in contender.steps_ms(STEPS)]
    cuda = model.device.type == "cuda"
    return {
        "weights": weights,
        "meaning": WEIGHT_QUANTIZATIONS[weights].meaning,
        "preset": preset,
        "mode": mode,
        "batch": batch,
        "tokens": tokens,
        "step_ms": statistics.median(samples),
        "decoding_steps": contender.cache.decoding_steps,
        "weight_bytes": stored_bytes(model),
        "cache_bytes": contender.cache_bytes(),
        "allocated_bytes": torch.cuda.memory_allocated(model.device) if cuda else None,
        **checked,
    }


def main(
    weights: Annotated[list[str] | None, typer.Option(help="Weights; repeatable [default: all].")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset; repeatable [default: dense, int8, kivi-4-sink].")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="ROWSxTOKENS; repeatable [default: 1x32768, 8x32768].")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="recorded, or unfused: activations in 8 bits differ much for a last bit.")
    ] = "recorded",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    tiny: Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")] = False,
    seconds: Annotated[float, typer.Option(help="Begin nothing after so many seconds; 0: no limit.")] = 0.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines [default: eval/results/weights-steps-<device>.jsonl].")
    ] = None,
) -> None:
    """Check and time presets under each kind of weights, and append a JSON line for each."""
    began = time.monotonic()
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    names = weights or list(WEIGHT_QUANTIZATIONS)
    for name in names:
        check_weights(name)
    shapes = [tuple(int(part) for part in each.split("x")) for each in shape] if shape else list(SHAPES)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config = shape_8b(layers, tiny)
    state = random_model(config, dtype, where).state_dict()
    out = out or results_path("weights-steps", device_name(where))
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for name in names:
        if late(began, seconds):
            faults.append(f"{name}: no time left")
            continue
        try:
            model = load_quantized(config, name, where, dtype, state)
        except Exception as error:
            traceback.print_exc()
            faults.append(f"{name}: {type(error).__name__}: {error}")
            continue
        model.generation_config.eos_token_id = None
        for batch, tokens in shapes:
            for each in preset or PRESETS:
                if late(began, seconds):
                    faults.append(f"{name} {each} {batch}x{tokens}: no time left")
                    continue
                try:
                    record = measure(model, name, each, batch, tokens, mode)
                except (DisagreementError, RuntimeError, ValueError, NotImplementedError) as error:
                    traceback.print_exc()
                    faults.append(f"{name} {each} {batch}x{tokens}: {type(error).__name__}: {error}"[:300])
                    continue
                shown = {"gpu": device_name(where), "model": "tiny" if tiny else f"llama-8b-shape-{layers}-layers"}
                record |= shown | {"dtype": str(dtype).removeprefix("torch.")} | provenance(commit)
                append_record(out, record)
                rows.append(record)
                gc.collect()
        del model
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    console = wide_console()
    console.print(table(rows))
    for fault in faults:
        console.print(f"FAILED, not recorded: {fault}", markup=False)
    if faults:
        raise typer.Exit(1)


def late(began: float, seconds: float) -> bool:
    """Whether it is too late to begin another measurement."""
    return seconds > 0 and time.monotonic() - began > seconds


def table(rows: list[dict[str, Any]]) -> Table:
    """A short table of the records."""
    out = Table("weights", "cache", "shape", "step ms", "weights GB", "cache GB", "error", "steps")
    for row in rows:
        out.add_row(
            row["weights"],
            row["preset"],
            f"{row['batch']}x{row['tokens']}",
            f"{row['step_ms']:.2f}",
            f"{row['weight_bytes'] / 1e9:.2f}",
            f"{row['cache_bytes'] / 1e9:.2f}",
            f"{row['logits_error']:.3f}",
            (row["decoding_steps"] or "eager: no graphs on this device")[:60],
        )
    return out


if __name__ == "__main__":
    run_command(main)
