"""Decoding with `generate`, compared with transformers' caches:
`python -m hf_lowbit_kv.eval.benchmarks.bench_generate`.

A model of the 8B Llama 3.1 shape with random weights decodes. Its caches are filled with random keys and values to a
given length. The contenders are timed in one process, one after the other in each round. A contender is timed only
after its compiled tokens agree with the eager tokens of the same cache (`agreement`).

- `step_ms`: median time of a step of `generate`, from one call of a logits processor to the next. CPU work, waiting and
  sampling are included. `mean_ms`: mean over a whole page of steps, packing included.
- `device_ms`: GPU time of a step, by kind of work. `kernels`: the most expensive kernels (name, ms, launches). Two
  compilations of a model differ, because the tiles of products are searched again each time.
- `limit_ms`: time to read weights and stored bytes once, at the bandwidth measured in the same run.
- `prefill_s`: seconds to read a prompt of this length with this cache, if measured.
- `peak_bytes`: the allocator's peak in a step, without the caches of other contenders.
- `mode`: `eager`; `recorded`: in a CUDA graph with fused pieces, the default of `lb.generate`; `unfused`: the eager
  step in a CUDA graph; `compiled`: transformers' own compilation; `tuned`: compiled with `lb.generate`'s settings, or
  with the record's `compile_options`.
- `decoding_steps`: the pieces that were fused.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, LogitsProcessor

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.bench_memory import PeakMemory, llama_8b, random_model
from hf_lowbit_kv.eval.benchmarks.contenders import HEADROOM, Contender, make
from hf_lowbit_kv.eval.benchmarks.timing import profile_steps, read_bandwidth
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)

#: contenders of a run without options: `name[:backend]/mode`
CONTENDERS = (
    *("DynamicCache/eager", "StaticCache/compiled", "dense/tuned", "kivi-2/tuned", "kivi-4/tuned", "int8/tuned"),
    *("dense/recorded", "kivi-4-sink/recorded", "kivi-4-sink/unfused"),
)
#: largest allowed relative error of logits between compiled and eager steps in 16 bits. Fused arithmetic rounds less
#: often (transformers' own compiled step has an error of 0.06 on random weights)
LOGITS_TOLERANCE = 0.1
console = wide_console()


class DisagreementError(RuntimeError):
    """Compiled steps and eager steps give different results, so nothing was timed."""


def agreement(contender: Contender, steps: int = 8) -> dict[str, Any]:
    """Compare compiled steps with eager steps. Both start from the same cache and follow the greedy tokens of the eager
    steps.

    In 16 bits the two round differently. `logits_error` is the largest relative error of a step's logits.
    `tokens_equal` is the number of steps in which the likeliest token is the same in all rows. Tokens may differ only
    if the logits of the two likeliest tokens are close: no further apart than six times the typical (root mean square)
    difference of a logit.

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
        best = x.float().topk(2, dim=-1).values
        apart = (best[:, 0] - best[:, 1]) > 6 * difference.square().mean(-1).sqrt()
        same = x.argmax(-1) == y.argmax(-1)
        if not bool(same[apart].all()):
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


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all except the embedding, because a step reads only one of its rows per
    token."""
    embedding = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embedding)


def prefill_seconds(contender: Contender, tokens: int) -> float:
    """Seconds to read a random prompt `[batch, tokens]` and write one token. A short prompt warms up before."""
    model = contender.model
    ids = torch.randint(0, model.config.vocab_size, (contender.batch, tokens), device=model.device)
    for prompt in (ids[:, :512], ids):
        contender.put_away()
        contender.cache.reset()
        _wait(model.device)
        begin = time.perf_counter()
        contender.generate(prompt, 1)
        _wait(model.device)
        seconds = time.perf_counter() - begin
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    contenders: list[Contender],
    tokens: int,
    bandwidth: float,
    steps: int,
    rounds: int,
    prefill_tokens: int,
    faults: list[str],
) -> list[dict[str, Any]]:
    """Check contenders at one length. Then time those that pass, one after the other in each round."""
    records: dict[Contender, dict[str, Any]] = {}
    for contender in contenders:
        if (
            record := _attempt(faults, contender.label, functools.partial(_checked, contender, tokens, bandwidth))
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
        record["mean_ms"] = statistics.mean(contender.steps_ms(128)) if contender.ours else None
        if contender.model.device.type == "cuda":
            profile = _attempt(faults, contender.label, functools.partial(profile_steps, contender, 8))
            if profile is not None:
                record["device_ms"] = {kind: round(ms, 4) for kind, ms in profile["device_ms"].items()}
                counted = ("kernels", "graph_launches", "kernel_launches", "synchronisations")
                record |= {key: profile[key] for key in counted}
        contender.put_away()
    for contender, record in records.items():
        measured = tokens * contender.batch <= prefill_tokens
        record["prefill_s"] = prefill_seconds(contender, tokens) if measured else None
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


class Wanted(NamedTuple):
    """A contender as named on the command line."""

    name: str
    backend: str | None
    mode: str
    longest: int | None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Parse `NAME[:BACKEND]/MODE[@TOKENS]`. The contender is timed at lengths up to TOKENS."""
        match = re.fullmatch(r"([^:/@]+)(?::(\w+))?/(eager|recorded|unfused|compiled|tuned)(?:@(\d+))?", text)
        if match is None:
            raise ValueError(
                f"contender={text!r} is not understood; allowed: NAME[:BACKEND]/MODE[@TOKENS], MODE eager, recorded, "
                "unfused, compiled or tuned"
            )
        return cls(match[1], match[2], match[3], int(match[4]) if match[4] else None)

    @property
    def is_host(self) -> bool:
        return is_host(self.name)

    def at(self, length: int) -> bool:
        return self.longest is None or length <= self.longest


