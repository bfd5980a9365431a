"""Decoding with `generate`, compared with transformers' caches:
`python -m hf_lowbit_kv.eval.benchmarks.bench_generate`.

`caches`: a model of the 8B Llama 3.1 shape with random weights decodes. Its caches are filled with random keys and values to a
given length. The contenders are timed in one process, one after the other in each round. A contender is timed only
after its compiled tokens agree with the eager tokens of the same cache (`agreement`).

- `step_ms`: median time of a step of `generate`, from one call of a logits processor to the next. CPU work, waiting and
  sampling are included.
- `device_ms`: GPU time of a step, by kind of work. `kernels`: the most expensive kernels (name, ms, launches). Two
  compilations of a model differ, because the tiles of products are searched again each time.
- `limit_ms`: time to read weights and stored bytes once, at the bandwidth measured in the same run.
- `peak_bytes`: the allocator's peak in a step, without the caches of other contenders.
- `mode`: `eager`; `recorded`: in a CUDA graph with fused pieces, the default of `lb.generate`; `unfused`: the eager
  step in a CUDA graph; `compiled`: transformers' own compilation; `tuned`: compiled with `lb.generate`'s settings.
- `decoding_steps`: the pieces that were fused.

`weights`: decode steps with quantized weights. transformers quantizes the random weights while it loads them. `lb.generate`
records its steps if it can. `decoding_steps` says whether it did, or why not. Steps are timed only after `agreement` too.

Fields: `weights`, `meaning`, `preset`, `batch`, `tokens`, `step_ms` (median time of a step of `generate`),
`decoding_steps`, `weight_bytes` (all parameters as stored, embedding and head included), `cache_bytes` (stored tokens),
`allocated_bytes` (of the whole process, with both), `logits_error`, `tokens_equal`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.contenders import HEADROOM, BatchSize, Contender, Wanted, make, near_tie
from hf_lowbit_kv.eval.benchmarks.random_models import (
    POSITIONS,
    PeakMemory,
    clean,
    llama_8b,
    profile_steps,
    random_8b,
    weight_bytes,
)
from hf_lowbit_kv.eval.benchmarks.result_files import (
    BackendName,
    Commit,
    Device,
    Layers,
    Out,
    PresetNames,
    Rows,
    Run,
    Tiny,
)
from hf_lowbit_kv.eval.benchmarks.timing import read_bandwidth
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.eval.weight_quantization import WEIGHT_QUANTIZATIONS, check_weights, load_quantized, stored_bytes

#: contenders of a run without options: `name[:backend]/mode`
CONTENDERS = (
    *("DynamicCache/eager", "StaticCache/compiled", "dense/tuned", "kivi-2/tuned", "kivi-4/tuned", "int8/tuned"),
    *("dense/recorded", "kivi-4-sink/recorded", "kivi-4-sink/unfused"),
)
#: caches, and their rows and tokens, of a run with quantized weights
PRESETS, SHAPES = ("dense", "int8", "kivi-4-sink"), ("1x32768", "8x32768")
#: largest allowed relative error of logits between compiled and eager steps in 16 bits. Fused arithmetic rounds less
#: often (transformers' own compiled step has an error of 0.06 on random weights)
LOGITS_TOLERANCE = 0.1


class DisagreementError(RuntimeError):
    """Compiled steps and eager steps give different results, so nothing was timed."""


def agreement(contender: Contender, steps: int = 8) -> dict[str, Any]:
    """Compare compiled steps with eager steps. Both start from the same cache and follow the greedy tokens of the eager
    steps.

    In 16 bits the two round differently. `logits_error` is the largest relative error of a step's logits.
    `tokens_equal` is the number of steps in which the likeliest token is the same in all rows. Tokens may differ only
    at a `near_tie`.

    Raises:
        DisagreementError: logits differ by more than `LOGITS_TOLERANCE`, or tokens differ although their logits are not
            close.
    """
    options = {"return_dict_in_generate": True, "output_logits": True}
    contender.set_back()
    eager = contender.generate(contender.prompt(), steps, disable_compile=True, **options)
    forced = _Forced(eager.sequences)
    contender.set_back()
    compiled = contender.generate(contender.prompt(), steps, logits_processor=[forced], **options)
    equal, worst = 0, 0.0
    for step, (x, y) in enumerate(zip(eager.logits, compiled.logits, strict=True)):
        difference = (x - y).float()
        worst = max(worst, float(difference.norm() / x.float().norm()))
        if not worst <= LOGITS_TOLERANCE:
            raise DisagreementError(f"{contender.label}: logits of step {step} differ by {worst:.3g}")
        same = x.argmax(-1) == y.argmax(-1)
        if not bool((same | near_tie(x, y)).all()):
            raise DisagreementError(f"{contender.label}: tokens of step {step} differ")
        equal += int(same.all())
    return {"tokens_equal": equal, "tokens_compared": steps, "logits_error": worst}


class _Forced(LogitsProcessor):
    """A logits processor that makes generation repeat `sequences` `[B, n]`."""

    def __init__(self, sequences: torch.Tensor):
        self.sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, float("-inf")).scatter_(1, token, 0.0)


# ---- caches -----------------------------------------------------------------------------------------------------------


def measure(
    contenders: list[Contender],
    tokens: int,
    bandwidth: float,
    steps: int,
    rounds: int,
    run: Run,
) -> list[dict[str, Any]]:
    """Check contenders at one length. Then time those that pass, one after the other in each round."""
    records: dict[Contender, dict[str, Any]] = {}
    for contender in contenders:
        if (
            record := run.attempt(contender.label, functools.partial(_checked, contender, tokens, bandwidth))
        ) is not None:
            records[contender] = record
        contender.put_away()
    samples: dict[Contender, list[float]] = {contender: [] for contender in records}
    for _ in range(rounds):
        for contender in records:
            samples[contender] += contender.steps_ms(steps)
            contender.put_away()
    for contender, record in records.items():
        record["step_ms"] = statistics.median(samples[contender])
        record["tokens_per_second"] = contender.batch / record["step_ms"] * 1e3
        if contender.model.device.type == "cuda":
            profile = run.attempt(contender.label, functools.partial(profile_steps, contender, 8))
            if profile is not None:
                record["device_ms"] = {kind: round(ms, 4) for kind, ms in profile["device_ms"].items()}
                counted = ("kernels", "graph_launches", "kernel_launches", "synchronisations")
                record |= {key: profile[key] for key in counted}
        contender.put_away()
    return list(records.values())


def _checked(contender: Contender, tokens: int, bandwidth: float) -> dict[str, Any]:
    """Fill and check a contender. Returns the part of its record that needs no timing."""
    model, device = contender.model, contender.model.device
    contender.fill(tokens)
    checked = agreement(contender) if contender.mode != "eager" else {}
    contender.set_back()
    cache_bytes, weights = contender.cache_bytes(), weight_bytes(model)
    contender.put_away()
    with PeakMemory(device) as peak:
        contender.steps_ms(2)
    # memory allocated before includes the cache, unless `set_back` makes a new cache
    allocated = sum(p.nbytes for p in model.parameters()) + (0 if contender.transient else contender.allocated_bytes())
    return {
        "batch": contender.batch,
        "tokens": tokens,
        "cache": contender.name,
        "mode": contender.mode,
        "backend": contender.cache.packed_layers[0].backend if contender.ours else None,
        "decoding_steps": contender.cache.decoding_steps if contender.ours else None,
        "limit_ms": (cache_bytes + weights) / bandwidth * 1e3,
        "cache_bytes": cache_bytes,
        "weight_bytes": weights,
        "peak_bytes": None if peak.growth is None else allocated + peak.growth,
        "bandwidth": bandwidth,
        **checked,
    }


def load(run: Run, name: str) -> Any:
    """The model of a folder or of the hub, for decoding without an end."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=run.dtype, attn_implementation=lb.ATTENTION_NAME)
    model = loaded.to(run.device).eval()
    model.generation_config = GenerationConfig()  # no end of the text, no sampling
    model.config.max_position_embeddings = POSITIONS
    if getattr(model.config, "head_dim", None) is None:
        model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    run.common["model"] = name
    return model


