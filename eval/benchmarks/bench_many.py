"""Many requests: `python -m hf_lowbit_kv.eval.benchmarks.bench_many`.

The model has the shape of Llama 3.1 8B and random weights. Measurements:

- `steps`: median time of a decode step with `n` rows of one length, in a pool and in a recorded batch of `lb.generate`.
  The pool has `n` slots. `padded_ms`: the same rows in a pool of `--slots` slots, whose steps run with `padded` rows.
- `ragged`: the same with rows of different lengths, so that some row fills a page in most steps. The time is the mean
  over as many steps as a page has tokens. `round_ms` is a whole round of the scheduler with such rows, `cpu_ms` the
  CPU's work in it.
- `many`: `lb.generate_many` on requests with prompts of 200 to 8000 tokens and answers of two kinds.
- `predicted`: seconds of `lb.generate` on the same requests in batches within the same memory, for three orders and
  five batch sizes. They are computed from times of prompts and steps, measured before by `steps` or `ragged`.
- `static`: runs of the `static_runs` orders and batch sizes with the fewest predicted seconds.
- `packed`: `model.generate_batch` under `lb.enable`: transformers' own scheduler on packed pages.
- `peer`: transformers' own scheduler in 16 bits, on the first requests, for at most `peer_seconds`.

Separate columns show GPU time of prompts and of decode steps. Before each of these runs the same call runs once with
prompts and answers cut short, outside of the timing: kernels are compiled then.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from rich.table import Table

import hf_lowbit_kv as lb
from hf_lowbit_kv.byte_sizes import parse_size
from hf_lowbit_kv.cache.implementation import selected
from hf_lowbit_kv.eval.benchmarks.bench_memory import llama_8b, random_model
from hf_lowbit_kv.eval.benchmarks.contenders import StepClock
from hf_lowbit_kv.eval.benchmarks.many_workloads import BATCH_SIZES, SORTINGS, Cost, Job, batches, jobs
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command, wide_console
from hf_lowbit_kv.requests.generate_many import CHUNK_SIZE
from hf_lowbit_kv.requests.memory_budget import pool_size
from hf_lowbit_kv.requests.pool_steps import PoolSteps, padded_rows, read_once, stored_layers
from hf_lowbit_kv.requests.row_pool import RowPool
from hf_lowbit_kv.requests.scheduler import Scheduler

PARTS = ("steps", "ragged", "many", "predicted", "static", "packed", "peer")
ROWS = (1, 7, 33, 64)
STEPS = 24
#: steps with ragged rows: as many as a page has tokens
RAGGED_STEPS = 128
#: number of requests for transformers' own scheduler
PEER_REQUESTS = 50
console = wide_console()


class DeviceTime:
    """GPU seconds of calls of methods; on the CPU, wall-clock seconds."""

    def __init__(self, device: torch.device):
        self.device, self._marks = device, {}  # type: ignore[var-annotated]

    @contextmanager
    def of(self, name: str, cls: type, method: str) -> Iterator[None]:
        """Inside this context, calls of the method count as `name`."""
        original = getattr(cls, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            out = original(*args, **kwargs)
            self._marks.setdefault(name, []).append((begin, self._now()))
            return out

        setattr(cls, method, timed)
        try:
            yield
        finally:
            setattr(cls, method, original)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, name: str) -> float:
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in self._marks.get(name, []))
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in self._marks.get(name, [])) / 1e3

    def count(self, name: str) -> int:
        return len(self._marks.get(name, []))


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---- steps ------------------------------------------------------------------------------------------------------------


def lengths_of(rows: int, length: int, ragged: bool) -> list[int]:
    """Tokens of each row. Ragged rows differ by one token each, so that they fill their pages at different steps."""
    return [length - row if ragged else length for row in range(rows)]


def middle(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def pool_steps_ms(model: Any, preset: str, lengths: list[int], count: int, slots: int) -> list[float]:
    """Milliseconds of decode steps of a pool of `slots` slots with rows of these lengths. Steps are recorded if the
    device has graphs."""
    template = lb.from_preset(preset, model, max_cache_len=64)
    with selected(model):
        read_once(model, template, 64)
        layers, room = stored_layers(template), max(lengths) + count + 16
        pool = RowPool(layers, slots, len(lengths) * (room + 128), room)
        steps = PoolSteps(model, template, pool)
        members = [pool.enter(room) for _ in lengths]
        for row, length in zip(members, lengths, strict=True):
            for chunk in torch.randint(0, model.config.vocab_size, (length,)).split(2048):
                steps.read(row, chunk)
        clock: Any = StepClock(model.device)
        for _ in range(count + 6):
            logits = steps.decode(members)
            steps.newest[: len(members)] = logits[: len(members)].argmax(-1)
            clock(None, None)
        times = clock.steps_ms(5)
        steps.free()
    return times


def batch_steps_ms(
    model: Any, preset: str, lengths: list[int], count: int, read: dict[str, float] | None = None
) -> list[float]:
    """Milliseconds of decode steps of `lb.generate` with a batch of these rows, padded on the left. `read` gets
    `batch_token_s`, the prompts' seconds divided by their tokens, padding included."""
    ids = torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    clock = StepClock(model.device)
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "progress": False, "logits_processor": [clock]}
    start: Any = StepClock(model.device)
    start(None, None)
    lb.generate(model, inputs, preset, count + 7, prefill_chunk_size=256, **options)
    lb.release(model)
    if read is not None:
        read["batch_token_s"] = between(model.device, start, clock) / ids.numel()
    return clock.steps_ms(5)


