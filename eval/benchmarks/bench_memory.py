"""GPU memory: `python -m hf_lowbit_kv.eval.benchmarks.bench_memory`.

`generate`: memory beyond the model. A model of the 8B Llama 3.1 shape with random weights reads a long prompt and
writes a few tokens. The limit for the allocator's peak above the weights is

    the cache's bytes + 10 % + one layer's prompt (its keys and values in the model's dtype)

With every cache, reading a prompt also needs memory for the model's own activations. If the prompt is read whole, the
MLP needs over 20 GB here. So the peak is measured in two ways, and both must be within the limit:

- read in chunks (`prefill_chunk_size`): activations are small, and nothing is subtracted;
- read whole: the peak of the same model, reading the same prompt without a cache, is subtracted.

`fits`: what `hf-lowbit-kv fits` counts, compared with a GPU. A model of the named shape with random weights reads a
prompt in chunks of 2048 tokens and writes tokens in recorded steps. The record compares the count with the GPU memory in
use at the end (total less free: memory reserved by PyTorch, CUDA's own memory and the graphs), and with PyTorch's peak.

`batch`: largest batch and throughput under a memory budget. This is Kitty's experiment: a model of the Qwen3 8B shape
(random weights), prompts of 100 tokens, 8192 new tokens, 80 GB in total. PyTorch's allocator is limited to this budget. A
batch fits if its last steps run. To test this, caches are filled with random keys and values almost to the end, and
`generate` continues from there. Steps are timed at the start, in the middle and at the end. Their time grows linearly with
the stored tokens. Simpson's rule over the three times therefore gives the time of the whole run (without reading the
prompts).

- `rows`: the largest tried batch that ran to the end. `most`: the largest batch allowed to be tried (`null`: no limit).
- `row_bytes`: bytes of cache for each row at the end. `shared_bytes`: parameters of the cache's layers, shared by all
  rows.
- `throughput`: tokens per second over the whole run.
- `attribution_ms`: time of a step at the end: GPU time by kind of work, and `host`, the rest of the step's time.

`--computed` measures nothing and needs no GPU. It shows the bytes of one row, as a preallocated cache allocates them, and
how many such rows fit beside weights, parameters and a reserve. Temporary memory of a step is counted only in the reserve.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.byte_sizes import parse_size
from hf_lowbit_kv.cache.cache_argument import as_argument, cache_in
from hf_lowbit_kv.cache.native_layers import tensors_of
from hf_lowbit_kv.eval.benchmarks.contenders import Contender, Wanted, is_host, low_bit_cache, make
from hf_lowbit_kv.eval.benchmarks.random_models import (
    PeakMemory,
    clean,
    count_weights,
    limit_memory,
    llama_8b,
    profile_steps,
    qwen3_8b,
    random_model,
)
from hf_lowbit_kv.eval.benchmarks.result_files import (
    BackendName,
    Commit,
    Device,
    Layers,
    Out,
    PresetNames,
    Rows,
    Run,
    Tiny,
    listed,
)
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.planning.cache_memory import CHUNK
from hf_lowbit_kv.planning.fits import CUDA_BYTES
from hf_lowbit_kv.planning.model_shapes import shape_of

# ---- generate ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    model: Any, preset: str, batch: int, tokens: int, new_tokens: int, prefill_chunk: int | None, **options
) -> dict[str, Any]:
    """Run `generate` once from a random prompt `[batch, tokens]`, read whole or in chunks.

    Args:
        **options: further arguments of `from_preset`.

    Returns:
        A record without provenance. Bytes: `growth` (peak), `model_growth` (peak without a cache; only for whole
        prompts), `counted` (their difference), `limit`, the cache's `nbytes` and its parts, and `layer_prompt`.
        `within` says whether the limit holds.
    """
    config, device = model.config, model.device
    prompt = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
    model_growth: int | None = 0
    if prefill_chunk is None:
        with PeakMemory(device) as without_cache:
            model(prompt, use_cache=False, logits_to_keep=1)
        model_growth = without_cache.growth
    cache = lb.from_preset(preset, model, **options)
    begin = time.perf_counter()
    with PeakMemory(device) as peak:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **as_argument(cache),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            prefill_chunk_size=prefill_chunk,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    assert out.shape == (batch, tokens + new_tokens)
    nbytes = cache.nbytes
    layer_prompt = 2 * batch * tokens * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    limit = int(1.1 * nbytes) + layer_prompt
    counted = None if peak.growth is None or model_growth is None else peak.growth - model_growth
    return {
        "preset": preset,
        "layers": config.num_hidden_layers,
        "batch": batch,
        "tokens": tokens,
        "new_tokens": new_tokens,
        "prefill_chunk": prefill_chunk,
        "dtype": str(model.dtype).removeprefix("torch."),
        "growth": peak.growth,
        "model_alone": model_growth,
        "counted": counted,
        "limit": limit,
        "within": None if counted is None else counted <= limit,
        "nbytes": int(nbytes),
        "codes": nbytes.codes,
        "metadata": nbytes.metadata,
        "window": nbytes.window,
        "unused": nbytes.unused,
        "layer_prompt": layer_prompt,
        "bits_per_value": cache.bits_per_value,
        "seconds": seconds,
    }


def measure_generate(
    preset: PresetNames = None,
    layers: Layers = 32,
    batch: Rows = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 32768,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 16,
    chunk: Annotated[int, typer.Option(help="Tokens read at a time, in the chunked run.")] = 512,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, and append a JSON line for each preset and way of reading the prompt."""
    run = Run("memory", device, commit, out)
    presets = preset or ["kivi-4", "kivi-2"]
    for name in presets:
        lb.get_preset(name)
    model = random_model(llama_8b(layers), torch.bfloat16, run.device)
    # before the measurements, compile kernels and let libraries allocate their workspaces
    measure(model, presets[0], 1, min(tokens, 1024), 2, None)
    for name in presets:
        for prefill_chunk in (chunk, None):
            run.add(measure(model, name, batch, tokens, new_tokens, prefill_chunk))
    sizes = (f"{name}:GB" for name in ("growth", "model_alone", "counted", "limit", "nbytes"))
    run.end("preset", "prefill_chunk", *sizes, "seconds:.1f", "within")
    if any(record["within"] is False for record in run.records):
        raise typer.Exit(1)