def main(
    contender: Annotated[
        list[str] | None, typer.Option(help="NAME[,sink=N][,residual=N][:BACKEND]/MODE[@LONGEST].")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens attended to; repeatable [default: 1k, 8k, 32k, 128k].")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backend of our caches where none is named.")] = None,
    model_name: Annotated[
        str | None, typer.Option("--model", help="Folder or hub name [default: random weights of an 8B shape].")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model of an 8B shape.")] = 32,
    tiny: Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of a sample.")] = 16,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 3,
    prefill_tokens: Annotated[
        int, typer.Option(help="Measure prefill up to so many tokens, all rows together.")
    ] = 32768,
    compile_options: Annotated[str | None, typer.Option(help="Mode `tuned`: inductor's options, as JSON.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines [default: eval/results/generate-<device>.jsonl].")
    ] = None,
) -> None:
    """Check and time, and append a JSON line for each contender and length."""
    where = torch.device(device)
    lengths = sorted(tokens or [1024, 8192, 32768, 131072])
    wanted = [Wanted.parse(text) for text in contender or CONTENDERS]
    if idle := [text for text, each in zip(contender or CONTENDERS, wanted, strict=True) if not each.at(lengths[0])]:
        raise typer.BadParameter(f"contender={idle[0]!r} takes part in none of the lengths, tokens={lengths}")
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    if model_name is None:
        model = random_model(shape_8b(layers, tiny), dtype, where)
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_name, dtype=dtype, attn_implementation=lb.ATTENTION_NAME
        )
        model = loaded.to(where).eval()
        model.generation_config = GenerationConfig()  # no end of the text, no sampling
        model.config.max_position_embeddings = 2**21  # beyond it transformers warns
        if getattr(model.config, "head_dim", None) is None:
            model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    bandwidth = read_bandwidth(where)
    out = out or results_path("generate", device_name(where))
    faults: list[str] = []
    settings = {"model": model, "batch": batch, "backend": backend, "options": json.loads(compile_options or "null")}
    # one cache of ours serves all lengths, because a step reads stored tokens, not unused capacity
    ours = {}
    for each in wanted:
        if not each.is_host:
            longest = max(length for length in lengths if each.at(length))
            ours[each] = _attempt(faults, each, functools.partial(_ready, each, length=longest, **settings))
    records = []
    for length in lengths:
        present = {each: prepared for each, prepared in ours.items() if each.at(length)}
        for each in wanted:
            if each.is_host and each.at(length):
                present[each] = _attempt(faults, each, functools.partial(_ready, each, length=length, **settings))
        ready = [prepared for prepared in present.values() if prepared is not None]
        measured = measure(ready, length, bandwidth, steps, rounds, prefill_tokens, faults)
        for record in measured:
            record |= {
                "gpu": device_name(where),
                "model": model_name or ("tiny" if tiny else f"llama-8b-shape-{layers}-layers"),
                "dtype": str(model.dtype).removeprefix("torch."),
                "filled": "random keys and values, the same in every layer",
                "steps": steps * rounds,
            } | provenance(commit)
            if settings["options"] is not None and record["mode"] == "tuned":
                record["compile_options"] = settings["options"]
            append_record(out, record)
        records += measured
        console.print(table(measured))
        del present, ready
        gc.collect()
    for line in crossovers(records):
        console.print(line)
    for fault in faults:
        console.print(f"FAILED, not recorded: {fault}", markup=False)
    if faults:
        raise typer.Exit(1)


