"""Models with random weights in the shapes of large ones; memory, time and a profile of what they do."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor, PreTrainedConfig, Qwen3Config

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.result_files import Run

#: of both models of 8B
SHAPE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
#: of a model for dry runs
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 97,
}
#: beyond this position transformers warns; positions are rotated by the same code
POSITIONS = 2**21


def llama_8b(layers: int = 32, tiny: bool = False, **changes: Any) -> LlamaConfig:
    """A configuration of the shape of Llama 3.1 8B. `changes` replace single values."""
    own = {"vocab_size": 128256, "intermediate_size": 14336, "max_position_embeddings": POSITIONS}
    return LlamaConfig(**SHAPE_8B | own | {"num_hidden_layers": layers} | (TINY if tiny else {}) | changes)


def qwen3_8b(layers: int = 36, tiny: bool = False) -> Qwen3Config:
    """A configuration of the shape of Qwen3 8B."""
    own = {"vocab_size": 151936, "intermediate_size": 12288, "max_position_embeddings": 40960}
    return Qwen3Config(**SHAPE_8B | own | {"num_hidden_layers": layers} | (TINY if tiny else {}))


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model with random weights from `seed`, made on the device."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=lb.ATTENTION_NAME)
    model.generation_config.eos_token_id = None
    return model.eval()


def random_8b(run: Run, layers: int, tiny: bool = False) -> Any:
    """A model of the shape `llama_8b` on the device of a run, whose records get its name."""
    run.common["model"] = "tiny" if tiny else f"llama-8b-shape-{layers}-layers"
    return random_model(llama_8b(layers, tiny), run.dtype, run.device)


def count_weights(config: PreTrainedConfig) -> int:
    """Number of weights of a model, which is not made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all except the embedding, because a step reads only one of its rows per
    token."""
    embedding = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embedding)


# ---- time and memory --------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Wait for the GPU, if the device is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device: torch.device) -> None:
    """Give back unused memory of the GPU, and forget its peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def limit_memory(device: torch.device, nbytes: float) -> None:
    """Let PyTorch take this many bytes of the GPU at most. Does nothing on a CPU."""
    if device.type == "cuda":
        there_is = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / there_is, 1.0), device.index or 0)


def seconds_of(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of a call, until the GPU has ended its work."""
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


class PeakMemory:
    """`with PeakMemory(device) as peak: ...` measures memory. Afterwards `peak.growth` is the peak of allocated bytes
    inside, less the bytes allocated before. It is `None` on the CPU, which has no such allocator."""

    growth: int | None = None

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> PeakMemory:
        clean(self.device)
        if self.device.type == "cuda":
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *exception) -> None:
        if self.device.type == "cuda":
            self.growth = torch.cuda.max_memory_allocated(self.device) - self.before


class StepClock(LogitsProcessor):
    """A logits processor that notes the times of its calls. The time between two calls is that of a step, CPU work and
    waiting included. On a GPU, events in the GPU's stream take the times, so the CPU never waits for the GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.ticks: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            tick: Any = torch.cuda.Event(enable_timing=True)
            tick.record()
        else:
            tick = time.perf_counter()
        self.ticks.append(tick)
        return scores

    def steps_ms(self, skip: int = 2) -> list[float]:
        """Milliseconds of each step without the first `skip` ones, which start on an idle GPU."""
        pairs = list(zip(self.ticks, self.ticks[1:]))[skip:]
        if self.device.type != "cuda":
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in pairs]


# ---- profile ----------------------------------------------------------------------------------------------------------

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


def profile_steps(contender: Any, steps: int = 16) -> dict[str, Any]:
    """Profile `steps` steps of a `Contender`.

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
