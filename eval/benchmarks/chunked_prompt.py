"""Cost of reading a prompt in chunks: `python -m hf_lowbit_kv.eval.benchmarks.chunked_prompt`.

A chunk attends to itself exactly, and to earlier chunks as the cache holds them: packed. So the keys and values in the
cache differ from those after reading the prompt whole. Two measurements have records with their `kind`:

- `kl`: the bundled model reads a prompt in chunks, and again whole. Then the tokens after the prompt are fed as in
  decoding. `kl` compares their distributions with full precision, nats per token. `kl_whole` compares them with the
  same cache after reading the prompt whole.
- `memory` (`--memory`): a model of the 8B Llama 3.1 shape with random weights reads a prompt on a GPU, twice. `peak`:
  most bytes allocated beyond the weights, the cache included. `seconds`: time until the first token, the second time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.filesize import decimal
from rich.table import Table
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.bench_generate import shape_8b
from hf_lowbit_kv.eval.benchmarks.bench_memory import PeakMemory, random_model
from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, default_texts, load_model
from hf_lowbit_kv.eval.perplexity import Expected, Scores, check_window, chunk_bounds, window_tokens
from hf_lowbit_kv.eval.provenance import RESULTS, append_record, device_name, provenance, run_command, wide_console
from hf_lowbit_kv.eval.texts import Text, read_text

PRESETS = ("kivi-2-sink", "kivi-4-sink", "eigen-2")
#: sizes of chunks in tokens; 0: the prompt is read whole
KL_CHUNKS, MEMORY_CHUNKS = (512, 2048, 0), (512, 2048, 8192, 0)
console = wide_console()


def pieces(prompt: int, length: int, chunk: int, packs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each forward pass. First come the chunks of the prompt, then the tokens after it up to `length`.
    These passes end when a page is packed, so that their tokens attend to the same data as in decoding.

    Args:
        chunk: tokens of a chunk; 0: the prompt is one chunk.
        packs: lengths at which a page is packed.
    """
    bounds = [*range(0, prompt, chunk or prompt), prompt, *(at for at in packs if prompt < at < length), length]
    return itertools.pairwise(bounds)


@torch.no_grad()
def logits_behind(
    model: Any, cache: Any, ids: torch.Tensor, prompt: int, chunk: int, packs: Sequence[int]
) -> torch.Tensor:
    """Logits `[n, vocabulary]` that predict the `n` tokens after the prompt. The first are those of the prompt's last
    token.

    Args:
        ids: `[1, prompt + n]`.
    """
    length, parts = ids.shape[1], []
    for low, high in pieces(prompt, length, chunk, packs):
        keep = 1 if low < prompt else high - low
        out = model(ids[:, low:high], past_key_values=cache, use_cache=True, logits_to_keep=keep).logits[0]
        if high >= prompt:
            parts.append(out)
    return torch.cat(parts)[:-1]


def measure_kl(
    model: Any,
    tokenizer: Any,
    presets: Sequence[str] = PRESETS,
    texts: Sequence[str | Path | Text] | None = None,
    prompt: int = 3584,
    behind: int = 512,
    chunks: Sequence[int] = KL_CHUNKS,
) -> list[dict[str, Any]]:
    """One record for each preset and chunk size: means over the first window of each text.

    Args:
        prompt, behind: number of tokens in the prompt, and of scored tokens after it.
        chunks: sizes of chunks. 0 stands for the whole prompt, which is always measured.

    Raises:
        ValueError: an unknown preset, a text that is too short, or a window longer than the model's context.
    """
    for name in presets:
        lb.get_preset(name)
    length = prompt + behind
    check_window(model, length, prompt)
    windows = [window_tokens(read_text(text), tokenizer, length, 1)[0] for text in texts or default_texts()]
    sizes = [0, *(chunk for chunk in chunks if chunk)]
    scores = {(name, chunk): (Scores(), Scores()) for name in presets for chunk in sizes}
    for ids in (window.to(model.device) for window in windows):
        labels = ids[0, prompt:]
        full = Expected(logits_behind(model, DynamicCache(config=model.config), ids, prompt, 0, ()), labels)
        for name in presets:
            packs = chunk_bounds(lb.get_preset(name).spec(), length, 128)
            whole = full
            for chunk in sizes:
                cache = lb.from_preset(name, model)
                logits = logits_behind(model, cache, ids, prompt, chunk, packs)
                if chunk == 0:
                    whole = Expected(logits, labels)
                scores[name, chunk][0].add(logits, full)
                scores[name, chunk][1].add(logits, whole)
    return [
        {
            "kind": "kl",
            "preset": name,
            "chunk": chunk,
            "prompt": prompt,
            "behind": behind,
            "texts": len(windows),
            **exact.means(),
            "kl_whole": from_whole.means()["kl"],
        }
        for (name, chunk), (exact, from_whole) in scores.items()
    ]


