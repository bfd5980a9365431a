"""Many requests: `python -m hf_lowbit_kv.eval.benchmarks.bench_many`.

The model has the shape of Llama 3.1 8B and random weights. Measurements:

- `steps`: median time of a decode step with `n` rows of one length, in a pool and in a recorded batch of `lb.generate`.
  The pool has `n` slots. `padded_ms`: the same rows in a pool of `SLOTS` slots, whose steps run with `padded` rows.
- `ragged`: the same with rows of different lengths, so that some row fills a page in most steps. The time is the mean
  over as many steps as a page has tokens. `round_ms` is a whole round of the scheduler with such rows.
- `many`: `lb.generate_many` on requests with prompts of 200 to 8000 tokens and answers of two kinds.
- `static`: `lb.generate` on the same requests in batches within the same memory, in each `--static` order with its
  largest batch size.
- `packed`: `model.generate_batch` under `lb.enable`: transformers' own scheduler on packed pages.
- `peer`: transformers' own scheduler in 16 bits, on the first requests, for at most `peer_seconds`.

Separate columns show GPU time of prompts and of decode steps. Before each of these runs the same call runs once with
prompts and answers cut short, outside of the timing: kernels are compiled then.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.byte_sizes import parse_size
from hf_lowbit_kv.cache.implementation import selected
from hf_lowbit_kv.eval.benchmarks.random_models import StepClock, clean, random_8b
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Layers, Out, Run, Tiny
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.requests.generate_many import CHUNK_SIZE
from hf_lowbit_kv.requests.memory_budget import pool_size
from hf_lowbit_kv.requests.pool_steps import PoolSteps, padded_rows, read_once, stored_layers
from hf_lowbit_kv.requests.row_pool import RowPool
from hf_lowbit_kv.storage.paged_store import WINDOWS

PARTS = ("steps", "ragged", "many", "static", "packed", "peer")
ROWS = (1, 7, 33, 64)
#: steps: how many are timed, tokens of a row, and slots of the pool of padded steps
STEPS, LENGTH, SLOTS = 24, 2000, 128
#: steps with ragged rows: as many as a page has tokens
RAGGED_STEPS = 128
#: number of requests for transformers' own scheduler
PEER_REQUESTS = 50


# ---- requests ---------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A request: random tokens, and an answer whose length is known before."""

    prompt: torch.Tensor
    """token ids, int64 `[n]`"""
    answer: int
    """tokens of the answer"""


#: distributions of the lengths of answers: exponential, or uniform
ANSWERS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "long-tailed": lambda count, gen: torch.empty(count).exponential_(1 / 400, generator=gen).clamp(20, 2000).int(),
    "50-500": lambda count, gen: torch.randint(50, 501, (count,), generator=gen).int(),
    "tiny": lambda count, gen: torch.randint(2, 12, (count,), generator=gen).int(),
}


