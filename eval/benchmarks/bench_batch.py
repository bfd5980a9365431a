"""Largest batch and throughput under a memory budget: `python -m hf_lowbit_kv.eval.benchmarks.bench_batch`.

This is Kitty's experiment: a model of the Qwen3 8B shape (random weights), prompts of 100 tokens, 8192 new tokens, 80
GB in total. PyTorch's allocator is limited to this budget. A batch fits if its last steps run. To test this, caches are
filled with random keys and values almost to the end, and `generate` goes on from there. Steps are timed at the start,
in the middle and at the end. Their time grows linearly with the stored tokens. Simpson's rule over the three times
therefore gives the time of the whole run (without reading the prompts).

- `rows`: the largest tried batch that ran to the end. `most`: the largest batch allowed to be tried (`null`: no limit).
- `row_bytes`: bytes of cache for each row at the end. `shared_bytes`: parameters of the cache's layers, shared by all
  rows.
- `throughput`: tokens per second over the whole run.
- `attribution_ms`: time of a step at the end: GPU time by kind of work, and `host`, the rest of the step's time.

`--computed` measures nothing and needs no GPU. It shows the bytes of one row, as a preallocated cache of one layer
allocates them. It also shows how many such rows fit beside weights, parameters and a reserve. Temporary memory of a
step is counted only in the reserve.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from hf_lowbit_kv.eval.benchmarks.bench_generate import Wanted, is_host
from hf_lowbit_kv.eval.benchmarks.bench_memory import random_model
from hf_lowbit_kv.eval.benchmarks.contenders import Contender, low_bit_cache, make
from hf_lowbit_kv.eval.benchmarks.result_files import markdown_table
from hf_lowbit_kv.eval.benchmarks.timing import profile_steps
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)

CONTENDERS = ("DynamicCache/eager", "dense/compiled", "kivi-2-sink/compiled")
#: first guess of the bytes that a run needs beside weights and caches, and the factor from a batch to the next smaller
#: one
RESERVE, SHRINK = 2.5e9, 0.96
#: steps timed at each length
STEPS = 12
console = wide_console()


def qwen3_8b(layers: int = 36, **changes: Any) -> Qwen3Config:
    """A configuration of the shape of Qwen3 8B. `changes` replace single values."""
    shape = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**(shape | changes))


#: changes for a dry run
TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def cache_bytes(wanted: Wanted, model: Any, capacity: int, backend: str | None) -> tuple[int, int]:
    """Bytes of one row of `capacity` tokens in this cache (all layers), and bytes that all rows share."""
    config = model.config
    if wanted.is_host:
        per_token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
        return per_token * capacity * config.num_hidden_layers, 0
    probe = make(wanted.name, wanted.mode, model, 1, capacity, backend)
    probe.fill(capacity - STEPS)
    shared = probe.cache.nbytes.parameters
    return probe.allocated_bytes() - shared, shared


def rows_within(budget: float, weights: int, row: int, shared: int) -> int:
    """The first batch to try: rows that fit into `budget` bytes beside weights, parameters and `RESERVE`."""
    return int((budget - weights - RESERVE - shared) / row)


def run_to_the_end(contender: Contender, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Time steps at the start, in the middle and at the end; profile the end."""
    contender.compile()
    end = prompt + new_tokens - STEPS - 4
    middle = (prompt + end) // 2
    times = {}
    for length in (end, middle, prompt):
        contender.put_away()
        contender.fill(length)
        contender.put_away()
        times[length] = statistics.median(contender.steps_ms(STEPS))
    contender.fill(end)
    contender.put_away()
    profile = profile_steps(contender, 4) if contender.model.device.type == "cuda" else {"device_ms": {"total": 0.0}}
    busy = dict(profile["device_ms"])
    total = busy.pop("total")
    attribution = {**busy, "host": max(times[end] - total, 0.0)}
    mean_ms = (times[prompt] + 4 * times[middle] + times[end]) / 6
    return {
        "step_ms": {str(length): ms for length, ms in sorted(times.items())},
        "throughput": contender.batch / mean_ms * 1e3,
        "attribution_ms": {kind: round(ms, 3) for kind, ms in attribution.items()},
    }


def largest(
    wanted: Wanted, model: Any, prompt: int, new_tokens: int, budget: float, backend: str | None, most: int | None
) -> dict[str, Any]:
    """The largest batch that runs to the end within `budget` bytes, and its times."""
    weights = sum(p.nbytes for p in model.parameters())
    each, shared = cache_bytes(wanted, model, prompt + new_tokens, backend)
    rows = rows_within(budget, weights, each, shared)
    rows = max(min(rows, most or rows), 1)
    tried = []
    while rows:
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(model.device)
        contender = make(wanted.name, wanted.mode, model, rows, prompt + new_tokens, backend)
        tried.append(rows)
        best = None
        try:
            best = run_to_the_end(contender, prompt, new_tokens)
        except torch.cuda.OutOfMemoryError as error:
            console.print(f"{contender.label}: {rows} rows do not fit: {str(error).splitlines()[0]}", markup=False)
        if best is not None:
            peak = torch.cuda.max_memory_reserved(model.device) if model.device.type == "cuda" else None
            facts = {
                "rows": rows,
                "rows_tried": tried,
                "row_bytes": each,
                "shared_bytes": shared,
                "weight_bytes": weights,
                "peak_reserved": peak,
            }
            used = contender.cache.packed_layers[0].backend if contender.ours else None
            return {"cache": wanted.name, "mode": wanted.mode, "backend": used, **facts, **best}
        del contender
        rows = int(rows * SHRINK)
    raise RuntimeError(f"{wanted.name}: not even one row fits")