@torch.no_grad()
def measure_memory(model: Any, preset: str, tokens: int, chunk: int) -> dict[str, Any]:
    """One record. A random prompt `[1, tokens]` is read twice, first to measure memory, then to measure time."""
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)
    options: dict[str, Any] = {
        "prefill_chunk_size": chunk,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }

    def read() -> Any:
        mask = torch.ones_like(ids)
        return lb.generate(model, ids, preset, 1, attention_mask=mask, progress=False, **options).past_key_values

    lb.release(model)
    with PeakMemory(model.device) as peak:
        nbytes = int(read().nbytes)
    _wait(model.device)
    begin = time.perf_counter()
    read()
    _wait(model.device)
    return {
        "kind": "memory",
        "preset": preset,
        "layers": model.config.num_hidden_layers,
        "tokens": tokens,
        "chunk": chunk,
        "peak": peak.growth,
        "nbytes": nbytes,
        "seconds": time.perf_counter() - begin,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(
    memory: Annotated[bool, typer.Option("--memory", help="Memory and time of a large model instead of KL.")] = False,
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset; repeatable [default: three, or kivi-4-sink].")
    ] = None,
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at a time, 0 for all; repeatable.", min=0)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the prompt [default: 3584, or 32768].")] = None,
    behind: Annotated[int, typer.Option(help="Tokens behind the prompt that are scored.", min=1)] = 512,
    text: Annotated[list[Path] | None, typer.Option(help="Text files; repeatable [default: two essays].")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the large model.")] = 32,
    tiny: Annotated[bool, typer.Option(help="A tiny model in place of the large one, for a dry run.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cpu for KL, cuda for --memory].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines.")] = RESULTS / "chunked-prompt.jsonl",
) -> None:
    """Measure, and append a JSON line for each preset and chunk size."""
    for name in preset or []:
        lb.get_preset(name)
    where = torch.device(device or ("cuda" if memory else "cpu"))
    if memory:
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        model = random_model(shape_8b(layers, tiny), dtype, where)
        known = {"model": "tiny" if tiny else f"llama-8b-shape-{layers}-layers", "gpu": device_name(where)}
        length = tokens or 32768
        table = Table("preset", "tokens", "chunk", "peak", "cache", "s")
        for name in preset or ["kivi-4-sink"]:
            measure_memory(model, name, min(length, 2048), 512)  # compiles kernels
            for size in chunk or MEMORY_CHUNKS:
                record = measure_memory(model, name, length, size)
                append_record(out, record | known | provenance(commit))
                memories = (decimal(record[key] or 0) for key in ("peak", "nbytes"))
                table.add_row(name, str(length), str(size or "whole"), *memories, f"{record['seconds']:.2f}")
    else:
        model, tokenizer = load_model(None, device=where)
        texts: Any = text
        records = measure_kl(model, tokenizer, preset or PRESETS, texts, tokens or 3584, behind, chunk or KL_CHUNKS)
        table = Table("preset", "prompt", "chunk", "KL from full precision", "KL from whole", "same first choice")
        for record in records:
            append_record(out, record | {"model": BUNDLED_MODEL, "gpu": device_name(where)} | provenance(commit))
            numbers = f"{record['kl']:.4f}", f"{record['kl_whole']:.4f}", f"{record['top1']:.3f}"
            table.add_row(record["preset"], str(record["prompt"]), str(record["chunk"] or "whole"), *numbers)
    console.print(table)


if __name__ == "__main__":
    run_command(main)