def between(device: torch.device, start: StepClock, clock: StepClock) -> float:
    """Seconds from the first tick of `start` to the first tick of `clock`."""
    begin, end = start.ticks[0], clock.ticks[0]
    if device.type != "cuda":
        return end - begin
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


@contextmanager
def cpu_rounds(rows: int) -> Iterator[list[float]]:
    """CPU milliseconds of each round in which all rows decode, without waiting for the GPU."""
    measured: list[float] = []
    waits = [0.0]
    advance, synchronize = Scheduler.advance, torch.cuda.Event.synchronize

    def waiting(self: Any) -> None:
        begin = time.perf_counter()
        synchronize(self)
        waits[0] += time.perf_counter() - begin

    def timed(self: Any) -> bool:
        waits[0], all_decode, begin = 0.0, len(self.decoding) == rows, time.perf_counter()
        more = advance(self)
        if all_decode:
            measured.append(1e3 * (time.perf_counter() - begin - waits[0]))
        return more

    Scheduler.advance, torch.cuda.Event.synchronize = timed, waiting  # type: ignore[method-assign]
    try:
        yield measured
    finally:
        Scheduler.advance, torch.cuda.Event.synchronize = advance, synchronize  # type: ignore[method-assign]


def rounds_ms(model: Any, preset: str, lengths: list[int], count: int, cpu: dict[str, float]) -> list[float]:
    """Milliseconds between the times at which the CPU receives a row's tokens, while `generate_many` decodes all these
    rows. `cpu` gets `cpu_ms`, the median CPU time of a round, launches included."""
    rows = len(lengths)
    requests = [
        {"input_ids": torch.randint(0, model.config.vocab_size, (length,)), "max_new_tokens": count + rows - row + 12}
        for row, length in enumerate(lengths)
    ]
    options: dict[str, Any] = {"do_sample": False, "max_rows": rows, "progress": False, "share_prefixes": False}
    with cpu_rounds(rows) as of_cpu:
        results = lb.generate_many(model, requests, preset, **options)
    cpu["cpu_ms"] = middle(of_cpu[6:])
    times = results[-1].timestamps[6 : 6 + count]
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]


def measure_steps(
    model: Any, preset: str, length: int, rows: list[int], ragged: bool, slots: int
) -> Iterator[dict[str, Any]]:
    steps, of = (RAGGED_STEPS, statistics.mean) if ragged else (STEPS, middle)
    for count in rows:
        lengths = lengths_of(count, length, ragged)
        record: dict[str, Any] = {"part": "ragged" if ragged else "steps", "rows": count, "length": length}
        clean(model.device)
        record["batch_ms"] = of(batch_steps_ms(model, preset, lengths, steps, record))
        clean(model.device)
        record["pool_ms"] = of(pool_steps_ms(model, preset, lengths, steps, count))
        clean(model.device)
        padded = min(size for size in padded_rows(max(slots, count)) if size >= count)
        if padded > count:
            record |= {"slots": slots, "padded": padded}
            record["padded_ms"] = of(pool_steps_ms(model, preset, lengths, steps, slots))
            clean(model.device)
        record["round_ms"] = of(rounds_ms(model, preset, lengths, steps, record))
        names = [name for name in ("batch_ms", "pool_ms", "padded_ms", "round_ms", "cpu_ms") if name in record]
        numbers = ", ".join(f"{name[:-3]} {record[name]:.2f} ms" for name in names)
        console.print(f"{record['part']}, {count} rows: {numbers}")
        yield record


# ---- workloads ----------------------------------------------------------------------------------------------------------


