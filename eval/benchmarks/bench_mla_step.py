"""A decode step of an MLA model, with its own cache and with FP8 latents:
`python -m hf_lowbit_kv.eval.benchmarks.bench_mla_step`.

The model has the shape of DeepSeek-V2-Lite and random weights. Both caches are filled with the same random latents,
because the numbers do not change the time. Times are medians over `steps` steps.

- `stock`: `DynamicCache` under SDPA. Every step expands its history to keys and values.
- `snapmla`: a preallocated `MLAFP8Cache`.
- `recorded`: the step of `snapmla` as one CUDA graph.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.storage.step import Chunk

#: DeepSeek-V2-Lite (its published configuration)
V2_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
console = wide_console()


def build(layers: int, device: torch.device) -> Any:
    """The model with random weights in bfloat16."""
    config = AutoConfig.for_model("deepseek_v2", **V2_LITE | {"num_hidden_layers": layers})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="lowbit_kv")
    return model.eval()


def latents(batch: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    c, r = (torch.randn(batch, 1, tokens, width, dtype=torch.bfloat16, device=device) for width in (512, 64))
    return c, r


def fill(cache: Any, batch: int, tokens: int, device: torch.device) -> None:
    """Put random latents into every layer. `update` under SDPA stores them unchanged."""
    for index in range(len(cache.layers)):
        cache.update(*latents(batch, tokens, device), index)


def times(step: Callable[[], Any], steps: int) -> float:
    """Median milliseconds of a step, without the first two."""
    milliseconds = []
    for _ in range(steps + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return statistics.median(milliseconds[2:])


def recorded(step: Callable[[], Any]) -> Callable[[], None]:
    """The step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _steps(model: Any, cache: Any, batch: int, tokens: int) -> Callable[[], None]:
    """A function that decodes one token of every row."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    position = torch.full((batch, 1), tokens, device=model.device)

    def step() -> None:
        model(token, position_ids=position, **as_argument(cache), use_cache=True)
        position.add_(1)

    return step


def time_ours(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    model.set_attn_implementation("lowbit_kv")
    cache = lb.MLAFP8Cache(model, max_cache_len=tokens + 3 * steps + 16)
    fill_packed(cache, batch, tokens, model.device)
    out = {"snapmla_bytes": int(cache.nbytes), "token_bytes": cache.packed_layers[0].store.token_bytes}  # type: ignore[union-attr]
    step = _steps(model, cache, batch, tokens)
    return out | {"snapmla_ms": times(step, steps), "recorded_ms": times(recorded(step), steps)}


def time_stock(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    model.set_attn_implementation("sdpa")
    cache: Any = DynamicCache(config=model.config)
    fill(cache, batch, tokens, model.device)
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"stock_ms": times(_steps(model, cache, batch, tokens), steps), "stock_bytes": nbytes}


@torch.inference_mode()
def measure(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Measure the steps. Returns a record without provenance."""
    out: dict[str, Any] = {"batch": batch, "tokens": tokens, "layers": model.config.num_hidden_layers}
    out |= time_ours(model, batch, tokens, steps)
    gc.collect()
    torch.cuda.empty_cache()
    out |= time_stock(model, batch, tokens, max(steps // 3, 3))
    return out | {"ratio": out["stock_ms"] / out["recorded_ms"]}


def fill_packed(cache: Any, batch: int, tokens: int, device: torch.device) -> None:
    """Like `fill`, but packed: the kernels store the latents as they store a prompt."""
    for layer in cache.packed_layers:
        c, r = latents(batch, tokens, device)
        layer.lazy_initialization(c, r)
        ops.append(Chunk(None, c, r), layer.store, layer.backend)
        layer.restore(layer.snapshot()._replace(seen=tokens, mode="packed"))


def main(
    batch: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1)] = 32768,
    layers: Annotated[int, typer.Option(min=2)] = 27,
    steps: Annotated[int, typer.Option(min=3)] = 20,
    record: Annotated[Path | None, typer.Option(help="by default eval/results/mla-step-GPU.jsonl")] = None,
    commit: Annotated[str | None, typer.Option(help="of the measured code, where git cannot tell")] = None,
) -> None:
    """Time a decode step of a DeepSeek-V2-Lite-shaped model on this GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("it needs a GPU, and there is none")
    device = torch.device("cuda", 0)
    measured = measure(build(layers, device), batch, tokens, steps)
    path = results_path("mla-step", device_name(device)) if record is None else record
    append_record(path, measured | {"device": device_name(device)} | provenance(commit))
    table = Table("cache", "step ms", "bytes")
    table.add_row("DynamicCache, SDPA", f"{measured['stock_ms']:.2f}", f"{measured['stock_bytes'] / 1e9:.2f} GB")
    table.add_row("MLAFP8Cache", f"{measured['snapmla_ms']:.2f}", f"{measured['snapmla_bytes'] / 1e9:.2f} GB")
    table.add_row("MLAFP8Cache, recorded", f"{measured['recorded_ms']:.2f}", "")
    console.print(table, f"ratio {measured['ratio']:.2f}")


if __name__ == "__main__":
    run_command(main)
