"""Readings: what the two streams that a layer stores mean to attention.

A layer stores two streams of tokens, each in its own format and width. Attention needs keys and values.

    reading     stream 1            stream 2          query                         output of attention
    separate    keys [D]            values [Dv]       [D]                           [Dv]
    latent      content c [L]       RoPE part r [R]   [L + R], absorbed             [L], expanded afterwards

With `latent` (MLA, multi-head latent attention) the keys are `[c | r]` and the values are `c`; all query heads share them.
A reading knows nothing of models. How a model's queries get there and back is the business of a `Side`: `Direct` here, and
`mla.Absorbed` for latents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ..formats import Format


class Reading(ABC):
    """Instances are immutable and named by `name`, which a `LayerSpec` carries."""

    name: ClassVar[str]
    #: what the two streams are called in messages and in `summary()`
    streams: ClassVar[tuple[str, str]]
    #: whether a transform may be applied to the first stream
    transforms: ClassVar[bool]
    #: whether the first stream is values, too, and the second one the rest of keys
    shares_values: ClassVar[bool] = False

    @abstractmethod
    def join(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams `[..., n, width]` -> keys and values `[..., n, D]`."""

    @abstractmethod
    def widths(self, first: int, second: int) -> tuple[int, int]:
        """Widths of the streams -> widths of a query and of an output of attention."""

    def shown_widths(self, head_dim: int) -> tuple[int, int]:
        """Widths of the streams to show a preset's bytes for, where no model is given."""
        return head_dim, head_dim

    @abstractmethod
    def validate(self, formats: tuple[Format, Format], widths: tuple[int, int], page_size: int) -> None:
        """Raise `ValueError` where streams of these widths cannot be stored in these formats."""

    def __str__(self) -> str:
        return self.name


class Separate(Reading):
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


class Latent(Reading):
    """Stream 1 holds the latent content, which is both values and the first part of keys; stream 2 the RoPE part of keys."""

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


#: every reading, by name
READINGS: dict[str, Reading] = {reading.name: reading for reading in (Separate(), Latent())}


def parse_reading(reading: str | Reading) -> Reading:
    """The reading of that name; a `Reading` is returned as it is.

    Raises:
        ValueError: unknown.
    """
    if isinstance(reading, Reading):
        return reading
    if reading not in READINGS:
        raise ValueError(f"reading={reading!r} is not known; allowed: {tuple(READINGS)}")
    return READINGS[reading]


class StreamSizes(NamedTuple):
    """What a configuration tells of a layer's streams; `None`: it does not tell."""

    heads: int | None
    first: int | None
    second: int | None


class Side(ABC):
    """The model's side of one layer: how its queries come to attention, and how the output goes back.

    Args of the methods: query `[B, Hq, S, D]`; first, second: the chunk's streams `[B, H, S, width]`.
    """

    reading: ClassVar[Reading]

    @abstractmethod
    def sizes(self, config: Any) -> StreamSizes:
        """KV heads and widths of the streams, as far as the layer's configuration tells."""

    def begin(self, stays: bool) -> None:  # noqa: B027  (most sides have nothing to do)
        """`update()` is about to hand its views on to the model. stays: a compiled step may follow, which can undo nothing."""

    def refresh(self, dtype: torch.dtype) -> None:  # noqa: B027
        """A step of `dtype` follows, and it may be compiled or replayed: then it cannot see whether weights have changed from
        which this side has computed something that it keeps."""

    def why_not(self, module: Any) -> str | None:
        """What keeps it from serving `module`, the attention module that runs, or `None`."""
        return None

    def end(self) -> None:  # noqa: B027
        """The layer was reset, or is gone: nothing of ours may stay on the model."""

    @abstractmethod
    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """What attends to the stored streams: `[B, Hq, S, width]`, the width as `Reading.widths` says."""

    @abstractmethod
    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Output of attention `[B, S, Hq, width]` -> what the model expects, `[B, S, Hq, Dv]`."""

    @abstractmethod
    def prompt(self, query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
        """Causal attention of a first prompt to itself: `[B, S, Hq, Dv]`."""


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """PyTorch's own kernels, over `[B, H, S, D]`: `[B, S, Hq, Dv]`."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


class Direct(Side):
    """Queries, keys and values are what the model computes."""

    reading = READINGS["separate"]

    def sizes(self, config: Any) -> StreamSizes:
        heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None and hidden and heads:
            head_dim = hidden // heads
        return StreamSizes(getattr(config, "num_key_value_heads", None) or heads, head_dim, head_dim)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        return query

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def prompt(self, query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
        return causal_attention(query, first, second, scaling)


DIRECT = Direct()


def sides_of(model_or_config: Any, config: Any) -> dict[int, Side]:
    """The sides of a model's layers that are not `Direct`, by layer index."""
    from . import mla

    return mla.absorbed_layers(model_or_config, config)
