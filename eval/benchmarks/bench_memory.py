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
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.filesize import decimal
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument, cache_in
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.planning.cache_memory import CHUNK
from hf_lowbit_kv.planning.fits import GB
from hf_lowbit_kv.planning.model_shapes import shape_of


def llama_8b(layers: int = 32) -> LlamaConfig:
    """A configuration of the shape of Llama 3.1 8B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


class PeakMemory:
    """`with PeakMemory(device) as peak: ...` measures memory. Afterwards `peak.growth` is the peak of allocated bytes
    inside, less the bytes allocated before. It is `None` on the CPU, which has no such allocator."""

    growth: int | None = None

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *exception) -> None:
        if self.device.type == "cuda":
            self.growth = torch.cuda.max_memory_allocated(self.device) - self.before


@torch.no_grad()
def measure(
    model: Any, preset: str, batch: int, tokens: int, new_tokens: int, prefill_chunk: int | None, **options
) -> dict[str, Any]:
    """Run `generate` once from a random prompt `[batch, tokens]`, read whole or in chunks.

    Args:
        **options: further arguments of `from_preset`.

    Returns:
        A record without provenance. Bytes: `growth` (peak), `model_alone` (peak without a cache; only for whole
        prompts), `counted` (their difference), `limit`, the cache's `nbytes` and its parts, and `layer_prompt`.
        `within` says whether the limit holds.
    """
    config, device = model.config, model.device
    prompt = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
    model_alone: int | None = 0
    if prefill_chunk is None:
        with PeakMemory(device) as alone:
            model(prompt, use_cache=False, logits_to_keep=1)
        model_alone = alone.growth
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
    counted = None if peak.growth is None or model_alone is None else peak.growth - model_alone
    return {
        "preset": preset,
        "layers": config.num_hidden_layers,
        "batch": batch,
        "tokens": tokens,
        "new_tokens": new_tokens,
        "prefill_chunk": prefill_chunk,
        "dtype": str(model.dtype).removeprefix("torch."),
        "growth": peak.growth,
        "model_alone": model_alone,
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


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model with random weights from `seed`, made on the device."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=lb.ATTENTION_NAME)
    model.generation_config.eos_token_id = None
    return model.eval()


def measure_generate(
    preset: Annotated[list[str] | None, typer.Option(help="Preset; repeatable [default: kivi-4, kivi-2].")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    batch: Annotated[int, typer.Option(help="Rows.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 32768,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 16,
    chunk: Annotated[int, typer.Option(help="Tokens read at a time, in the chunked run.")] = 512,
    device: Annotated[str, typer.Option(help="A GPU; the CPU runs but measures nothing.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/memory-<device>.jsonl].")] = None,
) -> None:
    """Measure, and append a JSON line for each preset and way of reading the prompt."""
    where = torch.device(device)
    presets = preset or ["kivi-4", "kivi-2"]
    for name in presets:
        lb.get_preset(name)
    model = random_model(llama_8b(layers), torch.bfloat16, where)
    out = out or results_path("memory", device_name(where))
    # before the measurements, compile kernels and let libraries allocate their workspaces
    measure(model, presets[0], 1, min(tokens, 1024), 2, None)
    table = Table("preset", "read", "growth", "model alone", "counted", "limit", "cache", "s", "within")
    failed = False
    for name in presets:
        for prefill_chunk in (chunk, None):
            record = measure(model, name, batch, tokens, new_tokens, prefill_chunk)
            append_record(out, record | {"gpu": device_name(where)} | provenance(commit))
            failed |= record["within"] is False
            sizes = (decimal(record[key] or 0) for key in ("growth", "model_alone", "counted", "limit", "nbytes"))
            reading = "whole" if prefill_chunk is None else f"by {prefill_chunk}"
            table.add_row(name, reading, *sizes, f"{record['seconds']:.1f}", str(record["within"]))
    wide_console().print(table)
    if failed:
        raise typer.Exit(1)


@torch.no_grad()
def measure_fits(name: str, preset: str, context: int, new_tokens: int, device: torch.device) -> dict[str, Any]:
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


def compare_fits(
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
    record = measure_fits(model, preset, context, new_tokens, where)
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
    run_command(generate=measure_generate, fits=compare_fits)
