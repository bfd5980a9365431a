"""Tokens in FP8 (e4m3: 4 bits of exponent, 3 of mantissa, largest number 448), with a scale for each token, for each
block, or none."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from . import core_matrices, fragment
from .base import Format, Tensors

Granularity = Literal["token", "block", "static"]

#: largest number of e4m3
E4M3_MAX = 448.0
#: the smallest scale: it makes division by the scale of zeros possible, and its reciprocal is far from overflow
MIN_SCALE = 2.0**-60
#: channels of a block with `granularity="block"`; a block spans a page's tokens in groups of as many
BLOCK = 64


def scale_of(absmax: torch.Tensor) -> torch.Tensor:
    """The scale, float32, with which the largest magnitude (float32) becomes 448; NaN if that magnitude is infinite or
    NaN. The divisor is a tensor, because on a GPU PyTorch multiplies by a number's reciprocal, which rounds
    differently."""
    scale = (absmax / torch.full_like(absmax, E4M3_MAX)).clamp(min=MIN_SCALE)
    return torch.where(absmax.isfinite(), scale, torch.nan)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 -> `torch.float8_e4m3fn`, rounded to nearest even. Numbers beyond 448 saturate. NaN of either sign
    becomes NaN with sign 0."""
    return torch.where(x.isnan(), torch.nan, x.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)


@dataclass(frozen=True, repr=False)
class Fp8(Format):
    """e4m3 codes and a float32 scale. A token (or block) with an Inf or NaN decodes to NaN; other tokens are not
    affected.

    Args:
        granularity: which numbers share a scale: those of a `token` (absmax / 448; SnapMLA, section 3.1), those of a
            `block` of 64 tokens x 64 channels, or all, with the fixed scale 1 (`static`).
        layout: order of the codes: token after token (`planar-1`), `core_matrices`, or, with a scale for each token,
            `fragment` (`pairs`; `codes` int32). The backend chooses it.

    Example:
        >>> cache = lb.LowBitCache(model, lb.Fp8(), lb.Fp8())
        >>> lb.Fp8(granularity="static").name
        'fp8-static'
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", core_matrices.LAYOUT, *fragment.LAYOUTS)

    granularity: Granularity = "token"
    layout: str = "planar-1"

    grammar: ClassVar[str] = "'fp8', 'fp8-block', 'fp8-static'"
    stores_latents: ClassVar[bool] = True

    def __post_init__(self):
        if self.granularity not in get_args(Granularity):
            raise ValueError(f"granularity={self.granularity!r} is not known; allowed: {get_args(Granularity)}")
        self.check_layout(self._offered)

    @property
    def _offered(self) -> tuple[str, ...]:
        """Layouts, at this granularity."""
        return self.layouts if self.granularity == "token" else self.layouts[:2]

    @property
    def fragments(self) -> bool:
        return self.layout in fragment.LAYOUTS

    @property
    def name(self) -> str:
        granularity = "" if self.granularity == "token" else f"-{self.granularity}"
        return f"fp8{granularity}{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Fp8 | None:
        match = re.fullmatch(r"fp8(?:-(block|static))?(?:@([\w-]+))?", name)
        return cls(match[1] or "token", match[2] or "planar-1") if match else None  # type: ignore[arg-type]

    def with_layout(self, layout: str) -> Fp8:
        return replace(self, layout=layout) if layout in self._offered else self

    @property
    def tokenwise(self) -> bool:
        return self.granularity != "block"

    @property
    def for_biased_keys(self) -> Format:
        from .fp8_centered import Fp8Centered  # which imports this module

        return Fp8Centered()

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        codes: tuple[str, torch.dtype, tuple[int, ...]] = ("codes", torch.float8_e4m3fn, (page_size, head_dim))
        if self.fragments:
            codes = ("codes", torch.int32, fragment.shape(8, head_dim, page_size))
        elif self.layout != "planar-1":
            codes = ("codes", torch.float8_e4m3fn, core_matrices.shape(head_dim, page_size, torch.float8_e4m3fn))
        if self.granularity == "token":
            return [codes, ("scale", torch.float32, (page_size, 1))]
        if self.granularity == "block":
            return [codes, ("scale", torch.float32, (-(-page_size // BLOCK), -(-head_dim // BLOCK)))]
        return [codes]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        if self.granularity == "static":
            return {"codes": self._pack(to_e4m3(x))}
        if self.granularity == "token":
            scale = scale_of(x.abs().amax(-1, keepdim=True))
            return {"codes": self._pack(to_e4m3(x / scale)), "scale": scale}
        scale = scale_of(_blocks(x).abs().amax((-3, -1)))
        return {"codes": self._pack(to_e4m3(x / _spread(scale, *x.shape[-2:]))), "scale": scale}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        x = self._unpack(arrays["codes"], head_dim).float()
        if self.granularity == "static":
            return x
        scale = arrays["scale"]
        return x * (scale if self.granularity == "token" else _spread(scale, *x.shape[-2:]))

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """e4m3 `[..., page, D]` -> the array `codes`."""
        if self.fragments:
            return fragment.pack(codes.view(torch.uint8), 8, self.layout, pairs=True)
        return codes if self.layout == "planar-1" else core_matrices.pack(codes)

    def _unpack(self, codes: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The array `codes` -> e4m3 `[..., page, D]`."""
        if self.fragments:
            numbers = fragment.unpack(codes, 8, self.layout, head_dim, pairs=True)
            return numbers.to(torch.uint8).view(torch.float8_e4m3fn)
        return codes if self.layout == "planar-1" else core_matrices.unpack(codes)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """`[..., tokens, channels]` -> `[..., blocks, BLOCK, blocks, BLOCK]`, zero-padded."""
    tokens, channels = x.shape[-2:]
    x = torch.nn.functional.pad(x, (0, -channels % BLOCK, 0, -tokens % BLOCK))
    return x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def _spread(scale: torch.Tensor, tokens: int, channels: int) -> torch.Tensor:
    """A scale for each block -> a scale for each number, `[..., tokens, channels]`."""
    return scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :tokens, :channels]
