"""The inputs of a step (`StepInputs`), and the interface of the code that computes it (`Operations`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from .paged_store import PagedStore


class StepInputs(NamedTuple):
    """The new tokens of a forward pass in one layer, and how their queries attend.

    For a latent, k and v are its content and its RoPE part, and q has the width of `AttentionKind.widths`.
    """

    q: torch.Tensor | None
    """`[B, Hq, n, head_dim]`, of the last n of the S new tokens; `None`: the tokens are only stored"""
    k: torch.Tensor
    """`[B, H, S, head_dim]`"""
    v: torch.Tensor
    """`[B, H, S, head_dim_v]`"""
    mask: torch.Tensor | None = None
    """bool `[B, S]`, False for padding; `None`: there is none"""
    scaling: float = 1.0
    """factor on q.k"""
    softcap: float | None = None
    """scores become `softcap * tanh(score / softcap)`; `None`: no softcap"""
    sinks: torch.Tensor | None = None
    """`[Hq]`, a logit per query head that adds to the softmax denominator only (gpt-oss), or `None`"""
    seen: int | None = None
    """upper bound of the stored tokens per row, if Python knows one; changes no result"""
    score_bias: torch.Tensor | None = None
    """float32 `[B, Hq, n]`, added to all scores of a query: the part of q.k that the key transform removes
    (`Transform.score_bias`).
    `None`: nothing, or it would not change the result"""

    @property
    def queries(self) -> torch.Tensor:
        """`q`, which must not be `None`."""
        assert self.q is not None
        return self.q

    @property
    def tokens(self) -> int:
        """New tokens of each row, padding included."""
        return self.k.shape[2]

    @property
    def query_rows(self) -> int:
        """Query rows (query heads of a group times tokens) of one KV head."""
        return self.queries.shape[1] // self.k.shape[1] * self.queries.shape[2]

    @property
    def tokens_before(self) -> int:
        """How many of the new tokens come before the first query."""
        return self.tokens - self.queries.shape[2]

    def rows(self, rows: slice) -> StepInputs:
        """The inputs of these rows."""
        q, mask, score_bias = (None if x is None else x[rows] for x in (self.q, self.mask, self.score_bias))
        return self._replace(q=q, k=self.k[rows], v=self.v[rows], mask=mask, score_bias=score_bias)

    def first_token(self, rows: int) -> StepInputs:
        """The inputs of a decode step of this many rows, without a mask: the first row's first token in each."""
        queries, k, v = (x[:1, :, :1].expand(rows, -1, -1, -1) for x in (self.queries, self.k, self.v))
        return self._replace(q=queries, k=k, v=v, mask=None, seen=None)

    @property
    def shifts_matter(self) -> bool:
        """True if adding one number to all scores of a query changes the result."""
        return self.softcap is not None or self.sinks is not None


class Operations(ABC):
    """The operations of a layer, as one backend computes them. Instances are immutable.

    `storage/reference.py` defines the results. Inputs are as the model made them; operations apply the layer's
    transforms.
    """

    #: whether there may be fewer queries than new tokens. If False, the caller adds zero queries for the earlier tokens
    allows_fewer_queries: ClassVar[bool] = False

    @abstractmethod
    def attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """Attention of the queries to all stored tokens and, causally, to the new tokens. Changes nothing.

        Returns:
            `[B, n, Hq, head_dim_v]` in q's dtype; zero for a row that attends to nothing.
        """

    @abstractmethod
    def append(self, inputs: StepInputs, store: PagedStore) -> None:
        """Store the new tokens without padding, and pack each page that is due.

        If a row is full, further tokens are dropped, and counted in `lost`.
        """

    def step(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """`attend`, then `append`. Returns the output."""
        out = self.attend(inputs, store)
        self.append(inputs, store)
        return out

    @abstractmethod
    def read(self, store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored tokens in order, unpacked but still transformed: keys and values `[B, H, max_length, D]` in the
        model's dtype, with zeros past a row's end. Used by other attention implementations, and by tests."""

    def expect_steps(self, inputs: StepInputs, store: PagedStore, masked: bool) -> None:  # noqa: B027  (most have none)
        """This prompt is about to be stored, and steps of one token may follow. Their kernels can be compiled meanwhile.

        masked: whether these steps come with a mask.
        """
