"""Times of GPU work: medians over interleaved rounds, the memory bandwidth, and 16-bit attention of available libraries to
compare with.

A peer is a function of `Inputs` that returns the call to time, or raises if it cannot run. To compare with another
library, add a peer to `PEERS`. With several query tokens, peers attend to all `tokens` without a causal mask. The
difference is a triangle of `query_length` tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

#: least GPU time of one sample, so that the resolution of events does not matter
SAMPLE_MS = 3.0
MAX_CALLS = 64


@dataclasses.dataclass
class Candidate:
    """Something to time.

    Args:
        calls: the same work on different inputs, one after the other. There must be enough inputs that they do not stay
            in the GPU's cache, see `sets_needed`.
        graph: replay a CUDA graph, so that the CPU's time for launches is not counted. The calls must not wait for the
            GPU.
        before: called before each sample, outside the timing.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    graph: bool = True
    before: Callable[[], Any] | None = None


class _Sampler:
    """One candidate, warmed up and ready for timing."""

    def __init__(self, candidate: Candidate, device: torch.device):
        self.device, self.before = device, candidate.before or (lambda: None)
        calls = list(candidate.calls)
        self.launch: Callable[[], Any] = lambda: [call() for call in calls]
        self.count = len(calls)
        self.before()
        self.launch()  # compilation and allocation happen here
        if device.type != "cuda":
            return
        if candidate.graph:
            self.launch = _capture(self.launch, self.before)
        if candidate.before is None:  # otherwise a sample makes each call once
            once = min(self.sample() for _ in range(3)) * self.count
            calls *= max(min(int(SAMPLE_MS / once) + 1, MAX_CALLS // len(calls)), 1)
            self.count = len(calls)
            if candidate.graph:
                self.launch = _capture(lambda: [call() for call in calls], self.before)
        self.sample()

    def sample(self) -> float:
        """Milliseconds of a call."""
        self.before()
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.launch()
            return (time.perf_counter() - start) * 1e3 / self.count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # keeps the GPU busy until all work is queued, so that launches do not count
        begin.record()
        self.launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.count


def _capture(work: Callable[[], Any], before: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of `work`, as a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # run once outside the graph, on a side stream as in the capture
        before()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_interleaved(candidates: Sequence[Candidate], device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Median milliseconds of a call, by name. Each round samples every candidate, so drifting clocks affect all
    alike."""
    samplers = {candidate.name: _Sampler(candidate, device) for candidate in candidates}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            samples[name].append(sampler.sample())
    return {name: statistics.median(values) for name, values in samples.items()}


def time_cold(candidates: Sequence[Candidate], device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Like `time_interleaved`, but each call runs after another kernel, whose time is subtracted. This kernel reads
    four times the size of the L2 cache. In a model, the products with weights between two layers' attention do the
    same. A call that is only repeated would find its instructions and tables in caches. Inputs need not rotate
    (`sets_needed`)."""
    rows = torch.ones(_cache_bytes(device), device=device).view(-1, 2**16)  # float32

    def after_eviction(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (rows.sum(-1), call())

    front = Candidate("", [lambda: rows.sum(-1)])
    pairs = [
        dataclasses.replace(candidate, calls=[after_eviction(call) for call in candidate.calls])
        for candidate in candidates
    ]
    times = time_interleaved([front, *pairs], device, rounds)
    front_ms = times.pop("")
    return {name: ms - front_ms for name, ms in times.items()}


def _cache_bytes(device: torch.device) -> int:
    """Bytes of the L2 cache, rounded up to whole 64 KiB; without a GPU, a small number."""
    size = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**20
    return -(-size // 2**16) * 2**16


def sets_needed(nbytes: int, device: torch.device, most: int = 16) -> int:
    """How many input sets of `nbytes` must rotate, so that each is read from memory and not from the L2 cache."""
    if device.type != "cuda":
        return 1
    return min(max(-(-4 * _cache_bytes(device) // nbytes), 1), most)


def read_bandwidth(device: torch.device) -> float:
    """Read bandwidth, bytes per second: the best of a plain sum, a maximum and a copy (reads and writes counted)."""
    size = 2**31 if device.type == "cuda" else 2**24
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    rows = source.view(-1, 2**16)  # one sum for each row, so that the reduction needs no second pass
    calls = {"copy": lambda: target.copy_(source), "sum": lambda: rows.sum(-1), "max": lambda: rows.amax(-1)}
    times = time_interleaved([Candidate(name, [call]) for name, call in calls.items()], device, rounds=10)
    moved = {"copy": 2 * size, "sum": size, "max": size}
    return max(moved[name] / (ms * 1e-3) for name, ms in times.items())


# ---- 16-bit attention ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Inputs:
    """`q` `[B, Hq, S, D]`, `k` and `v` `[B, H, n, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(
        cls, batch, heads, kv_heads, tokens, head_dim, query_length, dtype, device, head_dim_v: int | None = None
    ) -> Inputs:
        def draw(heads: int, tokens: int, width: int = head_dim) -> torch.Tensor:
            return torch.randn(batch, heads, tokens, width, dtype=dtype, device=device)

        return cls(draw(heads, query_length), draw(kv_heads, tokens), draw(kv_heads, tokens, head_dim_v or head_dim))


def attention(x: Inputs, backend: SDPBackend | None = None, **mask: Any) -> Callable[[], torch.Tensor]:
    """PyTorch's attention with one of its backends [default: the one that it chooses]. It groups the query heads itself."""

    def call() -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=x.q.shape[1] != x.k.shape[1], **mask)

    return call


def folded_attention(x: Inputs, backend: SDPBackend) -> Callable[[], torch.Tensor]:
    """Like `attention`, but the query heads of a group are passed as if they were query tokens."""
    if x.q.shape[1] == x.k.shape[1]:
        raise ValueError("there are no groups to fold")
    folded = x.q.reshape(x.q.shape[0], x.k.shape[1], -1, x.q.shape[-1])
    call = attention(dataclasses.replace(x, q=folded), backend)
    return lambda: call().view(*x.q.shape[:-1], x.v.shape[-1])


PEERS: dict[str, Callable[[Inputs], Callable[[], torch.Tensor]]] = {
    "sdpa-cudnn": partial(attention, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa-cudnn-folded": partial(folded_attention, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": partial(attention, backend=SDPBackend.FLASH_ATTENTION),
}


def usable_peers(x: Inputs, tolerance: float = 1e-2) -> tuple[dict[str, Callable], dict[str, str]]:
    """The `PEERS` that run and agree with float32 attention on these inputs, and the reasons why
    others do not."""
    expected = _expected(x)
    calls, reasons = {}, {}
    for name, make in PEERS.items():
        try:
            call = make(x)
            out = call()[:1].float()
        except Exception as error:  # a peer is foreign code and may raise anything; it then counts as not usable
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        relerr = float((out - expected).norm() / expected.norm())
        if relerr < tolerance:  # NaN fails too
            calls[name] = call
        else:
            reasons[name] = f"wrong: relative error {relerr:.2g}"
    return calls, reasons


def _expected(x: Inputs) -> torch.Tensor:
    """float32 attention of the first row, one KV head at a time: `[1, Hq, S, D]`."""
    groups = x.q.shape[1] // x.k.shape[1]
    heads = []
    for head, q in enumerate(x.q[0].float().split(groups)):
        k, v = x.k[0, head].float(), x.v[0, head].float()
        heads.append(torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v)
    return torch.cat(heads)[None]
