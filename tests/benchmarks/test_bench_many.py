"""Static batches of `bench_many`: which ones are run."""

import torch

from hf_lowbit_kv.eval.benchmarks.bench_many import Cost, Job, cut_short, different, ranked_batchings


def _job(tokens: int, answer: int) -> Job:
    return Job(torch.zeros(tokens, dtype=torch.long), answer)


WORK = [_job(100, 10), _job(10, 1), _job(100, 1), _job(10, 10)]


def test_orders_and_sizes_are_ranked_by_seconds():
    cost = Cost(token_s=1e-3, steps_ms={1: 100.0, 2: 100.0})  # a prompt of 100 tokens takes as long as a step
    # room for two rows of 110 tokens
    ranked = ranked_batchings(WORK, cost, lambda tokens: tokens, 220)
    seconds = {(each.sorting, each.rows): each.predicted_s for each in ranked}
    assert len(seconds) == 15
    assert [each.predicted_s for each in ranked] == sorted(seconds.values())
    # by prompt: (100, 100) and (10, 10, ...): 0.2 + 0.02 for prompts, 10 steps for each of two batches
    assert abs(seconds["by prompt", 8] - (0.2 + 0.02 + 2 * 10 * 0.1)) < 1e-9
    # by answer: (100, 10) with 10 steps and (10, 100) with 1 step; each row as long as the longest prompt
    assert abs(seconds["by answer", 8] - (2 * 0.2 + 11 * 0.1)) < 1e-9


def test_sizes_that_memory_makes_equal_run_once():
    cost = Cost(token_s=1e-3, steps_ms={1: 100.0})
    ranked = ranked_batchings(WORK, cost, lambda tokens: tokens, 220)
    once = different(ranked)
    assert sorted(each.sorting for each in once) == ["as given", "by answer", "by prompt"]
    assert once[0] is ranked[0]


def test_a_short_run_has_all_numbers_of_rows():
    work = [*WORK, *WORK]
    short = cut_short(work, whole=4)
    assert [len(job.prompt) for job in short] == [100, 10, 100, 10, 64, 10, 64, 10], "the first ones are whole"
    assert len({job.answer for job in short}) == len(work)