def cut_short(work: list[Job], whole: int = 24) -> list[Job]:
    """The requests with short answers, each of which ends at another step. The first prompts are whole, so that there are
    chunks of many lengths after others; the rest have 64 tokens at most."""
    return [Job(job.prompt if index < whole else job.prompt[:64], 3 + index) for index, job in enumerate(work)]


def first_tokens(grouped: list[list[Job]]) -> list[list[Job]]:
    """The largest of some static batches, with answers of 3 and the ends of prompts, at most three chunks of them."""
    largest = max(grouped, key=len)
    tokens = 2 * max(CHUNK_SIZE // len(largest), 128) + 64
    return [[Job(job.prompt[-tokens:], 3) for job in largest]]


def measure_many(model: Any, preset: str, work: list[Job], memory: int, chunk: int) -> dict[str, Any]:
    clean(model.device)
    requests = [{"input_ids": job.prompt, "max_new_tokens": job.answer} for job in work]
    clock, pools = DeviceTime(model.device), list[tuple[int, int]]()

    def noted(self: Any, *args: Any) -> None:
        began(self, *args)
        pools.append((self.pool.slots, self.pool.memory.nbytes))

    cls: Any = PoolSteps
    began = cls.__init__
    begin = time.perf_counter()
    with clock.of("prompt", PoolSteps, "read"), clock.of("decode", PoolSteps, "decode"):
        cls.__init__ = noted
        try:
            results = lb.generate_many(
                model, requests, preset, memory=memory, do_sample=False, prefill_chunk_size=chunk, progress=False
            )
        finally:
            cls.__init__ = began
    seconds = time.perf_counter() - begin
    written = sum(len(result.generated_tokens) for result in results)
    assert written == sum(job.answer for job in work), {result.error for result in results}
    return {
        "seconds": seconds,
        "prompt_s": clock.seconds("prompt"),
        "decode_s": clock.seconds("decode"),
        "steps": clock.count("decode"),
        "tokens": written,
        "tokens_per_s": written / seconds,
        "slots": pools[0][0],
        "pool_bytes": pools[0][1],
    }


def row_bytes_of(model: Any, preset: str) -> Any:
    """A function from the tokens of a row to its bytes in the cache of `lb.generate`."""
    template = lb.from_preset(preset, model, max_cache_len=64)
    with selected(model), torch.no_grad():
        read_once(model, template, 8)
    layers = stored_layers(template)

    def row_bytes(tokens: int) -> int:
        pages = sum(layer.page_bytes * layer.spec.pages_for(tokens) for layer in layers)
        return pages + sum(layer.window_bytes for layer in layers)

    return row_bytes


def measure_static(model: Any, preset: str, grouped: list[list[Job]], chunk: int) -> dict[str, Any]:
    clean(model.device)
    device, prompt_s, begin = model.device, 0.0, time.perf_counter()
    for batch in grouped:
        longest = max(len(job.prompt) for job in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prompt) :], mask[row, longest - len(job.prompt) :] = job.prompt, 1
        clock = StepClock(device)
        start: Any = StepClock(device)
        start(None, None)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "progress": False}
        size = max(chunk // len(batch), 128)
        lb.generate(
            model,
            inputs,
            preset,
            max(job.answer for job in batch),
            logits_processor=[clock],
            prefill_chunk_size=size,
            **options,
        )
        prompt_s += between(device, start, clock)
    seconds = time.perf_counter() - begin
    lb.release(model)
    written = sum(job.answer for batch in grouped for job in batch)
    return {
        "seconds": seconds,
        "prompt_s": prompt_s,
        "decode_s": seconds - prompt_s,
        "steps": sum(max(job.answer for job in batch) for batch in grouped),
        "tokens": written,
        "tokens_per_s": written / seconds,
    }


def measure_batching(model: Any, work: list[Job], most_seconds: float | None = None, **batching: Any) -> dict[str, Any]:
    """Run transformers' own scheduler, with the attention and the cache that the model has now.

    Args:
        most_seconds: stop after this time, even if requests are left.
    """
    clean(model.device)
    options = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": max(job.answer for job in work)}
    config = model.generation_config.__class__(**options)
    written, done = dict.fromkeys(range(len(work)), 0), 0
    begin = time.perf_counter()
    manager = model.init_continuous_batching(generation_config=config, **batching)
    manager.start()
    try:
        names = {
            manager.add_request(
                job.prompt.tolist(), max_new_tokens=job.answer, streaming=most_seconds is not None
            ): index
            for index, job in enumerate(work)
        }
        while done < len(work) and (most_seconds is None or time.perf_counter() - begin < most_seconds):
            if (result := manager.get_result(timeout=1)) is None:
                if not manager.is_running():
                    raise RuntimeError(f"the scheduler has ended: {manager.background_thread_status.fatal_error}")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            written[names[result.request_id]] = len(result.generated_tokens)
            done += result.is_finished()
        seconds = time.perf_counter() - begin
    finally:
        # the default stop would first write all answers that are left
        manager.stop(block=True, hard_stop=done < len(work))
    tokens = sum(written.values())
    attention = model.config._attn_implementation
    facts = {"attention": attention, "ended": done, "transformers": transformers.__version__}
    return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, **facts}


