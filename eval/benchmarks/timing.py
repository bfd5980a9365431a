"""Times of GPU work: medians over interleaved rounds, the memory bandwidth to compare with, and the parts of a decode
step from torch's profiler."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_lowbit_kv.eval.benchmarks.contenders import Contender

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


def time_behind(candidates: Sequence[Candidate], device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Like `time_interleaved`, but each call runs after another kernel, whose time is subtracted. This kernel reads
    four times the size of the L2 cache. In a model, the products with weights between two layers' attention do the
    same. A call that is only repeated would find its instructions and tables in caches. Inputs need not rotate
    (`sets_needed`)."""
    rows = torch.ones(_cache_bytes(device), device=device).view(-1, 2**16)  # float32

    def behind(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (rows.sum(-1), call())

    front = Candidate("", [lambda: rows.sum(-1)])
    pairs = [
        dataclasses.replace(candidate, calls=[behind(call) for call in candidate.calls]) for candidate in candidates
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


#: kinds of GPU work, by names of kernels; the first matching pattern counts. If inductor fuses several reductions, here
#: the products with the weights of q, k and v, the kernel's name has only a number
KINDS = (
    ("attention", r"^(latent_\w*)?(attend|merge)|^prompt_kernel|flash|fmha|sdpa|cudnn.*attention"),
    ("append and pack", r"^(latent_)?append"),
    (
        "weights",
        r"gemm|gemv|nvjet|cutlass|splitk|cublas|triton_\w*mm|dot_kernel|reduce_1Block|products?_kernel|triton_red_fused_\d+$",
    ),
    ("copies", r"^Memcpy|^Memset|CatArray|copy_kernel"),
)
#: calls in which the CPU waits for the GPU
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def kind_of(kernel: str) -> str:
    """Kind of a kernel, by its name: one of `KINDS`, or `other` (norms, rotation, activation, sampling)."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "other")


def profile_steps(contender: Contender, steps: int = 16) -> dict[str, Any]:
    """Profile `steps` steps.

    Returns:
        Figures of one step. `device_ms`: GPU time, by kind and in `total`. `kernels`: the twelve most expensive
        kernels, each [name, milliseconds, launches]. `graph_launches`, `kernel_launches` and `synchronisations` are
        counted between the marks of steps, so that neither prompt nor end counts.

    Raises:
        RuntimeError: the profile does not have a mark for each step.
    """
    contender.set_back()
    marks = _Marks()
    activities = [ProfilerActivity.CPU]
    if contender.model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        contender.generate(contender.prompt(), steps + 3, logits_processor=[marks])
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    on_host = (event for event in events if event.device_type() != torch.autograd.DeviceType.CUDA)
    ticks = sorted(event.start_ns() for event in on_host if event.name() == _Marks.NAME)
    if len(ticks) != steps + 3:
        raise RuntimeError(
            f"the profile has {len(ticks)} marks for {steps + 3} steps, so the time of a step is unknown"
        )
    del ticks[:2]
    begin, end, count = ticks[0], ticks[-1], len(ticks) - 1
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        if not begin <= event.start_ns() < end:
            continue
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            times[name] += event.duration_ns()
            launches[name] += 1
        else:
            calls[name] += 1
    kinds: Counter[str] = Counter()
    for name, ns in times.items():
        kinds[kind_of(name)] += ns
    return {
        "device_ms": {kind: ns / 1e6 / count for kind, ns in kinds.items()}
        | {"total": sum(times.values()) / 1e6 / count},
        "kernels": [
            [name[:80], round(ns / 1e6 / count, 4), launches[name] / count] for name, ns in times.most_common(12)
        ],
        "graph_launches": calls["cudaGraphLaunch"] / count,
        "kernel_launches": sum(calls[name] for name in LAUNCHES[1:]) / count,
        "synchronisations": sum(calls[name] for name in SYNCHRONISING) / count,
    }


class _Marks:
    """A logits processor that leaves a mark in the profile."""

    NAME = "hf_lowbit_kv.eval: step"  # no operation may have this name: operations are in the profile too

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(self.NAME):
            return scores