# ---- fits -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_fits(
    name: str, preset: str, context: int, new_tokens: int, device: torch.device, memory: int
) -> dict[str, Any]:
    """One call that fills a cache of `context` tokens. memory: bytes of the GPU.

    Returns:
        A record without provenance, in bytes: `counted` and its parts, and the `longest` text that `fits` names. `fit`:
        whether the memory was enough. If so, `peak` and `reserved` (PyTorch's peaks of requested tensors, and of what it took
        from the GPU), `in_use` (GPU memory in use, less that before the call), `nbytes` (of the cache), `seconds`.
    """
    free_before = torch.cuda.mem_get_info(device)[1]  # the first call makes CUDA's context, which is counted
    model = random_model(shape_of(name).config, torch.bfloat16, device)
    full = preset in ("dense", "DynamicCache")
    fit = lb.fits(model, context, memory, presets=["int8" if full else preset])[not full]
    if is_host(preset):
        model.set_attn_implementation("sdpa")
        generate: Any = functools.partial(model.generate, past_key_values=DynamicCache(config=model.config))
    else:
        generate = functools.partial(lb.generate, model, preset=preset)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    record = {
        "model": name,
        "preset": preset,
        "context": context,
        "new_tokens": new_tokens,
        "memory": memory,
        "longest": fit.longest_context,
        "counted": fit.total,
        "weights": fit.weights,
        "cache": fit.cache,
        "chunk": fit.chunk,
        "cuda": fit.cuda,
    }
    prompt = torch.randint(0, model.config.vocab_size, (1, context - new_tokens), device=device)
    begin = time.perf_counter()
    try:
        out = generate(
            input_ids=prompt,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            prefill_chunk_size=CHUNK,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    except torch.OutOfMemoryError as error:
        print(error)
        return record | {"fit": False}
    assert out.sequences.shape == (1, context)
    cache = cache_in(out)
    return record | {
        "fit": True,
        "peak": torch.cuda.memory_stats(device)["requested_bytes.all.peak"],
        "reserved": torch.cuda.max_memory_reserved(device),
        "in_use": free_before - torch.cuda.mem_get_info(device)[0],
        "nbytes": sum(x.nbytes for layer in cache.layers for x in tensors_of(layer))
        if is_host(preset)
        else int(cache.nbytes),
        "seconds": time.perf_counter() - begin,
    }


def compare_fits(
    model: Annotated[str, typer.Option(help="A known name, a folder or a hub name.")] = "Qwen/Qwen3-8B",
    preset: Annotated[str, typer.Option(help="Preset.")] = "kivi-4-sink",
    context: Annotated[int, typer.Option(help="Tokens of the row.")] = 65536,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 32,
    memory: Annotated[str | None, typer.Option(help="Of a smaller GPU, e.g. 24GB [default: all there is].")] = None,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, append a JSON line, and compare."""
    run = Run("fits", device, commit, out)
    nbytes = torch.cuda.get_device_properties(run.device).total_memory
    if memory is not None:
        nbytes = parse_size(memory)
        limit_memory(run.device, nbytes - CUDA_BYTES)
    record = measure_fits(model, preset, context, new_tokens, run.device, nbytes)
    run.add(record | ({"relative": record["in_use"] / record["counted"] - 1} if record["fit"] else {}))
    sizes = ("weights", "cache", "nbytes", "chunk", "cuda", "counted", "peak", "in_use", "memory")
    run.end("preset", "context", "fit", *(f"{name}:GB" for name in sizes), "relative:+.1%")


# ---- batch ------------------------------------------------------------------------------------------------------------

CONTENDERS = ("DynamicCache/eager", "dense/compiled", "kivi-2-sink/compiled")
#: first guess of the bytes that a run needs beside weights and caches, and the factor from a batch to the next smaller
#: one
RESERVE, SHRINK = 2.5e9, 0.96
#: steps timed at each length
STEPS = 12


def row_bytes(cache: str, config: Any, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
    """Bytes of one row of `tokens` tokens in the cache with this name (all layers), and bytes that all rows share. Raises
    `ValueError` for an unknown name."""
    layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    if is_host(cache):
        return 2 * heads * head_dim * dtype.itemsize * tokens * layers, 0
    layer = low_bit_cache(cache, config, max_cache_len=tokens).packed_layers[0]
    layer.lazy_initialization(*(torch.zeros(1, heads, 1, head_dim, dtype=dtype) for _ in "kv"))
    parts = layer.store.nbytes()
    shared = parts.pop("parameters")
    return layers * sum(parts.values()), layers * shared


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
    each, shared = row_bytes(wanted.name, model.config, model.dtype, prompt + new_tokens)
    rows = rows_within(budget, weights, each, shared)
    rows = max(min(rows, most or rows), 1)
    tried = []
    while rows:
        clean(model.device)
        contender = make(wanted.name, wanted.mode, model, rows, prompt + new_tokens, backend)
        tried.append(rows)
        try:
            times = run_to_the_end(contender, prompt, new_tokens)
        except torch.cuda.OutOfMemoryError as error:
            print(f"{contender.label}: {rows} rows do not fit: {str(error).splitlines()[0]}")
        else:
            return {
                "cache": wanted.name,
                "mode": wanted.mode,
                "backend": contender.cache.packed_layers[0].backend if contender.ours else None,
                "rows": rows,
                "rows_tried": tried,
                "row_bytes": each,
                "shared_bytes": shared,
                "weight_bytes": weights,
                "peak_reserved": torch.cuda.max_memory_reserved(model.device) if model.device.type == "cuda" else None,
                **times,
            }
        del contender
        rows = int(rows * SHRINK)
    raise RuntimeError(f"{wanted.name}: not even one row fits")


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


def rows_table() -> str:
    """A Markdown table: bytes of a row, and rows that fit. Ratios are relative to the first cache."""
    sizes = {cache: row_bytes(cache, qwen3_8b(LAYERS), DTYPE, PROMPT + NEW_TOKENS) for cache in CACHES}
    weights = count_weights(qwen3_8b(LAYERS)) * DTYPE.itemsize
    rows = {cache: rows_within(BUDGET, weights, *size) for cache, size in sizes.items()}
    columns: dict[str, Any] = {
        "cache": lambda cache: f"`{cache}`",
        "MB per row": lambda cache: f"{sizes[cache][0] / 1e6:.0f}",
        "rows": lambda cache: str(rows[cache]),
        "ratio": lambda cache: f"{rows[cache] / rows[CACHES[0]]:.1f}x",
    }
    return listed(CACHES, columns)


def measure_batch(
    contender: Annotated[
        list[str] | None, typer.Option(help="NAME[,sink=N][,residual=N][:BACKEND]/MODE; repeatable.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = PROMPT,
    new_tokens: Annotated[int, typer.Option(help="Tokens written.")] = NEW_TOKENS,
    budget: Annotated[float, typer.Option(help="Bytes in all.")] = BUDGET,
    backend: BackendName = None,
    layers: Layers = LAYERS,
    most: Annotated[int | None, typer.Option(help="Rows to try at most.")] = None,
    computed: Annotated[bool, typer.Option(help="Only compute the rows that fit, of usual caches.")] = False,
    tiny: Tiny = False,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, and append a JSON line for each contender."""
    if computed:
        print(rows_table())
        return
    contenders = [Wanted.parse(text) for text in contender or CONTENDERS]
    model_name = "tiny" if tiny else f"qwen3-8b-shape-{layers}-layers"
    run = Run(
        "batch", device, commit, out, model=model_name, prompt=prompt, new_tokens=new_tokens, budget=budget, most=most
    )
    limit_memory(run.device, budget)
    model = random_model(qwen3_8b(layers, tiny), run.dtype, run.device)
    for wanted in contenders:
        run.add(largest(wanted, model, prompt, new_tokens, budget, wanted.backend or backend, most))
        gc.collect()
    run.end("cache", "mode", "rows", "row_bytes:GB", "throughput:.0f", "step_ms", "attribution_ms")


if __name__ == "__main__":
    run_command(generate=measure_generate, fits=compare_fits, batch=measure_batch)
