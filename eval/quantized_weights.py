"""Packed caches under quantized weights: `python -m hf_lowbit_kv.eval.quantized_weights`.

Weights of 4 bits come from torchao through transformers' own integration (`TorchAoConfig`, weight-only, groups of 64);
the model is otherwise used as it is. Measured for 16-bit and for 4-bit weights, with the full-precision cache and each
preset: perplexity on the default texts, bytes of weights and of the cache, and the time of a decode step. Needs a GPU and
`pip install torchao`. In a checkout rows go to `weights-<gpu>.jsonl` in `eval/results/`.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_lowbit_kv.cache.method_caches import from_preset
from hf_lowbit_kv.eval.chunked_reader import FULL
from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, bundled_model, default_texts
from hf_lowbit_kv.eval.perplexity import run
from hf_lowbit_kv.eval.provenance import (
    append_record,
    default_records,
    device_name,
    provenance,
    run_command,
    wide_console,
)
from hf_lowbit_kv.machine.cache_argument import as_argument

#: numbers that share a scale and a zero point in 4-bit weights; divides the bundled model's sizes
GROUP_SIZE = 64
WARMUP_STEPS, TIMED_STEPS = 8, 48


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Preset, repeatable [default: kv8, kv4].")] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder [default: the bundled model].")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text, and of the cache that is timed.")] = 4096,
    start: Annotated[int, typer.Option("--from", help="First position scored.")] = 512,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines to append to [default: eval/results/ of a checkout, else none].")
    ] = None,
) -> None:
    """Measure presets under 16-bit and under 4-bit weights, and record the rows."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("a GPU is needed: torchao's 4-bit kernels run there")
    if importlib.util.find_spec("torchao") is None:
        raise typer.BadParameter("torchao is needed: pip install torchao")
    name = str(bundled_model()) if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows: list[dict[str, Any]] = []
    for bits in (16, 4):
        loaded = load(name, bits)
        rows += measure(loaded, tokenizer, bits, preset or ["kv8", "kv4"], context, start)
        del loaded
        torch.cuda.empty_cache()
    setting = {
        "model": BUNDLED_MODEL if model is None else model,
        "texts": [path.name for path in default_texts()],
        "context": context,
        "start": start,
        "group_size": GROUP_SIZE,
        "device": device_name("cuda"),
    }
    if out := out or default_records("weights", device_name("cuda")):
        for row in rows:
            append_record(out, row | setting | provenance(commit))
    wide_console().print(table(rows))


def load(name: str, bits: int) -> Any:
    """A model on the GPU in bfloat16, with its linear layers in 4 bits for `bits=4`."""
    options: dict[str, Any] = {}
    if bits == 4:
        from torchao.quantization import Int4WeightOnlyConfig
        from transformers import TorchAoConfig

        # the packing of PyTorch's own kernel; torchao's others need further packages
        config = Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format="tile_packed_to_4d")
        options["quantization_config"] = TorchAoConfig(config)
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, device_map="cuda", attn_implementation="lowbit_kv", **options
    ).eval()


def measure(
    model: Any, tokenizer: Any, bits: int, presets: list[str], context: int, start: int
) -> list[dict[str, Any]]:
    """One row for the full-precision cache and one for each preset: `weight_bits`, `preset`, `ppl`, `kl` (nats, from the
    full-precision cache under the same weights), `weight_bytes`, `kv_bytes`, `step_ms` (median)."""
    scored = run(presets, default_texts(), model, tokenizer, context, start)
    accuracy = {row["preset"]: {"ppl": row["ppl"], "kl": row["kl"]} for row in scored}
    accuracy[FULL] = {"ppl": scored[0]["ppl_full"], "kl": 0.0}
    text = default_texts()[0].read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :context].to(model.device)
    weights = sum(part.nbytes for tensor in model.parameters() for part in plain_tensors(tensor))
    rows = []
    for preset in (FULL, *presets):
        cache = DynamicCache(config=model.config) if preset == FULL else from_preset(preset, model)
        step_ms, kv_bytes = time_steps(model, ids, cache)
        row = {"weight_bits": bits, "preset": preset, **accuracy[preset]}
        rows.append(row | {"weight_bytes": weights, "kv_bytes": kv_bytes, "step_ms": step_ms})
    return rows


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one consists of: a quantized weight's codes, scales and zero points."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


@torch.no_grad()
def time_steps(model: Any, ids: torch.Tensor, cache: Any) -> tuple[float, int]:
    """Milliseconds of an eager decode step behind the tokens `ids` `[1, n]`, and bytes of the cache with these tokens."""
    token = model(ids, **as_argument(cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
    if isinstance(cache, DynamicCache):
        layers: list[Any] = list(cache.layers)
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    else:
        kv_bytes = cache.nbytes.codes + cache.nbytes.metadata + cache.nbytes.window
    times = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        token = model(token, **as_argument(cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARMUP_STEPS:]), kv_bytes


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows."""
    out = Table("weights", "cache", "ppl", "KL", "weights MB", "cache MB", "step ms")
    for row in rows:
        numbers = (
            f"{row['ppl']:.2f}",
            f"{row['kl']:.5f}",
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['kv_bytes'] / 1e6:.1f}",
        )
        out.add_row(f"{row['weight_bits']} bit", row["preset"], *numbers, f"{row['step_ms']:.2f}")
    return out


if __name__ == "__main__":
    run_command(main)