def measure_packed(model: Any, preset: str, work: list[Job], memory: int, sized_for: list[Job]) -> dict[str, Any]:
    """Run transformers' own scheduler on packed pages. Its pool is as large as that of `lb.generate_many` for the
    requests `sized_for`."""
    template = lb.from_preset(preset, model, max_cache_len=64)
    with selected(model), torch.no_grad():
        read_once(model, template, 8)
    limits = [len(job.prompt) + job.answer for job in sized_for]
    size = pool_size(stored_layers(template), memory, limits, None, None, True)
    pages = size.tokens // template.spec.page_size
    config = transformers.ContinuousBatchingConfig(num_blocks=pages, max_requests_per_batch=size.slots)
    lb.enable(model, preset)
    try:
        return {"rows": size.slots} | measure_batching(model, work, continuous_batching_config=config)
    finally:
        lb.disable(model)


def measure_peer(model: Any, work: list[Job], most_seconds: float) -> dict[str, Any]:
    """Run transformers' own scheduler in the model's dtype."""
    model.set_attn_implementation("sdpa")
    return measure_batching(model, work, most_seconds)


class Batching(NamedTuple):
    """Static batches of all requests."""

    sorting: str
    rows: int
    """most rows of a batch"""
    grouped: list[list[Job]]
    predicted_s: float


def ranked_batchings(work: list[Job], cost: Cost, row_bytes: Any, memory: int) -> list[Batching]:
    """All orders and batch sizes, by their predicted seconds."""
    ranked = []
    for sorting, rows in itertools.product(SORTINGS, BATCH_SIZES):
        grouped = batches(work, sorting, rows, row_bytes, memory)
        ranked.append(Batching(sorting, rows, grouped, cost.predicted(grouped)))
    return sorted(ranked, key=lambda batching: batching.predicted_s)


def different(ranked: list[Batching]) -> list[Batching]:
    """Without those whose batches are as large as those of one before them in the same order: memory, not the batch size,
    limits both."""
    first: dict[Any, Batching] = {}
    for each in ranked:
        first.setdefault((each.sorting, *map(len, each.grouped)), each)
    return list(first.values())


