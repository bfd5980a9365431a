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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.contenders import low_bit_cache
from hf_lowbit_kv.eval.benchmarks.packed_layer import Shape, attend_error, build, check_error
from hf_lowbit_kv.eval.benchmarks.random_models import PeakMemory, random_8b, seconds_of
from hf_lowbit_kv.eval.benchmarks.result_files import (
    BackendName,
    Commit,
    Device,
    Dtype,
    Layers,
    Out,
    PresetNames,
    Rounds,
    Rows,
    Run,
    Tiny,
)
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, Inputs, attention, time_interleaved
from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, default_texts, load_model
from hf_lowbit_kv.eval.perplexity import Expected, Scores, check_window, chunk_bounds, window_tokens
from hf_lowbit_kv.eval.provenance import RESULTS, run_command
from hf_lowbit_kv.eval.texts import Text, read_text
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs

STOCK = "DynamicCache"


def read_seconds(model: Any, cache: Any, prompt: torch.Tensor, chunk: int | None) -> float:
    """Seconds of `generate` from `prompt` `[B, S]` to its first token, with an empty cache."""
    model.set_attn_implementation(lb.ATTENTION_NAME if isinstance(cache, lb.LowBitCache) else "sdpa")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 1, "prefill_chunk_size": chunk, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(prompt), **as_argument(cache)}
    return seconds_of(model.device, lambda: model.generate(prompt, **options))


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
    preset: PresetNames = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of the prompt; repeatable.")] = None,
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at a time; repeatable. Whole prompts too.")
    ] = None,
    batch: Rows = 1,
    backend: BackendName = None,
    layers: Layers = 32,
    tiny: Tiny = False,
    rounds: Rounds = 3,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, and append a JSON line for each cache, length and way of reading."""
    run = Run("prefill", device, commit, out)
    presets = preset or ["kivi-4"]
    for name in presets:
        lb.get_preset(name)
    model = random_8b(run, layers, tiny)
    contenders = list(itertools.product((STOCK, *presets), (None, *(chunk or [2048, 8192]))))
    with torch.no_grad():
        for length in tokens or [32768]:
            for record in measure_reading(model, contenders, batch, length, backend, rounds):
                run.add(record)
    run.end("cache", "backend", "tokens", "chunk", "seconds:.3f", "cost:.3f", "cost_same:.3f")


# ---- attention --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS = 32, 8


def _chunk_peers(x: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """16-bit attention of a chunk to a dense cache whose last tokens are the chunk."""
    queries, tokens = x.q.shape[2], x.k.shape[2]
    mask = torch.ones(queries, tokens, dtype=torch.bool, device=x.q.device).tril(tokens - queries)
    return {
        "sdpa-flash": attention(x, SDPBackend.FLASH_ATTENTION, attn_mask=causal_lower_right(queries, tokens)),
        "sdpa-cudnn": attention(x, SDPBackend.CUDNN_ATTENTION),
        "sdpa-mask": attention(x, attn_mask=mask),
    }


def _prompt_peers(x: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """16-bit attention of a whole prompt to itself, with the kernel that PyTorch chooses and with each of two
    kernels."""
    kernels = {"sdpa": None, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
    return {name: attention(x, backend, is_causal=True) for name, backend in kernels.items()}


def _usable(peers: dict[str, Callable]) -> dict[str, Callable]:
    usable = {}
    for name, call in peers.items():
        try:
            call()
            usable[name] = call
        except RuntimeError as error:  # the device does not have this peer
            print(f"no {name}: {str(error).splitlines()[0]}")
    return usable


def measure_chunk(
    preset, backend, tokens: int, queries: int, head_dim: int, dtype, device, rounds: int
) -> dict[str, Any]:
    """Check and time one chunk. If a check fails, `WrongResultError` is raised before anything is timed."""
    spec = get_preset(preset).spec()
    shape = Shape("", 1, HEADS, KV_HEADS, tokens)
    case = build(shape, choice.storage_spec(spec, backend), head_dim, queries, dtype, device)
    relerr, bound = attend_error(case, backend)
    check_error(relerr, bound)
    peers = _chunk_peers(Inputs.random(1, HEADS, KV_HEADS, tokens, head_dim, queries, dtype, device))
    times = _times(lambda: case.attend(backend), peers, device, rounds, without=("sdpa-cudnn",))
    return {"kind": "chunk", "relerr": relerr} | times


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
                ops.append(StepInputs(None, k, v), store, backend)
            else:
                out = ops.step(StepInputs(q, k, v, scaling=head_dim**-0.5, seen=start), store, backend)
            outs.append(out)
        return torch.cat(outs, dim=1)

    return {"kind": "prompt", "relerr": None} | _times(ours, _prompt_peers(x), device, rounds)


def _times(
    ours: Callable[[], Any], peers: dict[str, Callable], device, rounds: int, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Fields of a record. without: peers that do less work than ours, so that no ratio is taken."""
    calls = {"ours": ours, **_usable(peers)}
    times = time_interleaved([Candidate(name, [call], graph=False) for name, call in calls.items()], device, rounds)
    ms = times.pop("ours")
    causal = {name: time for name, time in times.items() if name not in without}
    peer = min(causal, key=causal.__getitem__)
    return {"ms": ms, "peer": peer, "peer_ms": causal[peer], "ratio": causal[peer] / ms, "peers_ms": times}


