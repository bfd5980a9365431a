"""How much attention each stored token gets from queries that read it packed, and what it therefore counts in a calibration.

One token in a hundred gets most of what far queries attend to, and an error in any other key is hardly seen. A window goes
through the model once. Queries stand in chunks that begin where pages begin. Those in chunks from the second page behind a
token's own on read that token packed, and they alone count:

    a_j = 1 / n_j * sum over queries t of those chunks, and over the query heads of the KV head, of A_tj^2
    n_j = the number of those queries, S - sink - page_size * (p + 2) for a token of page p
    w_j = min(30, a_j / mean of a)

A is the attention in full precision: float32, softcap before the softmax, the logit of a model's sink in its denominator.
Pages that fewer than 128 queries read packed are left out: w is 0 there, and the mean is over the other pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

#: pages that fewer queries read packed are left out
LEAST_QUERIES = 128
#: a window of fewer tokens says too little of far attention
LEAST_LENGTH = 1024
#: a token counts at most so many times the mean
MOST_WEIGHT = 30.0
#: queries whose attention is computed at a time, at most
CHUNK = 128


class PageGrid(NamedTuple):
    """Where pages lie in a text: `page_size` tokens each, behind the first `sink`."""

    sink: int
    page_size: int

    def queries(self, length: int) -> torch.Tensor:
        """How many queries of a window read each of its tokens packed, int64 `[length]`; 0 for sinks and for tokens of pages
        that are left out."""
        behind = torch.arange(length) - self.sink
        page = behind.div(self.page_size, rounding_mode="floor")
        count = length - self.sink - self.page_size * (page + 2)
        return torch.where((behind >= 0) & (count >= LEAST_QUERIES), count, 0)

    def why_not(self, length: int) -> str | None:
        """What keeps windows of so many tokens from being weighed, or `None`."""
        if length < LEAST_LENGTH:
            return f"windows of {length} tokens are shorter than {LEAST_LENGTH}"
        if not bool(self.queries(length).any()):
            return (
                f"windows of {length} tokens have no page of {self.page_size} that {LEAST_QUERIES} queries read packed"
            )
        return None


def received(
    query: torch.Tensor,
    key: torch.Tensor,
    grid: PageGrid,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Squared attention that each token of a window gets from all queries that read it packed, float32 `[H, S]`.

    Args:
        query: `[1, Hq, S, D]`. key: `[1, H, S, D]`, of the same tokens. scaling: factor on q.k. softcap: bound of the scores.
        sinks: logits `[Hq]` that the softmax counts besides.
    """
    heads, length = key.shape[1], key.shape[2]
    grouped = query[0].unflatten(0, (heads, -1))
    keys = key[0].float()
    extra = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    total = torch.zeros(heads, length, device=key.device)
    position = torch.arange(length, device=key.device)
    step = min(grid.page_size, CHUNK)
    for start in range(grid.sink + 2 * grid.page_size, length, grid.page_size):
        packed = start - grid.page_size  # tokens before this one are read packed by the chunk's queries
        for low in range(start, min(start + grid.page_size, length), step):
            high = min(low + step, start + grid.page_size, length)
            q = grouped[:, :, low:high].float()
            scores = (q.flatten(1, 2) @ keys[:, :high].mT).unflatten(1, q.shape[1:3]) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            later = position[low:high] > position[low:high, None]
            scores[..., low:high].masked_fill_(later, -torch.inf)
            if extra is not None:
                scores = torch.cat([scores, extra.expand(-1, *scores.shape[1:3], 1)], -1)
            total[:, :packed] += scores.softmax(-1)[..., :packed].square_().sum((1, 2))
    return total


def token_weights(attention: torch.Tensor, grid: PageGrid) -> torch.Tensor:
    """w of each token, float32 `[H, S]`, from what `received` returns for a window."""
    queries = grid.queries(attention.shape[1]).to(attention.device)
    each = attention.double() / queries.clamp(min=1)
    counted = queries > 0
    mean = each[:, counted].mean(1, keepdim=True)
    weights = (each / mean.clamp(min=1e-300)).clamp(max=MOST_WEIGHT)
    return torch.where(counted, weights, 0.0).float()


def weights_of(
    query, key, grids: Iterable[PageGrid], scaling, softcap=None, sinks=None
) -> dict[PageGrid, torch.Tensor]:
    """`token_weights` of a window for each grid of pages. Arguments as for `received`."""
    return {grid: token_weights(received(query, key, grid, scaling, softcap, sinks), grid) for grid in grids}
