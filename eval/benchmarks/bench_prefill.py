"""Attention of prompt chunks over packed history, and in 16 bits:
`python -m hf_lowbit_kv.eval.benchmarks.bench_prefill`.

Like `bench_decode`, it checks before it times, and times our kernels and the peers in the same rounds. Two kinds of
records:

- `chunk`: one chunk, the last `query_length` of `tokens` tokens. `sdpa-flash` attends with a causal mask aligned to the
  end, `sdpa-cudnn` without a mask (it has no suitable one), `sdpa-mask` with the boolean mask that transformers makes
  for a chunk.
- `prompt`: attention and storing for a whole prompt of `tokens` in chunks of `query_length`. Peers make one causal call
  over the whole prompt.

`ratio`: time of the fastest causal peer divided by ours. `relerr`: relative error, compared with float32 attention over
the same bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.eval.benchmarks.decode_cell import WrongResultError
from hf_lowbit_kv.eval.benchmarks.decode_shapes import Shape
from hf_lowbit_kv.eval.benchmarks.packed_layer import attend_error, build
from hf_lowbit_kv.eval.benchmarks.peers import Inputs
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, time_interleaved
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import Chunk

HEADS, KV_HEADS = 32, 8
console = wide_console()


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
    case = build(shape, ops.storage_spec(spec, backend), head_dim, queries, dtype, device)
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
    spec = ops.storage_spec(get_preset(preset).spec(), backend)
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


def main(
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
            chosen = ops.choose_backend(name_of_backend, ops.Served(where, number, get_preset(name).spec()))
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


if __name__ == "__main__":
    run_command(main)
