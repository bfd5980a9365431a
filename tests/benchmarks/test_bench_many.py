"""Static batches of `bench_many`: which requests run together."""

import pytest
import torch
import typer

from hf_lowbit_kv.eval.benchmarks.bench_many import Job, _batching, batches, cut_short


def _job(tokens: int, answer: int) -> Job:
    return Job(torch.zeros(tokens, dtype=torch.long), answer)


WORK = [_job(100, 10), _job(10, 1), _job(100, 1), _job(10, 10)]


def test_requests_are_sorted_and_batches_fit_into_the_memory():
    def sizes(sorting: str, rows: int, memory: int) -> list[list[tuple[int, int]]]:
        grouped = batches(WORK, sorting, rows, lambda tokens: tokens, memory)
        return [[(len(job.prompt), job.answer) for job in batch] for batch in grouped]

    by_prompt = [[(100, 10), (100, 1)], [(10, 1), (10, 10)]]
    assert sizes("by prompt", 8, 220) == by_prompt  # a row counts as long as the longest prompt and answer: 110
    assert sizes("by prompt", 2, 1000) == by_prompt
    assert sizes("by answer", 8, 220) == [[(100, 10), (10, 10)], [(10, 1), (100, 1)]]
    assert sizes("as given", 8, 100) == [[(100, 10)], [(10, 1)], [(100, 1)], [(10, 10)]]


def test_an_order_that_is_not_known_is_refused():
    assert _batching("by answer:64") == ("by answer", 64)
    for text in ("by length:64", "by answer", "by answer:0"):
        with pytest.raises(typer.BadParameter, match="is not understood; allowed: ORDER:ROWS"):
            _batching(text)


def test_a_short_run_has_all_numbers_of_rows():
    work = [*WORK, *WORK]
    short = cut_short(work, whole=4)
    assert [len(job.prompt) for job in short] == [100, 10, 100, 10, 64, 10, 64, 10], "the first ones are whole"
    assert len({job.answer for job in short}) == len(work)
