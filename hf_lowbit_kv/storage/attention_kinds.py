"""Attention kinds: what the two streams that a layer stores mean to attention.

A layer stores two streams of tokens, each in its own format and width. Attention needs keys and values.

    kind        stream 1            stream 2          query                         output of attention
    separate    keys [D]            values [Dv]       [D]                           [Dv]
    latent      content c [L]       RoPE part r [R]   [L + R], absorbed             [L], expanded afterwards

With `latent` (MLA, multi-head latent attention) the keys are `[c | r]` and the values are `c`; all query heads share
them. An attention kind knows nothing of models: a `ModelSide` maps a model's queries to the stored streams, and outputs back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..formats import Format


class AttentionKind(ABC):
    """Instances are immutable and named by `name`, which a `LayerSpec` carries."""

    name: ClassVar[str]
    #: names of the two streams in messages and in `summary()`
    streams: ClassVar[tuple[str, str]]
    #: whether a transform may be applied to the first stream
    transforms: ClassVar[bool]
    #: whether the first stream is also the values, and the second stream the rest of the keys
    shares_values: ClassVar[bool] = False

    @abstractmethod
    def join(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams `[..., n, width]` -> keys and values `[..., n, D]`."""

    @abstractmethod
    def widths(self, first: int, second: int) -> tuple[int, int]:
        """Widths of the streams -> widths of a query and of an output of attention."""

    def shown_widths(self, head_dim: int) -> tuple[int, int]:
        """Widths of the streams for which a preset's bytes are shown if no model is given."""
        return head_dim, head_dim

    @abstractmethod
    def validate(self, formats: tuple[Format, Format], widths: tuple[int, int], page_size: int) -> None:
        """Raise `ValueError` if streams of these widths cannot be stored in these formats."""

    def __str__(self) -> str:
        return self.name


class Separate(AttentionKind):
    """Stream 1 holds keys, stream 2 holds values."""

    name = "separate"
    streams = ("keys", "values")
    transforms = True

    def join(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first, second

    def widths(self, first: int, second: int) -> tuple[int, int]:
        return first, second

    def validate(self, formats: tuple[Format, Format], widths: tuple[int, int], page_size: int) -> None:
        for fmt, width in zip(formats, widths, strict=True):
            fmt.validate(width, page_size)


class Latent(AttentionKind):
    """Stream 1 holds the latent content, which is both values and the first part of keys; stream 2 the RoPE part of
    keys."""

    name = "latent"
    streams = ("latent", "RoPE part")
    transforms = False
    shares_values = True

    def shown_widths(self, head_dim: int) -> tuple[int, int]:
        return 512, 64  # DeepSeek-V2 and V3

    def join(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([first, second.to(first.dtype)], dim=-1), first

    def widths(self, first: int, second: int) -> tuple[int, int]:
        return first + second, first

    def validate(self, formats: tuple[Format, Format], widths: tuple[int, int], page_size: int) -> None:
        for fmt, stream in zip(formats, self.streams, strict=True):
            if not fmt.stores_latents:
                raise ValueError(
                    f"format={fmt.name!r} does not store the {stream} of MLA models; allowed: 'dense', 'fp8', 'fp8-static' "
                    "and 'fp8-block' (presets 'mla' and 'snapmla')"
                )
        if widths[0] % 64 or widths[1] % 8:
            raise ValueError(
                f"kv_lora_rank={widths[0]} with qk_rope_head_dim={widths[1]} is not supported: the rank must be a multiple of "
                "64, the other of 8"
            )


#: every attention kind, by name
ATTENTION_KINDS: dict[str, AttentionKind] = {
    attention_kind.name: attention_kind for attention_kind in (Separate(), Latent())
}


def parse_attention_kind(attention_kind: str | AttentionKind) -> AttentionKind:
    """The attention kind with this name. An `AttentionKind` is returned unchanged.

    Raises:
        ValueError: the name is not known.
    """
    if isinstance(attention_kind, AttentionKind):
        return attention_kind
    if attention_kind not in ATTENTION_KINDS:
        raise ValueError(f"attention_kind={attention_kind!r} is not known; allowed: {tuple(ATTENTION_KINDS)}")
    return ATTENTION_KINDS[attention_kind]