def jobs(count: int, answers: str, vocabulary: int, prompts: tuple[int, int] = (200, 8000), seed: int = 0) -> list[Job]:
    """Requests whose prompts have uniformly distributed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(prompts[0], prompts[1] + 1, (count,), generator=generator).tolist()
    written = ANSWERS[answers](count, generator).tolist()
    return [
        Job(torch.randint(0, vocabulary, (length,), generator=generator), answer)
        for length, answer in zip(lengths, written, strict=True)
    ]


#: orders in which requests may be put into static batches
SORTINGS: dict[str, Callable[[Job], float]] = {
    "as given": lambda job: 0,
    "by prompt": lambda job: -len(job.prompt),
    "by answer": lambda job: -job.answer,
}
#: the fastest for each kind of answers, of these orders with batches of 8 to 128
STATIC = ("by answer:64", "by prompt:64")


def batches(
    all_jobs: Sequence[Job], sorting: str, rows: int, row_bytes: Callable[[int], int], memory: int
) -> list[list[Job]]:
    """Batches of at most `rows` jobs that fit into `memory`. Each row counts as long as the longest prompt and the
    longest answer of its batch together."""
    groups: list[list[Job]] = []
    for job in sorted(all_jobs, key=SORTINGS[sorting]):
        batch = [*groups[-1], job] if groups else [job]
        tokens = max(len(each.prompt) for each in batch) + max(each.answer for each in batch)
        if groups and len(batch) <= rows and len(batch) * row_bytes(tokens) <= memory:
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups


def cut_short(work: list[Job], whole: int = 24) -> list[Job]:
    """The requests with short answers, each of which ends at another step. The first prompts are whole, so that there are
    chunks of many lengths after others; the rest have 64 tokens at most."""
    return [Job(job.prompt if index < whole else job.prompt[:64], 3 + index) for index, job in enumerate(work)]


def first_tokens(grouped: list[list[Job]]) -> list[list[Job]]:
    """The largest of some static batches, with answers of 3 and the ends of prompts, at most three chunks of them."""
    largest = max(grouped, key=len)
    tokens = 2 * max(CHUNK_SIZE // len(largest), 128) + 64
    return [[Job(job.prompt[-tokens:], 3) for job in largest]]


# ---- steps ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _template(model: Any, preset: str) -> lb.LowBitCache:
    """A cache whose layers are initialized, as `generate_many` makes one for its pool."""
    template = lb.from_preset(preset, model, max_cache_len=64)
    with selected(model):
        read_once(model, template, 64)
    return template


@torch.no_grad()
def pool_steps_ms(model: Any, preset: str, lengths: list[int], count: int, slots: int) -> list[float]:
    """Milliseconds of decode steps of a pool of `slots` slots with rows of these lengths. Steps are recorded if the
    device has graphs."""
    template = _template(model, preset)
    with selected(model):
        layers, room = stored_layers(template), max(lengths) + count + 16
        pool = RowPool(layers, slots, len(lengths) * (room + 128), room)
        steps = PoolSteps(model, template, pool)
        members = [pool.enter(room) for _ in lengths]
        for row, length in zip(members, lengths, strict=True):
            for chunk in torch.randint(0, model.config.vocab_size, (length,)).split(2048):
                steps.prefill(row, chunk)
        clock: Any = StepClock(model.device)
        for _ in range(count + 6):
            logits = steps.decode(members)
            steps.newest[: len(members)] = logits[: len(members)].argmax(-1)
            clock(None, None)
        times = clock.steps_ms(5)
        steps.free()
    return times


def padded_batch(
    model: Any, preset: str, prompts: Sequence[torch.Tensor], new_tokens: int, chunk: int
) -> tuple[float, list[float]]:
    """Seconds that `lb.generate` reads a batch, padded on the left, and milliseconds of each of its steps."""
    longest, device = max(map(len, prompts)), model.device
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    clock: Any = StepClock(device)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "progress": False, "prefill_chunk_size": chunk}
    clock(None, None)
    lb.generate(model, inputs, preset, new_tokens, logits_processor=[clock], **options)
    prompt_ms, *steps = clock.steps_ms(0)
    return prompt_ms / 1e3, steps


def rounds_ms(model: Any, preset: str, prompts: list[torch.Tensor], count: int) -> list[float]:
    """Milliseconds between the times at which the CPU receives a row's tokens, while `generate_many` decodes all these
    rows."""
    rows = len(prompts)
    requests = [{"input_ids": prompt, "max_new_tokens": count + rows - row + 12} for row, prompt in enumerate(prompts)]
    options: dict[str, Any] = {"do_sample": False, "max_rows": rows, "progress": False, "share_prefixes": False}
    results = lb.generate_many(model, requests, preset, **options)
    times = results[-1].timestamps[6 : 6 + count]
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]


def measure_steps(
    model: Any, preset: str, length: int, rows: list[int], ragged: bool, slots: int
) -> Iterator[dict[str, Any]]:
    """A record for each number of rows. Ragged rows differ by one token each, so that they fill their pages at different
    steps."""
    steps, of = (RAGGED_STEPS, statistics.mean) if ragged else (STEPS, statistics.median_high)
    for count in rows:
        lengths = [length - row if ragged else length for row in range(count)]
        prompts = [torch.randint(0, model.config.vocab_size, (each,)) for each in lengths]
        record: dict[str, Any] = {"part": "ragged" if ragged else "steps", "rows": count, "length": length}
        clean(model.device)
        prompt_s, times = padded_batch(model, preset, prompts, steps + 7, 256)
        lb.release(model)
        record |= {"batch_token_s": prompt_s / (count * max(lengths)), "batch_ms": of(times[5:])}
        clean(model.device)
        record["pool_ms"] = of(pool_steps_ms(model, preset, lengths, steps, count))
        clean(model.device)
        padded = min(size for size in padded_rows(max(slots, count)) if size >= count)
        if padded > count:
            record |= {"slots": slots, "padded": padded}
            record["padded_ms"] = of(pool_steps_ms(model, preset, lengths, steps, slots))
            clean(model.device)
        yield record | {"round_ms": of(rounds_ms(model, preset, prompts, steps))}


# ---- workloads ----------------------------------------------------------------------------------------------------------


@contextmanager
def timed_calls(device: torch.device, cls: Any, method: str) -> Iterator[StepClock]:
    """Inside this context a clock ticks before and after each call of a method, so every other time is that of a call."""
    clock: Any = StepClock(device)
    original = getattr(cls, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock(None, None)
        out = original(*args, **kwargs)
        clock(None, None)
        return out

    with patch.object(cls, method, timed):
        yield clock


def measure_many(model: Any, preset: str, work: list[Job], memory: int, chunk: int) -> dict[str, Any]:
    clean(model.device)
    requests = [{"input_ids": job.prompt, "max_new_tokens": job.answer} for job in work]
    pools, began = list[tuple[int, int]](), PoolSteps.__init__
    options: dict[str, Any] = {"memory": memory, "do_sample": False, "prefill_chunk_size": chunk, "progress": False}

    def noted(self: Any, *args: Any) -> None:
        began(self, *args)
        pools.append((self.pool.slots, self.pool.memory.nbytes))

    begin = time.perf_counter()
    with (
        timed_calls(model.device, PoolSteps, "prefill") as prompts,
        timed_calls(model.device, PoolSteps, "decode") as steps,
        patch.object(PoolSteps, "__init__", noted),
    ):
        results = lb.generate_many(model, requests, preset, **options)
    seconds = time.perf_counter() - begin
    written = sum(len(result.generated_tokens) for result in results)
    assert written == sum(job.answer for job in work), {result.error for result in results}
    prompt_ms, step_ms = (clock.steps_ms(0)[::2] for clock in (prompts, steps))
    return {
        "seconds": seconds,
        "prompt_s": sum(prompt_ms) / 1e3,
        "decode_s": sum(step_ms) / 1e3,
        "steps": len(step_ms),
        "tokens": written,
        "tokens_per_s": written / seconds,
        "slots": pools[0][0],
        "pool_bytes": pools[0][1],
    }


def row_bytes_of(model: Any, preset: str) -> Any:
    """A function from the tokens of a row to its bytes in the cache of `lb.generate`."""
    template = _template(model, preset)
    layers = stored_layers(template)

    def row_bytes(tokens: int) -> int:
        pages = sum(layer.num_heads * layer.page_bytes * layer.spec.pages_for(tokens) for layer in layers)
        return pages + sum(layer.row_bytes(*WINDOWS) for layer in layers)

    return row_bytes


def measure_static(model: Any, preset: str, grouped: list[list[Job]], chunk: int) -> dict[str, Any]:
    clean(model.device)
    prompt_s, begin = 0.0, time.perf_counter()
    for batch in grouped:
        most, size = max(job.answer for job in batch), max(chunk // len(batch), 128)
        prompt_s += padded_batch(model, preset, [job.prompt for job in batch], most, size)[0]
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
    template = _template(model, preset)
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
    try:
        return measure_batching(model, work, most_seconds)
    finally:
        model.set_attn_implementation(lb.ATTENTION_NAME)


def main(
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(PARTS)}; repeatable [default: steps, many, static]."),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset.")] = "kivi-4-sink",
    requests: Annotated[int, typer.Option(help="Requests.")] = 200,
    static: Annotated[
        list[str] | None,
        typer.Option(help=f"ORDER:ROWS of static batches, repeatable; {', '.join(SORTINGS)} [default: the fastest]."),
    ] = None,
    first: Annotated[int | None, typer.Option(help="Of the requests, take only so many.")] = None,
    answers: Annotated[list[str] | None, typer.Option(help="long-tailed, 50-500; repeatable.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of pool and caches.")] = "24GB",
    peer_seconds: Annotated[float, typer.Option(help="Most seconds of transformers' scheduler in 16 bits.")] = 300,
    chunk: Annotated[int, typer.Option(help="Tokens of prompts read at a time.")] = 2048,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of the steps; repeatable [default: 1, 7, 33, 64].")
    ] = None,
    layers: Layers = 32,
    tiny: Tiny = False,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, and append a JSON line for each part and kind of answers."""
    wanted = part or ["steps", "many", "static"]
    if unknown := [name for name in wanted if name not in PARTS]:
        raise typer.BadParameter(f"part={unknown[0]!r} is not known; allowed: {', '.join(PARTS)}")
    batchings = [_batching(each) for each in static or STATIC]
    rows, prompts, size, length = rows or list(ROWS), (200, 8000), parse_size(memory), LENGTH
    if tiny:
        rows, prompts = [1, 3], (20, 300)
        answers, requests, length = ["tiny"], min(requests, 12), 200
    run = Run("many", device, commit, out, preset=preset, memory=size, chunk=chunk)
    model = random_8b(run, layers, tiny)
    for name in wanted:
        if name in ("steps", "ragged"):
            for record in measure_steps(model, preset, length, rows, name == "ragged", SLOTS):
                run.add(record)
    for kind in answers or ["long-tailed", "50-500"]:
        work = jobs(requests, kind, model.config.vocab_size, prompts)[:first]
        of_kind = {"answers": kind, "requests": len(work)}
        if "many" in wanted:
            measure_many(model, preset, cut_short(work), size, chunk)
            record = measure_many(model, preset, work, size, chunk)
            run.add({"part": "many", "rows": record["slots"]} | of_kind | record)
        for sorting, most in batchings if "static" in wanted else ():
            grouped = batches(work, sorting, most, row_bytes_of(model, preset), size)
            measure_static(model, preset, first_tokens(grouped), chunk)
            record = measure_static(model, preset, grouped, chunk)
            run.add({"part": "static", "rows": most, "sorting": sorting} | of_kind | record)
        if "packed" in wanted:
            measure_packed(model, preset, cut_short(work), size, work)
            run.add({"part": "packed"} | of_kind | measure_packed(model, preset, work, size, work))
        if "peer" in wanted:
            measure_peer(model, cut_short(work[:8]), peer_seconds)
            record = measure_peer(model, work[:PEER_REQUESTS], peer_seconds)
            run.add({"part": "peer", "answers": kind, "requests": PEER_REQUESTS} | record)
    times = "batch_ms:.2f", "pool_ms:.2f", "padded_ms:.2f", "round_ms:.2f"
    seconds = "seconds:.1f", "prompt_s:.1f", "decode_s:.1f"
    run.end("part", "answers", "rows", *times, *seconds, "steps", "tokens_per_s:.0f")


def _batching(text: str) -> tuple[str, int]:
    """Parse `ORDER:ROWS`."""
    sorting, _, rows = text.partition(":")
    if sorting not in SORTINGS or not rows.isdecimal() or not int(rows):
        raise typer.BadParameter(f"static={text!r} is not understood; allowed: ORDER:ROWS, {', '.join(SORTINGS)}")
    return sorting, int(rows)


if __name__ == "__main__":
    run_command(main)
