"""Reading a prompt: `python -m hf_lowbit_kv.eval.benchmarks.bench_prompt`.

`model`: time to read a prompt, by cache and by `prefill_chunk_size`. A model of the 8B Llama 3.1 shape with random
weights reads a random prompt and writes one token with `model.generate`. Caches grow, and contenders are timed one after
the other in each round. The stock cache (`DynamicCache`) uses PyTorch's SDPA. Presets that need a calibration get random
parameters.

- `chunk`: `prefill_chunk_size`; `null`: read whole.
- `cost`: seconds, divided by those of the stock cache reading the prompt whole. `cost_same`: seconds, divided by those
  of the stock cache with the same chunks.

`attention`: attention of prompt chunks over packed history, and in 16 bits. Like `bench_decode`, it checks before it
times, and times our kernels and the peers in the same rounds. Two kinds of records:

- `chunk`: one chunk, the last `query_length` of `tokens` tokens. `sdpa-flash` attends with a causal mask aligned to the
  end, `sdpa-cudnn` without a mask (it has no suitable one), `sdpa-mask` with the boolean mask that transformers makes
  for a chunk.
- `prompt`: attention and storing for a whole prompt of `tokens` in chunks of `query_length`. Peers make one causal call
  over the whole prompt.
- `ratio`: time of the fastest causal peer divided by ours. `relerr`: relative error, compared with float32 attention
  over the same bytes.

`chunks`: cost of reading a prompt in chunks. A chunk attends to itself exactly, and to earlier chunks as the cache holds
them: packed. So the keys and values in the cache differ from those after reading the prompt whole. Two kinds of records:

- `kl`: the bundled model reads a prompt in chunks, and again whole. Then the tokens after the prompt are fed as in
  decoding. `kl` compares their distributions with full precision, nats per token. `kl_whole` compares them with the
  same cache after reading the prompt whole.
- `memory` (`--memory`): a model of the 8B Llama 3.1 shape with random weights reads a prompt on a GPU, twice. `peak`:
  most bytes allocated beyond the weights, the cache included. `seconds`: time until the first token, the second time.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.bench_generate import shape_8b
from hf_lowbit_kv.eval.benchmarks.bench_memory import PeakMemory, random_model
from hf_lowbit_kv.eval.benchmarks.contenders import low_bit_cache
from hf_lowbit_kv.eval.benchmarks.decode_cell import WrongResultError
from hf_lowbit_kv.eval.benchmarks.packed_layer import Shape, attend_error, build
from hf_lowbit_kv.eval.benchmarks.peers import Inputs
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, time_interleaved
from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, default_texts, load_model
from hf_lowbit_kv.eval.perplexity import Expected, Scores, check_window, chunk_bounds, window_tokens
from hf_lowbit_kv.eval.provenance import (
    RESULTS,
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.eval.texts import Text, read_text
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import Chunk

STOCK = "DynamicCache"
console = wide_console()


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


def measure_reading(
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


def time_models(
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
            for record in measure_reading(model, contenders, batch, length, backend, rounds):
                record |= {"model": "tiny" if tiny else f"llama-8b-shape-{layers}-layers", "gpu": device_name(where)}
                append_record(out, record | provenance(commit))
                costs = (f"{record[key]:.3f}" for key in ("cost", "cost_same"))
                read = "whole" if record["chunk"] is None else str(record["chunk"])
                facts = (record["cache"], record["backend"] or "-", str(length), read, f"{record['seconds']:.3f}")
                table.add_row(*facts, *costs)
    console.print(table)


HEADS, KV_HEADS = 32, 8


def _chunk_peers(x: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """16-bit attention of a chunk to a dense cache whose last tokens are the chunk."""
    queries, tokens = x.q.shape[2], x.k.shape[2]
    causal = causal_lower_right(queries, tokens)
    mask = torch.ones(queries, tokens, dtype=torch.bool, device=x.q.device).tril(tokens - queries)

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=causal, enable_gqa=True)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True)

    def masked() -> torch.Tensor:
        return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=mask, enable_gqa=True)

    return {"sdpa-flash": flash, "sdpa-cudnn": cudnn, "sdpa-mask": masked}


def _prompt_peers(x: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """16-bit attention of a whole prompt to itself, with the kernel that PyTorch chooses and with each of two
    kernels."""

    def with_backends(*backends: SDPBackend) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel([*backends]):
                return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)

        return call

    return {
        "sdpa": lambda: F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True),
        "sdpa-flash": with_backends(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": with_backends(SDPBackend.CUDNN_ATTENTION),
    }


def _usable(peers: dict[str, Callable]) -> dict[str, Callable]:
    usable = {}
    for name, call in peers.items():
        try:
            call()
            usable[name] = call
        except RuntimeError as error:  # the device does not have this peer
            console.print(f"no {name}: {str(error).splitlines()[0]}", markup=False)
    return usable


def measure_chunk(
    preset, backend, tokens: int, queries: int, head_dim: int, dtype, device, rounds: int
) -> dict[str, Any]:
    """Check and time one chunk. If a check fails, `WrongResultError` is raised before anything is timed."""
    spec = get_preset(preset).spec()
    shape = Shape("", 1, HEADS, KV_HEADS, tokens)
    case = build(shape, choice.storage_spec(spec, backend), head_dim, queries, dtype, device)
    relerr, bound = attend_error(case, backend)
    if not relerr <= bound:  # NaN fails too
        raise WrongResultError(f"relative error {relerr:.2g} is above its bound {bound:.2g}")
    peers = _usable(_chunk_peers(Inputs.random(1, HEADS, KV_HEADS, tokens, head_dim, queries, dtype, device)))
    candidates = [Candidate("ours", [lambda: case.attend(backend)], graph=False)]
    candidates += [Candidate(name, [call], graph=False) for name, call in peers.items()]
    return {"kind": "chunk", "relerr": relerr} | _times(candidates, device, rounds, without=("sdpa-cudnn",))


def measure_prompt(
    preset, backend, tokens: int, queries: int, head_dim: int, dtype, device, rounds: int
) -> dict[str, Any]:
    """Time a whole prompt, chunk after chunk."""
    spec = choice.storage_spec(get_preset(preset).spec(), backend)
    store = PagedStore(spec, 1, KV_HEADS, head_dim, head_dim, dtype, device, capacity=tokens)
    x = Inputs.random(1, HEADS, KV_HEADS, tokens, head_dim, tokens, dtype, device)

    def ours() -> torch.Tensor:
        state, outs = store.state, []
        state.length.zero_()
        state.paged.zero_()
        for start in range(0, tokens, queries):
            q, k, v = (each[:, :, start : start + queries] for each in (x.q, x.k, x.v))
            if start == 0:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
                ops.append(Chunk(None, k, v), store, backend)
            else:
                out = ops.step(Chunk(q, k, v, scaling=head_dim**-0.5, seen=start), store, backend)
            outs.append(out)
        return torch.cat(outs, dim=1)

    peers = _usable(_prompt_peers(x))
    candidates = [Candidate("ours", [ours], graph=False)]
    candidates += [Candidate(name, [call], graph=False) for name, call in peers.items()]
    return {"kind": "prompt", "relerr": None} | _times(candidates, device, rounds)


def _times(candidates, device, rounds: int, without: tuple[str, ...] = ()) -> dict[str, Any]:
    times = time_interleaved(candidates, device, rounds)
    ms = times.pop("ours")
    causal = {name: time for name, time in times.items() if name not in without}
    peer = min(causal, key=causal.__getitem__)
    return {"ms": ms, "peer": peer, "peer_ms": causal[peer], "ratio": causal[peer] / ms, "peers_ms": times}


def time_attention(
    history: Annotated[list[int] | None, typer.Option(help="Tokens before a chunk; repeatable.")] = None,
    query_length: Annotated[list[int] | None, typer.Option(help="Tokens of a chunk; repeatable.")] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a whole prompt; repeatable.")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Preset; repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="triton, cuda, torch; repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32.")] = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    rounds: Annotated[int, typer.Option(help="Samples of which the median is taken.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/prefill-<device>.jsonl].")] = None,
) -> None:
    """Check and time attention of prompt chunks, and append a JSON line for each measurement."""
    where, number = torch.device(device), getattr(torch, dtype)
    out = out or results_path("prefill", device_name(where))
    chunks = query_length or [512, 2048]
    work = [(measure_chunk, tokens + queries, queries) for tokens in history or [8192, 32768] for queries in chunks]
    work += [(measure_prompt, tokens, chunks[-1]) for tokens in prompt or [32768]]
    table = Table("kind", "tokens", "queries", "preset", "backend", "ms", "ratio", "peers", "relerr")
    backends: list[str | None] = [*backend] if backend else [None]
    for name in preset or ["kivi-4"]:
        for name_of_backend in backends:
            chosen = choice.choose_backend(name_of_backend, choice.Served(where, number, get_preset(name).spec()))
            for measure, tokens, queries in work:
                record = measure(name, chosen, tokens, queries, head_dim, number, where, rounds)
                record |= {"preset": name, "backend": chosen, "tokens": tokens, "query_length": queries}
                record |= {"dtype": dtype, "head_dim": head_dim, "gpu": device_name(where)} | provenance(commit)
                append_record(out, record)
                peers = ", ".join(f"{peer} {ms:.3f}" for peer, ms in record["peers_ms"].items())
                table.add_row(
                    *(record["kind"], str(tokens), str(queries), name, chosen, f"{record['ms']:.3f}"),
                    *(f"{record['ratio']:.2f}", peers, "-" if record["relerr"] is None else f"{record['relerr']:.1e}"),
                )
                gc.collect()
    console.print(table)


KL_PRESETS = ("kivi-2-sink", "kivi-4-sink", "eigen-2")
#: sizes of chunks in tokens; 0: the prompt is read whole
KL_CHUNKS, MEMORY_CHUNKS = (512, 2048, 0), (512, 2048, 8192, 0)


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
    presets: Sequence[str] = KL_PRESETS,
    texts: Sequence[str | Path | Text] | None = None,
    prompt: int = 3584,
    behind: int = 512,
    chunks: Sequence[int] = KL_CHUNKS,
) -> list[dict[str, Any]]:
    """One record for each preset and chunk size: means over the first window of each text.

    Args:
        prompt, behind: number of tokens in the prompt, and of scored tokens after it.
        chunks: sizes of chunks. 0: the whole prompt, which is always measured.

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


def compare_chunks(
    memory: Annotated[bool, typer.Option("--memory", help="Memory and time of a large model instead of KL.")] = False,
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset; repeatable [default: three, or kivi-4-sink].")
    ] = None,
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at a time, 0 for all; repeatable.", min=0)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the prompt [default: 3584, or 32768].")] = None,
    behind: Annotated[int, typer.Option(help="Tokens after the prompt that are scored.", min=1)] = 512,
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
        records = measure_kl(model, tokenizer, preset or KL_PRESETS, texts, tokens or 3584, behind, chunk or KL_CHUNKS)
        table = Table("preset", "prompt", "chunk", "KL from full precision", "KL from whole", "same first choice")
        for record in records:
            append_record(out, record | {"model": BUNDLED_MODEL, "gpu": device_name(where)} | provenance(commit))
            numbers = f"{record['kl']:.4f}", f"{record['kl_whole']:.4f}", f"{record['top1']:.3f}"
            table.add_row(record["preset"], str(record["prompt"]), str(record["chunk"] or "whole"), *numbers)
    console.print(table)


if __name__ == "__main__":
    run_command(model=time_models, attention=time_attention, chunks=compare_chunks)
