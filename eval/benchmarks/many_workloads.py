"""The requests of `bench_many`, and predicted times of static batches for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


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
BATCH_SIZES = (8, 16, 32, 64, 128)


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


class Cost(NamedTuple):
    """Measured times of reading and decoding."""

    token_s: float
    """seconds to read a token of a prompt"""
    steps_ms: dict[int, float]
    """milliseconds of a decode step, by rows"""

    def step_s(self, rows: int) -> float:
        """Seconds of a step with `rows` rows, interpolated linearly between measured numbers of rows."""
        known = sorted(self.steps_ms)
        below = max((n for n in known if n <= rows), default=known[0])
        above = min((n for n in known if n >= rows), default=known[-1])
        share = 0.0 if above == below else (rows - below) / (above - below)
        return (self.steps_ms[below] * (1 - share) + self.steps_ms[above] * share) / 1e3

    def parts(self, groups: Sequence[Sequence[Job]]) -> tuple[float, float]:
        """Seconds of these batches: for padded prompts, and for steps until the longest answer of each batch is
        written."""
        prompt_s = sum(len(batch) * max(len(job.prompt) for job in batch) * self.token_s for batch in groups)
        decode_s = sum(max(job.answer for job in batch) * self.step_s(len(batch)) for batch in groups)
        return prompt_s, decode_s

    def predicted(self, groups: Sequence[Sequence[Job]]) -> float:
        """Predicted seconds of these batches."""
        return sum(self.parts(groups))
