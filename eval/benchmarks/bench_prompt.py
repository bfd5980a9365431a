"""Time to read a prompt, by cache and by `prefill_chunk_size`: `python -m hf_lowbit_kv.eval.benchmarks.bench_prompt`.

A model of the 8B Llama 3.1 shape with random weights reads a random prompt and writes one token with `model.generate`.
Caches grow, and contenders are timed one after the other in each round. The stock cache (`DynamicCache`) uses PyTorch's
SDPA. Presets that need a calibration get random parameters.

- `chunk`: `prefill_chunk_size`; `null`: read whole.
- `cost`: seconds, divided by those of the stock cache reading the prompt whole. `cost_same`: seconds, divided by those
  of the stock cache with the same chunks.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.bench_generate import shape_8b
from hf_lowbit_kv.eval.benchmarks.bench_memory import random_model
from hf_lowbit_kv.eval.benchmarks.contenders import low_bit_cache
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)

STOCK = "DynamicCache"


def read_seconds(model: Any, cache: Any, prompt: torch.Tensor, chunk: int | None) -> float:
    """Seconds of `generate` from `prompt` `[B, S]` to its first token, with an empty cache."""
    model.set_attn_implementation(lb.ATTENTION_NAME if isinstance(cache, lb.LowBitCache) else "sdpa")
    _wait(model.device)
    begin = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **as_argument(cache),
        do_sample=False,
        max_new_tokens=1,
        prefill_chunk_size=chunk,
        pad_token_id=0,
    )
    _wait(model.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    model: Any, contenders: list[tuple[str, int | None]], batch: int, tokens: int, backend: str | None, rounds: int
) -> list[dict[str, Any]]:
    """Records without provenance, one for each contender (`DynamicCache` or a preset, chunk). Contenders are timed one
    after the other in each of `rounds` rounds."""
    prompt = torch.randint(0, model.config.vocab_size, (batch, tokens), device=model.device)
    times: dict[tuple[str, int | None], list[float]] = {each: [] for each in contenders}
    used: dict[str, str | None] = {}
    for turn in track(range(-1, rounds), f"{tokens} tokens", transient=True):  # the first round warms up
        for name, chunk in contenders:
            cache = DynamicCache(config=model.config) if name == STOCK else low_bit_cache(name, model, backend=backend)
            seconds = read_seconds(model, cache, prompt, chunk)
            used[name] = cache.packed_layers[0].backend if isinstance(cache, lb.LowBitCache) else None
            if turn >= 0:
                times[name, chunk].append(seconds)
            del cache
            gc.collect()
    medians = {each: statistics.median(samples) for each, samples in times.items()}
    whole = medians.get((STOCK, None))
    return [
        {
            "kind": "model",
            "cache": name,
            "backend": used[name],
            "batch": batch,
            "tokens": tokens,
            "chunk": chunk,
            "seconds": taken,
            "cost": None if whole is None else taken / whole,
            "cost_same": taken / medians[STOCK, chunk] if (STOCK, chunk) in medians else None,
            "rounds": rounds,
        }
        for (name, chunk), taken in medians.items()
    ]


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Preset; repeatable.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of the prompt; repeatable.")] = None,
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at a time; repeatable. Whole prompts too.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    backend: Annotated[str | None, typer.Option(help="Backend of our caches.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    tiny: Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")] = False,
    rounds: Annotated[int, typer.Option(help="Times each is read; the median counts.")] = 3,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/prefill-<device>.jsonl].")] = None,
) -> None:
    """Measure, and append a JSON line for each cache, length and way of reading."""
    where = torch.device(device)
    presets = preset or ["kivi-4"]
    for name in presets:
        lb.get_preset(name)
    model = random_model(shape_8b(layers, tiny), torch.float32 if where.type == "cpu" else torch.bfloat16, where)
    out = out or results_path("prefill", device_name(where))
    chunks: list[int | None] = [None, *(chunk or [2048, 8192])]
    contenders = [(name, each) for name in (STOCK, *presets) for each in chunks]
    table = Table("cache", "backend", "tokens", "chunk", "s", "/ stock, whole", "/ stock, same chunk")
    with torch.no_grad():
        for length in tokens or [32768]:
            for record in measure(model, contenders, batch, length, backend, rounds):
                record |= {"model": "tiny" if tiny else f"llama-8b-shape-{layers}-layers", "gpu": device_name(where)}
                append_record(out, record | provenance(commit))
                costs = (f"{record[key]:.3f}" for key in ("cost", "cost_same"))
                read = "whole" if record["chunk"] is None else str(record["chunk"])
                facts = (record["cache"], record["backend"] or "-", str(length), read, f"{record['seconds']:.3f}")
                table.add_row(*facts, *costs)
    wide_console().print(table)


if __name__ == "__main__":
    run_command(main)
