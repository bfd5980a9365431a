"""Asymmetric integers: KIVI (per-channel keys, per-token values), BitDecoding (KC, KT) and TurboMind (per token).

    scale = (max - min) / (2^bits - 1)      zero = min
    code = round_half_even(clamp((x - zero) / scale, 0, 2^bits - 1))

Scale and zero are stored in fp16. They saturate, so a huge outlier stays finite. Codes are computed against the
*stored* values. A constant group has scale 0 and codes 0, and decodes to its zero point. That is exact for numbers that
fp16 can represent (not bf16 magnitudes below 2^-17 or above 65504).

Sources: KIVI, arXiv 2402.02750, section 3; BitDecoding, section 4; TurboMind, section 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, Literal

import torch

from . import fragment, fragment_planes
from .base import Format, Tensors

BITS = (2, 4, 5, 6, 8)
#: bits of the first of two planes
HIGH = fragment_planes.HIGH
GROUP_SIZES = (32, 64, 128)
FP16_MAX = 65504.0


@dataclass(frozen=True, repr=False)
class Affine(Format):
    """`bits`-bit integers with one scale and zero point per group.

    Args:
        bits: 2, 4, 5, 6 or 8. Codes of 5 and 6 bits are split into two planes: their high 4 bits, and their low 1 or 2.
        axis: `"channel"`: a group is `group_size` consecutive tokens of one channel. `"token"`: a group is
            `group_size` consecutive channels of one token.
        group_size: 32, 64 or 128; `None`: the whole page (`"channel"`) or the whole head (`"token"`).
        layout: order of the codes, see below. The backend chooses it; it changes no decoded number.

    Page (layout `planar-1`): first `codes`, int16 `[page_size, head_dim * bits / 16]`. Bits `j * bits` and up of word
    `w` hold channel `j * (head_dim * bits / 16) + w`. So one mask over a row of words yields consecutive channels.
    Codes of 5 and 6 bits have words for the high bits, followed by words for the low bits; both are ordered like this.
    Then `scale` and `zero`, fp16, `[page_size / group, head_dim]` or `[page_size, head_dim / group]`.

    Layouts `fragment-1` (keys) and `fragment-1t` (values): `codes` int32, in the order in which tensor cores read them,
    see `fragment` (5 and 6 bits: `fragment_planes`); `scale` and `zero` as before.

    Example:
        >>> fmt = lb.Affine(bits=4, axis="channel", group_size=32)
        >>> fmt.name
        'int4-channel-g32'
        >>> lb.parse_format("int4-channel-g32") == fmt
        True
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", *fragment.LAYOUTS)
    tunable: ClassVar[tuple[str, ...]] = ("bits", "group_size")
    grammar: ClassVar[str] = "'int<2|4|5|6|8>-<channel|token>[-g<32|64|128>]'"

    bits: int
    axis: Literal["channel", "token"]
    group_size: int | None = None
    layout: str = "planar-1"

    def __post_init__(self):
        self.check_layout()
        if not isinstance(self.bits, int) or self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r} is not offered; allowed: {BITS}")
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis={self.axis!r} is not known; allowed: 'channel', 'token'")
        if self.group_size is not None and (not isinstance(self.group_size, int) or self.group_size not in GROUP_SIZES):
            whole = "the whole page" if self.axis == "channel" else "the whole head"
            raise ValueError(f"group_size={self.group_size!r} is not offered; allowed: {GROUP_SIZES} or None ({whole})")

    @property
    def name(self) -> str:
        group = f"-g{self.group_size}" if self.group_size else ""
        return f"int{self.bits}-{self.axis}{group}{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Affine | None:
        match = re.fullmatch(r"int(\d+)-(channel|token)(?:-g(\d+))?(?:@([\w-]+))?", name)
        if match is None:
            return None
        bits, axis, group, layout = match.groups()
        return cls(int(bits), axis, int(group) if group else None, layout or "planar-1")  # type: ignore[arg-type]

    @property
    def tokenwise(self) -> bool:
        return self.axis == "token"

    @property
    def for_biased_keys(self) -> Format:
        return replace(self, axis="channel", group_size=None) if self.axis == "token" else self

    @property
    def levels(self) -> int:
        """Largest code."""
        return 2**self.bits - 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane of a code, the high one first."""
        return (HIGH, self.bits - HIGH) if self.bits in (5, 6) else (self.bits,)

    @property
    def _order(self) -> ModuleType:
        """The module that orders words for tensor cores."""
        return fragment_planes if len(self.widths) > 1 else fragment

    @property
    def planes(self) -> int:
        """Number of codes in a 16-bit word, for formats whose codes have one plane."""
        return 16 // self.bits

    def validate(self, head_dim: int, page_size: int) -> None:
        super().validate(head_dim, page_size)
        extent, extent_name = (page_size, "page_size") if self.axis == "channel" else (head_dim, "head_dim")
        if self.group_size is not None and extent % self.group_size:
            raise ValueError(
                f"group_size={self.group_size} of format {self.name!r} does not divide {extent_name}={extent}"
            )
        if self.bits == 5 and self.layout != "planar-1" and head_dim % 32:
            raise ValueError(f"layout={self.layout!r} takes 5 bits with multiples of 32 channels, not with {head_dim}")

    def groups(self, head_dim: int, page_size: int) -> tuple[int, int]:
        """Shape of `scale` and `zero`."""
        if self.axis == "channel":
            return page_size // (self.group_size or page_size), head_dim
        return page_size, head_dim // (self.group_size or head_dim)

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        groups = self.groups(head_dim, page_size)
        codes: tuple[str, torch.dtype, tuple[int, ...]]
        codes = ("codes", torch.int16, (page_size, head_dim * self.bits // 16))
        if self.layout != "planar-1":
            order = self._order
            codes = ("codes", torch.int32, order.shape(self.bits, head_dim, page_size))
        return [
            codes,
            ("scale", torch.float16, groups),
            ("zero", torch.float16, groups),
        ]

    def _grouped(self, x: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
        """`[..., page, D]` -> `[..., page groups, tokens per group, channel groups, channels per group]`."""
        page_size, head_dim = x.shape[-2:]
        return x.unflatten(-1, (groups[1], head_dim // groups[1])).unflatten(-3, (groups[0], page_size // groups[0]))

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        page_size, head_dim = x.shape[-2:]
        x = self._grouped(x.float(), self.groups(head_dim, page_size))
        low, high = x.amin((-3, -1), keepdim=True), x.amax((-3, -1), keepdim=True)
        codes, scale, zero = quantize(x, low, high, torch.full_like(low, self.levels))
        words = self._pack(codes.flatten(-4, -3).flatten(-2, -1))
        return {"codes": words, "scale": scale[..., 0, :, 0], "zero": zero[..., 0, :, 0]}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        scale, zero = arrays["scale"].float(), arrays["zero"].float()
        codes = self._unpack(arrays["codes"], head_dim).float()
        grouped = self._grouped(codes, (scale.shape[-2], scale.shape[-1]))
        x = grouped * scale[..., :, None, :, None] + zero[..., :, None, :, None]
        return x.flatten(-4, -3).flatten(-2, -1)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int32 `[..., page, D]` -> the array `codes`."""
        if self.layout != "planar-1":
            order = self._order
            return order.pack(codes, self.bits, self.layout)
        return pack_codes(codes, self.widths)

    def _unpack(self, words: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The array `codes` -> `[..., page, D]`."""
        if self.layout != "planar-1":
            order = self._order
            return order.unpack(words, self.bits, self.layout, head_dim)
        return unpack_codes(words, self.widths, head_dim)


def quantize(
    x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, levels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (int32, shape of `x`), scale and zero (fp16, shape of `low`) of groups that span `low` to `high` (float32).

    levels: each group's largest code, float32. A tensor as divisor: on a GPU, PyTorch multiplies by the reciprocal of a
        number, which rounds differently.
    """
    scale = ((high - low) / levels).clamp(max=FP16_MAX).half()
    zero = low.clamp(-FP16_MAX, FP16_MAX).half() + 0.0  # which of +0 and -0 a minimum picks is undefined: always +0
    step = scale.float()
    codes = ((x - zero.float()) / step).clamp(min=0).minimum(levels).round()
    # a scale of 0 (constant group, or a range below fp16) has no steps: every code is 0
    return torch.where(step > 0, codes, 0.0).to(torch.int32), scale, zero


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes int32 `[..., n]` -> int16 words `[..., n * bits / 16]`. Bits `j * bits` and up of word `w` hold code `j *
    words + w`."""
    planes = 16 // bits
    codes = codes.unflatten(-1, (planes, codes.shape[-1] // planes))
    shifts = torch.arange(planes, device=codes.device, dtype=torch.int32)[:, None] * bits
    return (codes << shifts).sum(-2, dtype=torch.int32).to(torch.int16)  # fields do not overlap: the sum is the union


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_words`."""
    shifts = torch.arange(16 // bits, device=words.device, dtype=torch.int32)[:, None] * bits
    return ((words.to(torch.int32).unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-2, -1)


def pack_codes(codes: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Codes `[..., D]` -> words `[..., D * bits / 16]`: the words of each plane, which has so many bits of a code. The plane of
    the high bits comes first."""
    parts, left = [], sum(widths)
    for width in widths:
        left -= width
        parts.append(pack_words(codes >> left & 2**width - 1, width))
    return torch.cat(parts, -1)


def unpack_codes(words: torch.Tensor, widths: Sequence[int], head_dim: int) -> torch.Tensor:
    """The inverse of `pack_codes`, int32."""
    codes = torch.zeros(*words.shape[:-1], head_dim, dtype=torch.int32, device=words.device)
    first = 0
    for width in widths:
        count = head_dim * width // 16
        codes = codes << width | unpack_words(words.narrow(-1, first, count), width)
        first += count
    return codes
