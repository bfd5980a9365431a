"""Standard errors of measurements along a text, by bootstrap over blocks of positions.

Neighbouring positions are not independent, because an error in a key affects many later queries. The bootstrap
therefore draws whole blocks of positions, not single positions (Künsch, 1989). The draws are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: positions in a block
BLOCK = 128
#: how many times the blocks of a text are drawn
DRAWS = 1000


def block_means(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Mean of each block of `x` `[positions]`. Positions after the last whole block are left out."""
    return x[: len(x) // block * block].view(-1, block).mean(1)


def error_of_mean(x: torch.Tensor, block: int = BLOCK) -> float:
    """Standard error of the mean of `x` `[positions]`, or 0 if there are fewer than two blocks."""
    blocks = block_means(x, block)
    return float(_resampled(blocks).std()) if len(blocks) > 1 else 0.0


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Ratio of two caches' means over the same texts, and its standard error.

    Each draw takes the same blocks of a text for both caches. If a block is hard for both, this does not count as
    noise.

    Args:
        ours, theirs: for each text, the means of its blocks, in the same order.

    Raises:
        ValueError: the numbers of texts or blocks differ, or a text has fewer than two blocks.
    """
    if [len(x) for x in ours] != [len(x) for x in theirs] or not ours or min(len(x) for x in ours) < 2:
        raise ValueError(
            f"ours has blocks {[len(x) for x in ours]}, theirs {[len(x) for x in theirs]}; they must be those of the same "
            "texts, two or more of each"
        )
    pairs = [(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)) for x, y in zip(ours, theirs)]
    means = [sum(float(pair[side].mean()) for pair in pairs) for side in (0, 1)]
    # texts are independent, so each text has its own draws
    picks = [
        sum((_resampled(pair[side], seed) for seed, pair in enumerate(pairs)), torch.zeros(DRAWS, dtype=torch.float64))
        for side in (0, 1)
    ]
    return means[0] / means[1], float((picks[0] / picks[1]).std())


def _resampled(blocks: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The mean of each draw, `[DRAWS]`."""
    chosen = torch.randint(len(blocks), (DRAWS, len(blocks)), generator=torch.Generator().manual_seed(seed))
    return blocks[chosen].mean(1)