def time_caches(
    contender: Annotated[
        list[str] | None, typer.Option(help="NAME[,sink=N][,residual=N][:BACKEND]/MODE[@LONGEST].")
    ] = None,
    batch: Rows = 1,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens attended to; repeatable [default: 1k, 8k, 32k, 128k].")
    ] = None,
    backend: BackendName = None,
    model_name: Annotated[
        str | None, typer.Option("--model", help="Folder or hub name [default: random weights of an 8B shape].")
    ] = None,
    layers: Layers = 32,
    tiny: Tiny = False,
    steps: Annotated[int, typer.Option(help="Steps of a sample.")] = 16,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 3,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Check and time, and append a JSON line for each contender and length."""
    lengths = sorted(tokens or [1024, 8192, 32768, 131072])
    wanted = [Wanted.parse(text) for text in contender or CONTENDERS]
    run = Run("generate", device, commit, out, filled="random keys and values, the same in every layer")
    model = random_8b(run, layers, tiny) if model_name is None else load(run, model_name)
    run.common |= {"dtype": str(model.dtype).removeprefix("torch."), "steps": steps * rounds}
    bandwidth = read_bandwidth(run.device)

    def ready(each: Wanted, length: int) -> Contender | None:
        made = functools.partial(_ready, each, model, batch, length, backend)
        return run.attempt(each, made)

    # one cache of ours serves all lengths, because a step reads stored tokens, not unused capacity
    ours = {each: ready(each, max(n for n in lengths if each.at(n))) for each in wanted if not each.is_host}
    for length in lengths:
        present = {each: prepared for each, prepared in ours.items() if each.at(length)}
        present |= {each: ready(each, length) for each in wanted if each.is_host and each.at(length)}
        prepared = [each for each in present.values() if each is not None]
        for record in measure(prepared, length, bandwidth, steps, rounds, run):
            run.add(record)
        del present, prepared
        gc.collect()
    sizes = "peak_bytes:GB", "cache_bytes:GB"
    times = "step_ms:.2f", "limit_ms:.2f", "tokens_per_second:.1f"
    run.end("batch", "tokens", "cache", "backend", "mode", *times, *sizes, "device_ms", "synchronisations:.2f")


def _ready(wanted: Wanted, model: Any, batch: int, length: int, backend: str | None) -> Contender:
    """A contender with a compiled step. Caches of fixed size have room for `length + HEADROOM` tokens."""
    chosen_backend = None if wanted.is_host else wanted.backend or backend
    contender = make(wanted.name, wanted.mode, model, batch, length + HEADROOM, chosen_backend)
    begin = time.perf_counter()
    contender.compile()
    if contender.mode != "eager":
        print(f"{contender.label}: ready in {time.perf_counter() - begin:.0f} s")
    return contender


# ---- weights ----------------------------------------------------------------------------------------------------------


def measure_weights(
    model: Any, weights: str, preset: str, batch: int, tokens: int, mode: str = "recorded"
) -> dict[str, Any]:
    """A record without provenance. mode: `recorded`, or `unfused`: only the model's own operations.

    Raises:
        DisagreementError: recorded steps and eager steps give different results.
    """
    contender = make(preset, mode, model, batch, tokens + HEADROOM)
    contender.compile()
    contender.fill(tokens)
    checked = agreement(contender)
    samples = [ms for _ in range(2) for ms in contender.steps_ms(16)]
    cuda = model.device.type == "cuda"
    return {
        "weights": weights,
        "meaning": WEIGHT_QUANTIZATIONS[weights].meaning,
        "preset": preset,
        "mode": mode,
        "batch": batch,
        "tokens": tokens,
        "step_ms": statistics.median(samples),
        "decoding_steps": contender.cache.decoding_steps,
        "weight_bytes": stored_bytes(model),
        "cache_bytes": contender.cache_bytes(),
        "allocated_bytes": torch.cuda.memory_allocated(model.device) if cuda else None,
        **checked,
    }


def time_weights(
    weights: Annotated[list[str] | None, typer.Option(help="Weights; repeatable [default: all].")] = None,
    preset: PresetNames = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"ROWSxTOKENS; repeatable [default: {', '.join(SHAPES)}].")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="recorded, or unfused: activations in 8 bits differ much for a last bit.")
    ] = "recorded",
    layers: Layers = 32,
    tiny: Tiny = False,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Check and time presets under each kind of weights, and append a JSON line for each."""
    names = weights or list(WEIGHT_QUANTIZATIONS)
    for name in names:
        check_weights(name)
    shapes = [BatchSize.parse(each) for each in shape or SHAPES]
    run = Run("weights-steps", f"{device}:0" if device == "cuda" else device, commit, out)
    state = random_8b(run, layers, tiny).state_dict()
    run.common["dtype"] = str(run.dtype).removeprefix("torch.")
    config = llama_8b(layers, tiny)
    for name in names:
        model = run.attempt(name, functools.partial(load_quantized, config, name, run.device, run.dtype, state))
        if model is None:
            continue
        model.generation_config.eos_token_id = None
        for (batch, tokens), each in itertools.product(shapes, preset or PRESETS):
            work = functools.partial(measure_weights, model, name, each, batch, tokens, mode)
            if (record := run.attempt(f"{name} {each} {batch}x{tokens}", work)) is not None:
                run.add(record)
            gc.collect()
        del model, work
        clean(run.device)
    sizes = "weight_bytes:GB", "cache_bytes:GB"
    run.end("weights", "preset", "batch", "tokens", "step_ms:.2f", *sizes, "logits_error:.3f", "decoding_steps")


if __name__ == "__main__":
    run_command(caches=time_caches, weights=time_weights)