def main(
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(PARTS)}; repeatable [default: steps, many, static]."),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset.")] = "kivi-4-sink",
    requests: Annotated[int, typer.Option(help="Requests.")] = 200,
    static_runs: Annotated[int, typer.Option(help="Static: so many orders and batch sizes, the fastest first.")] = 1,
    first: Annotated[int | None, typer.Option(help="Of the requests, take only so many.")] = None,
    answers: Annotated[list[str] | None, typer.Option(help="long-tailed, 50-500; repeatable.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of pool and caches.")] = "24GB",
    peer_seconds: Annotated[float, typer.Option(help="Most seconds of transformers' scheduler in 16 bits.")] = 300,
    chunk: Annotated[int, typer.Option(help="Tokens of prompts read at a time.")] = 2048,
    length: Annotated[int, typer.Option(help="Tokens of a row, where steps are timed.")] = 2000,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of the steps; repeatable [default: 1, 7, 33, 64].")
    ] = None,
    slots: Annotated[int, typer.Option(help="Slots of the pool of padded steps.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    tiny: Annotated[bool, typer.Option(help="A tiny model and few requests, for a dry run.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/many-<device>.jsonl].")] = None,
) -> None:
    """Measure, and append a JSON line for each part and kind of answers."""
    where, wanted = torch.device(device), part or ["steps", "many", "static"]
    if unknown := [name for name in wanted if name not in PARTS]:
        raise typer.BadParameter(f"part={unknown[0]!r} is not known; allowed: {', '.join(PARTS)}")
    config = llama_8b(layers)
    rows = rows or list(ROWS)
    prompts = 200, 8000
    if tiny:
        small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
        config.update(small | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64})
        rows, prompts = [1, 3], (20, 300)
        answers, requests, length = ["tiny"], min(requests, 12), 200
    model = random_model(config, torch.float32 if where.type == "cpu" else torch.bfloat16, where)
    size, out = parse_size(memory), out or results_path("many", device_name(where))
    facts = {"preset": preset, "memory": size, "chunk": chunk, "gpu": device_name(where)}
    facts |= {"model": "tiny" if tiny else f"llama-3.1-8b-shape-{layers}-layers"} | provenance(commit)
    shown = Table("part", "answers", "seconds", "prompt s", "decode s", "steps", "tokens/s", "rows")
    cost = Cost(1 / 20_000, {1: 7.0, 64: 12.0})

    def note(record: dict[str, Any]) -> None:
        append_record(out, record | facts)
        numbers = [f"{record[key]:.1f}" if key in record else "" for key in ("seconds", "prompt_s", "decode_s")]
        rate = f"{record['tokens_per_s']:.0f}"
        shown.add_row(
            record["part"], record["answers"], *numbers, str(record.get("steps", "")), rate, str(record.get("rows", ""))
        )

    def time_steps(ragged: bool) -> Cost:
        records = []
        for record in measure_steps(model, preset, length, rows, ragged, slots):
            append_record(out, record | facts)
            records.append(record)
        return Cost(records[-1]["batch_token_s"], {record["rows"]: record["batch_ms"] for record in records})

    def run_static(each: Batching) -> dict[str, Any]:
        measure_static(model, preset, first_tokens(each.grouped), chunk)
        chosen = {"part": "static", "rows": each.rows, "sorting": each.sorting}
        return chosen | measure_static(model, preset, each.grouped, chunk)

    if steps_first := wanted[0] in ("steps", "ragged"):
        cost = time_steps(wanted[0] == "ragged")
    kinds = {
        kind: jobs(requests, kind, model.config.vocab_size, prompts)[:first]
        for kind in answers or ["long-tailed", "50-500"]
    }
    static: dict[str, list[Batching]] = {}
    of_kind = {kind: {"answers": kind, "requests": len(work)} for kind, work in kinds.items()}
    for kind, work in kinds.items():
        if "many" in wanted:
            measure_many(model, preset, cut_short(work), size, chunk)
            record = measure_many(model, preset, work, size, chunk)
            note({"part": "many", "rows": record["slots"]} | of_kind[kind] | record)
            if not steps_first:  # from the mean of its steps
                mean = max(sum(job.answer for job in work) / record["steps"], 1)
                token_s = record["prompt_s"] / sum(len(job.prompt) for job in work)
                cost = Cost(token_s, {1: 7.0, round(mean): 1e3 * record["decode_s"] / record["steps"]})
        if {"predicted", "static"} & {*wanted}:
            ranked = ranked_batchings(work, cost, row_bytes_of(model, preset), size)
            of_kind[kind]["predicted_s"] = {f"{each.sorting}, {each.rows}": each.predicted_s for each in ranked}
            if "predicted" in wanted:
                best = ranked[0]
                prompt_s, decode_s = cost.parts(best.grouped)
                record = {"seconds": prompt_s + decode_s, "prompt_s": prompt_s, "decode_s": decode_s}
                record["tokens_per_s"] = sum(job.answer for job in work) / record["seconds"]
                record |= {"rows": best.rows, "sorting": best.sorting, "cost": cost._asdict()}
                note({"part": "predicted"} | of_kind[kind] | record)
            static[kind] = different(ranked)[:static_runs] if "static" in wanted else []
            for each in static[kind][:1]:
                note(of_kind[kind] | run_static(each))
    for kind, batchings in static.items():  # after the fastest ones of all kinds of answers
        for each in batchings[1:]:
            note(of_kind[kind] | run_static(each))
    for kind, work in kinds.items():
        if "packed" in wanted:
            measure_packed(model, preset, cut_short(work), size, work)
            record = measure_packed(model, preset, work, size, work)
            note({"part": "packed", "answers": kind, "requests": len(work)} | record)
        if "peer" in wanted:
            of_peer = {"part": "peer", "answers": kind, "requests": PEER_REQUESTS}
            measure_peer(model, cut_short(work[:8]), peer_seconds)
            note(of_peer | measure_peer(model, work[:PEER_REQUESTS], peer_seconds))
    console.print(shown)
    for part_of_steps in ("steps", "ragged"):
        if part_of_steps in wanted[1 if steps_first else 0 :]:
            time_steps(part_of_steps == "ragged")


if __name__ == "__main__":
    run_command(main)
