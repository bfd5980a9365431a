"""Compares the memory that `hf-lowbit-kv fits` counts with a GPU's:
`python -m hf_lowbit_kv.eval.benchmarks.bench_fits`.

A model of the named shape with random weights reads a prompt in chunks of 2048 tokens and writes tokens in recorded
steps. The record compares what `fits` counts with two measurements. One is the GPU memory in use at the end (total
less free: memory reserved by PyTorch, CUDA's own memory and the graphs). The other is PyTorch's peak.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import cache_in
from hf_lowbit_kv.eval.benchmarks.bench_memory import random_model
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command, wide_console
from hf_lowbit_kv.planning.cache_memory import CHUNK
from hf_lowbit_kv.planning.fits import GB
from hf_lowbit_kv.planning.model_shapes import shape_of


@torch.no_grad()
def measure(name: str, preset: str, context: int, new_tokens: int, device: torch.device) -> dict[str, Any]:
    """One `lb.generate` that fills a cache of `context` tokens.

    Returns:
        A record without provenance, in bytes: `counted` and its parts, `peak` (PyTorch's peak of requested tensors),
        `in_use` (GPU memory in use, less that before the call), `nbytes` (of the cache).
    """
    free_before = torch.cuda.mem_get_info(device)[1]  # the first call makes CUDA's context, which is counted
    model = random_model(shape_of(name).config, torch.bfloat16, device)
    fit = lb.fits(model, context, torch.cuda.get_device_properties(device).total_memory, presets=[preset])[1]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    prompt = torch.randint(0, model.config.vocab_size, (1, context - new_tokens), device=device)
    out = lb.generate(
        model,
        input_ids=prompt,
        preset=preset,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        prefill_chunk_size=CHUNK,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    cache = cache_in(out)
    return {
        "model": name,
        "preset": preset,
        "context": context,
        "counted": fit.total,
        "weights": fit.weights,
        "cache": fit.cache,
        "chunk": fit.chunk,
        "cuda": fit.cuda,
        "peak": torch.cuda.memory_stats(device)["requested_bytes.all.peak"],
        "in_use": free_before - torch.cuda.mem_get_info(device)[0],
        "nbytes": int(cache.nbytes),
    }


def main(
    model: Annotated[str, typer.Option(help="A known name, a folder or a hub name.")] = "Qwen/Qwen3-8B",
    preset: Annotated[str, typer.Option(help="Preset.")] = "kivi-4-sink",
    context: Annotated[int, typer.Option(help="Tokens of the row.")] = 65536,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 32,
    device: Annotated[str, typer.Option(help="A GPU.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/fits-<device>.jsonl].")] = None,
) -> None:
    """Measure, append a JSON line, and compare."""
    where = torch.device(device)
    record = measure(model, preset, context, new_tokens, where)
    record["relative"] = record["in_use"] / record["counted"] - 1
    append_record(
        out or results_path("fits", device_name(where)), record | {"gpu": device_name(where)} | provenance(commit)
    )
    table = Table("GB", "value")
    for key in ("weights", "cache", "nbytes", "chunk", "cuda", "counted", "peak", "in_use"):
        table.add_row(key, f"{record[key] / GB:.3f}")
    table.add_row("in use over counted", f"{record['relative']:+.1%}")
    wide_console().print(table)


if __name__ == "__main__":
    run_command(main)
