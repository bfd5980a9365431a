"""The weight of each token in a calibration: the attention of the queries that read the token packed.

One token in a hundred gets most of the attention of far queries, and errors in other keys have little effect. The model
reads a window once. Queries are grouped like pages: a group begins where a page begins. Queries two or more groups
after the page of a token read it packed. Only these queries count:

    a_j = 1 / n_j * sum over queries t of those groups, and over the query heads of the KV head, of A_tj^2
    n_j = the number of these queries, S - sink - page_size * (p + 2) for a token of page p
    w_j = min(30, a_j / mean of a)

A is the attention in full precision: float32, with the softcap before the softmax and the logit of a model's sink in
the denominator of the softmax. Pages that fewer than 128 queries read packed are excluded: their tokens have w = 0, and
the mean is over the other pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

#: a page is excluded if fewer queries read it packed
LEAST_QUERIES = 128
#: shortest window in tokens: shorter ones have too few far queries
LEAST_LENGTH = 1024
#: largest weight of a token, as a multiple of the mean
MOST_WEIGHT = 30.0
#: largest number of queries whose attention is computed at once
QUERY_BLOCK = 128


class PageGrid(NamedTuple):
    """The pages of a text: `page_size` tokens each, after the first `sink` tokens."""

    sink: int
    page_size: int

    def queries(self, length: int) -> torch.Tensor:
        """The number of queries of a window that read each token packed, int64 `[length]`: 0 for sinks and for excluded
        pages."""
        index = torch.arange(length) - self.sink
        page = index.div(self.page_size, rounding_mode="floor")
        count = length - self.sink - self.page_size * (page + 2)
        return torch.where((index >= 0) & (count >= LEAST_QUERIES), count, 0)

    def why_not(self, length: int) -> str | None:
        """The reason why windows of `length` tokens cannot be weighted, or `None` if they can."""
        if length < LEAST_LENGTH:
            return f"windows of {length} tokens are shorter than {LEAST_LENGTH}"
        if not bool(self.queries(length).any()):
            return (
                f"windows of {length} tokens have no page of {self.page_size} that {LEAST_QUERIES} queries read packed"
            )
        return None


def squared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    grid: PageGrid,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the squared attention of all queries that read a token packed, for each token, float32 `[H, S]`.

    Args:
        query: `[1, Hq, S, D]`.
        key: `[1, H, S, D]`, of the same tokens.
        scaling: factor on q.k.
        softcap: bound of the scores.
        sinks: logits `[Hq]` that are added to the denominator of the softmax.
    """
    heads, length = key.shape[1], key.shape[2]
    grouped = query[0].unflatten(0, (heads, -1))
    keys = key[0].float()
    extra = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    total = torch.zeros(heads, length, device=key.device)
    position = torch.arange(length, device=key.device)
    step = min(grid.page_size, QUERY_BLOCK)
    for start in range(grid.sink + 2 * grid.page_size, length, grid.page_size):
        packed = start - grid.page_size  # these queries read all tokens before it packed
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
    """w of each token, float32 `[H, S]`. attention: the result of `squared_attention`."""
    queries = grid.queries(attention.shape[1]).to(attention.device)
    per_query = attention.double() / queries.clamp(min=1)
    weighted = queries > 0
    mean = per_query[:, weighted].mean(1, keepdim=True)
    weights = (per_query / mean.clamp(min=1e-300)).clamp(max=MOST_WEIGHT)
    return torch.where(weighted, weights, 0.0).float()


def weights_of(
    query, key, grids: Iterable[PageGrid], scaling, softcap=None, sinks=None
) -> dict[PageGrid, torch.Tensor]:
    """`token_weights` of a window for each grid of pages. Arguments as for `squared_attention`."""
    return {grid: token_weights(squared_attention(query, key, grid, scaling, softcap, sinks), grid) for grid in grids}
