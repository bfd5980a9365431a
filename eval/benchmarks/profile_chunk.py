"""Profiles the reading of a prompt in chunks: `python -m hf_lowbit_kv.eval.benchmarks.profile_chunk`.

A model of the 8B Llama 3.1 shape with few layers reads a random prompt in chunks. The last few forward passes are
profiled. The figures are microseconds of one layer in one pass:

- `wall`: time from the begin of one pass to the begin of the next. The CPU waits for the GPU only after the last pass.
- `unpack`, `attention`, `packing`, `weights`, `other`: the GPU's busy time, by kernel. `idle`: `wall` less all of
  these.
- `step`: CPU time in the attention function, launches included.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.eval.benchmarks.bench_generate import shape_8b
from hf_lowbit_kv.eval.benchmarks.bench_memory import random_model
from hf_lowbit_kv.eval.benchmarks.bench_prompt import STOCK
from hf_lowbit_kv.eval.benchmarks.contenders import low_bit_cache
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, run_command, wide_console

#: kinds of kernels by name; the first matching pattern counts
KINDS = (
    ("unpack", r"^unpack_kernel"),
    ("attention", r"^prompt_kernel|^merge_kernel|^attend|flash|fmha|sdpa|cudnn.*attention"),
    ("packing", r"^append|^pack_kernel|^window_kernel|^counters_kernel|^transform|^project"),
    ("weights", r"gemm|gemv|nvjet|cutlass|splitk|cublas"),
)
COLUMNS = "wall", "unpack", "attention", "packing", "weights", "other", "idle", "step"


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "other")


@torch.no_grad()
def measure(model: Any, name: str, history: int, chunk: int, batch: int, passes: int) -> tuple[dict[str, Any], Counter]:
    """One record, and microseconds of each kernel, for passes of `chunk` tokens after `history` tokens."""
    device, layers = model.device, model.config.num_hidden_layers
    stock = name == STOCK
    model.set_attn_implementation("sdpa" if stock else lb.ATTENTION_NAME)
    ids = torch.randint(1, model.config.vocab_size, (batch, chunk), device=device)
    cache = DynamicCache(config=model.config) if stock else low_bit_cache(name, model)
    spent = 0.0
    step = LowBitLayer.step

    def timed(self, *args):
        nonlocal spent
        begin = time.perf_counter()
        out = step(self, *args)
        spent += time.perf_counter() - begin
        return out

    def read(count: int) -> None:
        for _ in range(count):
            model(ids, **as_argument(cache), use_cache=True, logits_to_keep=1)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    read(history // chunk)
    wait()
    LowBitLayer.step = timed  # type: ignore[method-assign]
    try:
        begin = time.perf_counter()
        read(passes)
        wait()
        wall = time.perf_counter() - begin
    finally:
        LowBitLayer.step = step  # type: ignore[method-assign]
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        read(passes)
        wait()
    recorded: Any = profiler.profiler
    kernels: Counter[str] = Counter()
    for event in recorded.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels[event.name()] += event.duration_ns()
    calls, kinds = passes * layers, Counter[str]()
    for kernel, ns in kernels.items():
        kinds[kind_of(kernel)] += ns
    record = {kind: kinds[kind] / 1e3 / calls for kind in ("unpack", "attention", "packing", "weights", "other")}
    record |= {"wall": wall * 1e6 / calls, "step": spent * 1e6 / calls}
    record["idle"] = record["wall"] - sum(kinds.values()) / 1e3 / calls
    facts = {"cache": name, "history": history, "chunk": chunk, "batch": batch, "layers": layers}
    return facts | record, Counter({kernel: round(ns / 1e3 / calls, 1) for kernel, ns in kernels.items()})


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Preset, or DynamicCache; repeatable.")] = None,
    history: Annotated[int, typer.Option(help="Tokens that are stored before.")] = 16384,
    chunk: Annotated[int, typer.Option(help="Tokens of a forward pass.")] = 512,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    passes: Annotated[int, typer.Option(help="Forward passes that are profiled.")] = 8,
    kernels: Annotated[int, typer.Option(help="So many kernels of each are listed.")] = 6,
    tiny: Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: nothing is kept].")] = None,
) -> None:
    """Print a table, a row for each cache."""
    where, names = torch.device(device), preset or [STOCK, "dense", "kivi-4-sink", "kivi-2"]
    model = random_model(shape_8b(layers, tiny), torch.float32 if where.type == "cpu" else torch.bfloat16, where)
    table = Table("us a layer call", *COLUMNS)
    console = wide_console()
    for name in names:
        record, busy = measure(model, name, history, chunk, batch, passes)
        table.add_row(name, *(f"{record[column]:.0f}" for column in COLUMNS))
        listed = ", ".join(f"{kernel[:60]} {us}" for kernel, us in busy.most_common(kernels))
        console.print(f"{name}: {listed}", markup=False, soft_wrap=True)
        if out is not None:
            append_record(out, record | {"gpu": device_name(where)} | provenance(commit))
    console.print(table)


if __name__ == "__main__":
    run_command(main)
