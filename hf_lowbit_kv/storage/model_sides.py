"""The model's side of a layer: it maps a model's queries to the stored streams, and the output of attention back.

`Direct` serves layers that store keys and values. `cache/latent_attention.py` has the side of layers that store a
latent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .attention_kinds import ATTENTION_KINDS, AttentionKind


class StreamSizes(NamedTuple):
    """The KV heads and widths of a layer's streams according to its configuration; `None`: it does not say."""

    heads: int | None
    first: int | None
    second: int | None


class ModelSide(ABC):
    """The model's side of one layer: it maps queries to the stored streams, and the output of attention back.

    Args of the methods: query `[B, Hq, S, D]`; first, second: the streams of new tokens, `[B, H, S, width]`.
    """

    attention_kind: ClassVar[AttentionKind]

    @abstractmethod
    def sizes(self, config: Any) -> StreamSizes:
        """KV heads and widths of the streams, as far as the layer's configuration determines them."""

    def begin(self, stays: bool) -> None:  # noqa: B027  (most sides have nothing to do)
        """Prepare the model: `update()` is about to return views to it. stays: the change must outlive this layer call, because
        a compiled step, which cannot restore anything, may follow."""

    def refresh(self, dtype: torch.dtype) -> None:  # noqa: B027
        """Update cached tensors that were computed from weights, if the weights have changed. Called before a step of `dtype`
        that may be compiled or replayed, because such a step cannot check weights."""

    def why_not(self, module: Any) -> str | None:
        """Why this side cannot be used with `module`, the running attention module; `None`: it can."""
        return None

    def end(self) -> None:  # noqa: B027
        """The layer was reset or deleted: restore everything on the model."""

    @abstractmethod
    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """The queries that attend to the stored streams: `[B, Hq, S, width]`, with the width of `AttentionKind.widths`."""

    @abstractmethod
    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Output of attention `[B, S, Hq, width]` -> the output that the model expects, `[B, S, Hq, Dv]`."""

    @abstractmethod
    def prompt(self, query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
        """Causal attention of a first prompt to itself, by the queries of its last n tokens: `[B, n, Hq, Dv]`."""


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """PyTorch's own kernels, over `[B, H, S, D]`: `[B, n, Hq, Dv]`. query: of the last n of the S tokens."""
    grouped, queries, tokens = query.shape[1] != key.shape[1], query.shape[2], key.shape[2]
    allowed = None
    if 1 < queries < tokens:  # PyTorch would count the queries from the first token
        allowed = torch.ones(queries, tokens, dtype=torch.bool, device=key.device).tril(tokens - queries)
    causal = queries == tokens
    out = F.scaled_dot_product_attention(query, key, value, allowed, 0.0, causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


class Direct(ModelSide):
    """The layer stores the keys and values that the model computes."""

    attention_kind = ATTENTION_KINDS["separate"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Direct:
        """It has no state."""
        return self

    def sizes(self, config: Any) -> StreamSizes:
        heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None and hidden and heads:
            head_dim = hidden // heads
        kv_heads, head_dim_v = (getattr(config, name, None) for name in ("num_key_value_heads", "v_head_dim"))
        return StreamSizes(kv_heads or heads, head_dim, head_dim_v or head_dim)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        return query

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def prompt(self, query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
        return causal_attention(query, first, second, scaling)


DIRECT = Direct()
