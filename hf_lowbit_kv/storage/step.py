"""The input of a step (`Chunk`), and the interface of the code that computes it (`Operations`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from .paged_store import LayerStore


class Chunk(NamedTuple):
    """The tokens that one forward pass brings to a layer, and how their queries attend.

    If the reading is not `separate`, k and v are the two streams, and q has the width of `Reading.widths`.
    """

    q: torch.Tensor | None
    """`[B, Hq, n, head_dim]`, of the last n of the chunk's S tokens; `None`: the tokens are only stored"""
    k: torch.Tensor
    """`[B, H, S, head_dim]`"""
    v: torch.Tensor
    """`[B, H, S, head_dim_v]`"""
    mask: torch.Tensor | None = None
    """bool `[B, S]`, False for padding; `None`: there is none"""
    scaling: float = 1.0
    """factor on q.k"""
    softcap: float | None = None
    """scores become `softcap * tanh(score / softcap)`; `None`: they stay"""
    sinks: torch.Tensor | None = None
    """`[Hq]`, a logit per query head that takes weight and gives no value (gpt-oss), or `None`"""
    seen: int | None = None
    """no row holds more tokens than this before the step, where Python knows it; changes no result"""
    lacking: torch.Tensor | None = None
    """float32 `[B, Hq, n]`, added to all q.k of a query: what transformed keys lack (`Transform.lacking`). `None`:
    nothing, or it would not change the result"""

    @property
    def queries(self) -> torch.Tensor:
        """`q` of a chunk that attends (a chunk that is only stored has none)."""
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

    def rows(self, rows: slice) -> Chunk:
        """The chunk of some of the rows."""
        q, mask, lacking = (None if x is None else x[rows] for x in (self.q, self.mask, self.lacking))
        return self._replace(q=q, k=self.k[rows], v=self.v[rows], mask=mask, lacking=lacking)

    @property
    def shifts_matter(self) -> bool:
        """Whether a number that is added to all scores of a query changes its result."""
        return self.softcap is not None or self.sinks is not None


class Operations(ABC):
    """The operations of a layer, as one backend computes them. Instances are immutable.

    `storage/reference.py` defines the results. Chunks are as the model made them; operations apply the layer's
    transforms.
    """

    #: whether a chunk may have fewer queries than tokens. Others get queries of zeros for the tokens before
    takes_few_queries: ClassVar[bool] = False

    @abstractmethod
    def attend(self, chunk: Chunk, store: LayerStore) -> torch.Tensor:
        """Attention of a chunk's queries to all stored tokens and, causally, to the chunk itself. Changes nothing.

        Returns:
            `[B, n, Hq, head_dim_v]` in q's dtype; zero for a row that attends to nothing.
        """

    @abstractmethod
    def append(self, chunk: Chunk, store: LayerStore) -> None:
        """Store a chunk without its padding, and pack each page that is due.

        If a row is full, further tokens are dropped, and counted in `lost`.
        """

    def step(self, chunk: Chunk, store: LayerStore) -> torch.Tensor:
        """`attend`, then `append`. Returns the output."""
        out = self.attend(chunk, store)
        self.append(chunk, store)
        return out

    @abstractmethod
    def read(self, store: LayerStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored tokens in order, unpacked but still transformed: keys and values `[B, H, max_length, D]` in the
        model's dtype, with zeros past a row's end. Used by other attention implementations, and by tests."""

    def expect_steps(self, chunk: Chunk, store: LayerStore, masked: bool) -> None:  # noqa: B027  (most have none)
        """This prompt is about to be stored, and steps of one token may follow. Their kernels can be compiled meanwhile.

        masked: whether these steps come with a mask.
        """