# ---- computed rows --------------------------------------------------------------------------------------------------

PROMPT, NEW_TOKENS, BUDGET, LAYERS = 100, 8192, 80e9, 36
DTYPE = torch.bfloat16
#: the caches that `--computed` shows
CACHES = (
    "DynamicCache",
    "kivi-2-sink",
    "kitty-pro",
    "eigen-3",
    "eigen-2",
    "eigen-2,sink=4",
    "eigen-2,sink=4,residual=32",
)


class Room(NamedTuple):
    """Bytes of a row of all layers, bytes that all rows share, and the rows that fit."""

    cache: str
    row: int
    shared: int
    rows: int


def room(cache: str, tokens: int = PROMPT + NEW_TOKENS, budget: float = BUDGET) -> Room:
    """Sizes of the cache with this name in `bench_batch`. Raises `ValueError` for an unknown name."""
    config: Any = qwen3_8b(1)
    heads, head_dim = config.num_key_value_heads, config.head_dim
    if is_host(cache):
        row, shared = 2 * heads * head_dim * DTYPE.itemsize * tokens, 0
    else:
        (layer,) = low_bit_cache(cache, config, max_cache_len=tokens).packed_layers
        layer.lazy_initialization(*(torch.zeros(1, heads, 1, head_dim, dtype=DTYPE) for _ in "kv"))
        parts = layer.store.nbytes()
        shared = parts["parameters"]
        row = sum(parts.values()) - shared
    row, shared = LAYERS * row, LAYERS * shared
    return Room(cache, row, shared, rows_within(budget, all_weight_bytes(), row, shared))


@functools.cache
def all_weight_bytes() -> int:
    """Bytes of all weights of the model. (`bench_generate.weight_bytes` counts only weights that a step reads.)"""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_8b(LAYERS), dtype=DTYPE)
    return sum(parameter.nbytes for parameter in model.parameters())


def rows_table(caches: Sequence[str] = CACHES) -> str:
    """A Markdown table. Ratios are relative to the first cache."""
    rooms = [room(cache) for cache in caches]
    lines = ([f"`{x.cache}`", f"{x.row / 1e6:.0f}", str(x.rows), f"{x.rows / rooms[0].rows:.1f}x"] for x in rooms)
    return markdown_table(("cache", "MB per row", "rows", "ratio"), lines)


def show_room() -> None:
    """Print the rows that fit, and the bytes of a row."""
    table = Table("cache", "MB per row", "shared MB", "rows", "ratio")
    first = room(CACHES[0])
    for each in map(room, CACHES):
        sizes = f"{each.row / 1e6:.1f}", f"{each.shared / 1e6:.1f}", str(each.rows), f"{each.rows / first.rows:.2f}"
        table.add_row(each.cache, *sizes)
    wide_console().print(table)


def main(
    contender: Annotated[
        list[str] | None, typer.Option(help="NAME[,sink=N][,residual=N][:BACKEND]/MODE; repeatable.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens written.")] = 8192,
    budget: Annotated[float, typer.Option(help="Bytes in all.")] = 80e9,
    backend: Annotated[str | None, typer.Option(help="Backend of our caches where none is named.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 36,
    most: Annotated[int | None, typer.Option(help="Rows to try at most.")] = None,
    computed: Annotated[bool, typer.Option(help="Only compute the rows that fit, of usual caches.")] = False,
    tiny: Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/batch-<device>.jsonl].")] = None,
) -> None:
    """Measure, and append a JSON line for each contender."""
    if computed:
        show_room()
        return
    contenders = [Wanted.parse(text) for text in contender or CONTENDERS]
    if limited := [each for each in contenders if each.longest is not None]:
        raise typer.BadParameter(f"contender={limited[0].name!r} with @{limited[0].longest}: there is one length here")
    where = torch.device(device)
    config = qwen3_8b(2, vocab_size=97, **TINY) if tiny else qwen3_8b(layers)
    if where.type == "cuda":
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0), where.index or 0)
    model = random_model(config, torch.float32 if where.type == "cpu" else torch.bfloat16, where)
    out = out or results_path("batch", device_name(where))
    records = []
    for wanted in contenders:
        record = largest(wanted, model, prompt, new_tokens, budget, wanted.backend or backend, most)
        record = {"prompt": prompt, "new_tokens": new_tokens, "budget": budget, "most": most} | record
        record |= {"gpu": device_name(where)}
        record |= {"model": "tiny" if tiny else f"qwen3-8b-shape-{layers}-layers"} | provenance(commit)
        append_record(out, record)
        records.append(record)
        gc.collect()
    console.print(table(records))


def table(records: list[dict[str, Any]]) -> Table:
    """A short table of the records. Ratios are relative to the first record."""
    out = Table("cache", "rows", "ratio", "GB per row", "tokens/s", "ratio", "step at the end, ms", "of it")
    first = records[0]
    for r in records:
        end = r["step_ms"][max(r["step_ms"], key=int)]
        parts = ", ".join(f"{kind} {ms:.1f}" for kind, ms in r["attribution_ms"].items())
        rates = (f"{r['rows'] / first['rows']:.2f}", f"{r['row_bytes'] / 1e9:.3f}", f"{r['throughput']:.0f}")
        speedup = f"{r['throughput'] / first['throughput']:.2f}"
        out.add_row(f"{r['cache']}/{r['mode']}", str(r["rows"]), *rates, speedup, f"{end:.1f}", parts)
    return out


if __name__ == "__main__":
    run_command(main)
