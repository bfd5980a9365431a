"""Where the time of a decoding step goes, and what the host does between steps, read from torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_lowbit_kv.eval.benchmarks.contenders import Contender

#: kinds of device work, by what kernels are called; the first that fits. Inductor names a reduction that joins several, here
#: the products with the weights of q, k and v, by a number alone
KINDS = (
    ("attention", r"^attend|^merge_kernel|flash|fmha|sdpa|cudnn.*attention"),
    ("append and pack", r"^append|^pack_kernel|^window_kernel|^counters_kernel"),
    ("weights", r"gemm|gemv|nvjet|cutlass|splitk|cublas|triton_\w*mm|dot_kernel|reduce_1Block|triton_red_fused_\d+$"),
    ("copies", r"^Memcpy|^Memset|CatArray|copy_kernel"),
)
#: calls by which the host waits for the device
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def kind_of(kernel: str) -> str:
    """Kind of a kernel by its name: one of `KINDS`, or `other` (norms, rotation, activation, sampling)."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "other")


def profile_steps(contender: Contender, steps: int = 16) -> dict[str, Any]:
    """Profile so many steps.

    Returns:
        `device_ms`: a step's busy time on the device, by kind and in `total`; `kernels`: the twelve most expensive,
        [name, milliseconds, launches] a step; `graph_launches`, `kernel_launches` and `synchronisations` a step, counted
        between the step clock's ticks, so that neither prompt nor end counts.

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
            f"the profile has {len(ticks)} marks for {steps + 3} steps, so times of a step cannot be told"
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

    NAME = "hf_lowbit_kv.eval: step"  # operations must not be called so: they are events of the profile too

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(self.NAME):
            return scores