def time_attention(
    history: Annotated[list[int] | None, typer.Option(help="Tokens before a chunk; repeatable.")] = None,
    query_length: Annotated[list[int] | None, typer.Option(help="Tokens of a chunk; repeatable.")] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a whole prompt; repeatable.")] = None,
    preset: PresetNames = None,
    backend: Annotated[list[str] | None, typer.Option(help="triton, cuda, torch; repeatable.")] = None,
    dtype: Dtype = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    rounds: Rounds = 5,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Check and time attention of prompt chunks, and append a JSON line for each measurement."""
    run = Run("prefill", device, commit, out, dtype=dtype, head_dim=head_dim)
    where, number = run.device, getattr(torch, dtype)
    chunks = query_length or [512, 2048]
    work = [(measure_chunk, tokens + queries, queries) for tokens in history or [8192, 32768] for queries in chunks]
    work += [(measure_prompt, tokens, chunks[-1]) for tokens in prompt or [32768]]
    backends: list[str | None] = [*backend] if backend else [None]
    for name, backend_name in itertools.product(preset or ["kivi-4"], backends):
        chosen = choice.choose_backend(backend_name, choice.LayerSetup(where, number, get_preset(name).spec()))
        for measure, tokens, queries in work:
            record = measure(name, chosen, tokens, queries, head_dim, number, where, rounds)
            run.add(record | {"preset": name, "backend": chosen, "tokens": tokens, "query_length": queries})
            gc.collect()
    run.end("kind", "tokens", "query_length", "preset", "backend", "ms:.3f", "ratio:.2f", "peers_ms", "relerr:.1e")


# ---- chunks -----------------------------------------------------------------------------------------------------------

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
def logits_after(
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
        full = Expected(logits_after(model, DynamicCache(config=model.config), ids, prompt, 0, ()), labels)
        for name in presets:
            packs = chunk_bounds(lb.get_preset(name).spec(), length, 128)
            whole = full
            for chunk in sizes:
                cache = lb.from_preset(name, model)
                logits = logits_after(model, cache, ids, prompt, chunk, packs)
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
    options: dict[str, Any] = {"prefill_chunk_size": chunk, "do_sample": False, "pad_token_id": 0, "progress": False}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}

    def read() -> Any:
        return lb.generate(model, ids, preset, 1, **options).past_key_values

    lb.release(model)
    with PeakMemory(model.device) as peak:
        nbytes = int(read().nbytes)
    return {
        "kind": "memory",
        "preset": preset,
        "layers": model.config.num_hidden_layers,
        "tokens": tokens,
        "chunk": chunk,
        "peak": peak.growth,
        "nbytes": nbytes,
        "seconds": seconds_of(model.device, read),
    }


def compare_chunks(
    memory: Annotated[bool, typer.Option("--memory", help="Memory and time of a large model instead of KL.")] = False,
    preset: PresetNames = None,
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at a time, 0 for all; repeatable.", min=0)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the prompt [default: 3584, or 32768].")] = None,
    layers: Layers = 32,
    tiny: Tiny = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cpu for KL, cuda for --memory].")] = None,
    commit: Commit = None,
    out: Annotated[Path, typer.Option(help="JSON lines.")] = RESULTS / "chunked-prompt.jsonl",
) -> None:
    """Measure, and append a JSON line for each preset and chunk size."""
    for name in preset or []:
        lb.get_preset(name)
    run = Run("", device or ("cuda" if memory else "cpu"), commit, out)
    if memory:
        model, length = random_8b(run, layers, tiny), tokens or 32768
        for name in preset or ["kivi-4-sink"]:
            measure_memory(model, name, min(length, 2048), 512)  # compiles kernels
            for size in chunk or MEMORY_CHUNKS:
                run.add(measure_memory(model, name, length, size))
        run.end("preset", "tokens", "chunk", "peak:GB", "nbytes:GB", "seconds:.2f")
        return
    model, tokenizer = load_model(None, device=run.device)
    run.common["model"] = BUNDLED_MODEL
    prompt, chunks = tokens or 3584, chunk or KL_CHUNKS
    for record in measure_kl(model, tokenizer, preset or KL_PRESETS, prompt=prompt, chunks=chunks):
        run.add(record)
    run.end("preset", "prompt", "chunk", "kl:.4f", "kl_whole:.4f", "top1:.3f")


if __name__ == "__main__":
    run_command(model=time_models, attention=time_attention, chunks=compare_chunks)