def _attempt(faults: list[str], title: Any, work: Callable[[], Any]) -> Any:
    """The result of `work`, or `None` if it raises, so that a failure does not stop the measurements that follow."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        faults.append(f"{title}: {type(error).__name__}: {error}")
        return None


def shape_8b(layers: int, tiny: bool) -> Any:
    config = llama_8b(layers)
    config.max_position_embeddings = 2**21  # beyond it transformers warns; positions are rotated by the same code
    if tiny:
        small = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        config.update({**small, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 97})
    return config


def is_host(name: str) -> bool:
    return name.endswith("Cache") or name.startswith("quanto")


def _ready(wanted: Wanted, model: Any, batch: int, length: int, backend: str | None, options: dict | None) -> Contender:
    """A contender with a compiled step. Caches of fixed size have room for `length + HEADROOM` tokens."""
    chosen_backend = None if wanted.is_host else wanted.backend or backend
    contender = make(wanted.name, wanted.mode, model, batch, length + HEADROOM, chosen_backend)
    contender.compile_config = None if options is None else CompileConfig(mode=None, options=options)  # type: ignore[arg-type]
    begin = time.perf_counter()
    contender.compile()
    if contender.mode != "eager":
        console.print(f"{contender.label}: ready in {time.perf_counter() - begin:.0f} s")
    return contender


def crossovers(records: list[dict[str, Any]]) -> list[str]:
    """For each pair of our caches and transformers' caches: the shortest length from which on ours is always faster."""
    lines = []
    for theirs in sorted({(r["cache"], r["mode"]) for r in records if is_host(r["cache"])}):
        for ours in sorted({(r["cache"], r["mode"]) for r in records if not is_host(r["cache"])}):
            times = {which: _times(records, which) for which in (ours, theirs)}
            lengths = sorted(times[ours].keys() & times[theirs].keys())
            slower = [n for n in lengths if times[ours][n] >= times[theirs][n]]
            faster = [n for n in lengths if not slower or n > slower[-1]]
            since = f"faster from {faster[0]} tokens" if faster else "not faster at any length"
            lines.append(f"{'/'.join(ours)} against {'/'.join(theirs)}: {since} (of {lengths})")
    return lines


def _times(records: list[dict[str, Any]], which: tuple[str, str]) -> dict[int, float]:
    return {r["tokens"]: r["step_ms"] for r in records if (r["cache"], r["mode"]) == which}


def table(records: list[dict[str, Any]]) -> Table:
    """A short table of the records."""
    out = Table(
        "batch",
        "tokens",
        "cache",
        "ms",
        "limit",
        "x limit",
        "mean",
        "busy",
        "prefill s",
        "peak GB",
        "cache GB",
        "syncs",
    )
    for r in records:
        busy = r.get("device_ms", {}).get("total")
        values = (r["step_ms"], r["limit_ms"], r["step_ms"] / r["limit_ms"], r.get("mean_ms"), busy, r["prefill_s"])
        sizes = (None if r[key] is None else r[key] / 1e9 for key in ("peak_bytes", "cache_bytes"))
        name = "/".join(filter(None, (r["cache"], r["backend"], r["mode"])))
        cells = ["-" if x is None else f"{x:.2f}" for x in (*values, *sizes, r.get("synchronisations"))]
        out.add_row(str(r["batch"]), str(r["tokens"]), name, *cells)
    return out


if __name__ == "__main__":
    run_command(main)
