"""Kitty: integers per channel, where the most important channels get twice the bits (paper section 3).

In each page, for each KV head, the top `int(head_dim * ratio)` channels by score get 4 bits, the others 2:

    scale = (max - min) / 15 for a boosted channel, (max - min) / 3 otherwise      zero = min

rounded and stored as in `affine`. The page's own tokens decide which channels are boosted. This choice is part of the
bytes. So scores are defined to the last bit: sums have a fixed order, and the lower of two channels with equal scores
wins. Kernels make the same choice. The list of boosted channels (the map) takes a byte for each: 16 bytes for a page of
`kitty` at head_dim 128. Above 256 channels it takes two bytes for each.

A channel's code is `low + 4 * high`. The low two bits of every channel are in one plane, as in `int2-channel`. The
high two bits of boosted channels are in a compact second plane. A kernel treats them as a few more channels. If q' is
the query times the scales, then q.k = low . q' + high . (4 q')[map] + zero . q.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F

from . import fragment
from .affine import pack_words, quantize, unpack_words
from .base import Format, Tensors

Score = Literal["magnitude", "variance", "range", "random"]
SCORES: tuple[str, ...] = get_args(Score)
#: bits of a channel's code, and of a boosted channel's code
BITS, BOOSTED_BITS = 2, 4


@dataclass(frozen=True, repr=False)
class Boosted(Format):
    """2-bit integers per channel, with a share of the channels at 4 bits.

    Args:
        ratio: share of the channels that are boosted, 0 to 1; rounded down to whole channels.
        score: how channels are chosen. `"magnitude"`: the largest mean magnitude over the page. `"variance"`,
            `"range"`: the largest variance, or difference of maximum and minimum. `"random"`: a hash of `seed`, the
            channel's number and its minimum over the page (the control of the paper's ablation). The lower of two
            channels with equal scores wins.
        seed: used by `"random"`.
        bits, boosted_bits: only 2 and 4 are offered.
        layout: order of the codes, see below. The backend chooses it; it changes no decoded number.

    Page (layout `planar-1`): `codes` int16 `[page_size, head_dim / 8]`, the low two bits, as in `int2-channel`; `high`
    int16 `[boosted, page_size / 8]`, row `r` for channel `map[r]`: bits `2 j` and up of word `w` hold the high two bits
    of token `j * (page_size / 8) + w`; `scale` and `zero`, fp16 `[head_dim]`; `map` `[boosted]`, ascending, uint8, or int16
    above 256 channels.
    Layout `fragment-1` (keys only): `codes` and `high` int32, in the order in which tensor cores take them, see
    `fragment`. Column `r` of `high` is channel `map[r]`; up to the next multiple of 16 columns, both arrays are zero.

    Example:
        >>> lb.Boosted(ratio=0.25).name
        'boosted2-r0.25'
        >>> cache = lb.LowBitCache(model, lb.Boosted(ratio=0.25), "int2-token", sink=32)
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", fragment.LAYOUTS[0])
    code_arrays: ClassVar[tuple[str, ...]] = ("codes", "high")
    tunable: ClassVar[tuple[str, ...]] = ("ratio", "score")
    grammar: ClassVar[str] = "'boosted2-r<ratio>[-<variance|range|random[seed]>]'"

    ratio: float
    score: Score = "magnitude"
    seed: int = 0
    bits: int = BITS
    boosted_bits: int = BOOSTED_BITS
    layout: str = "planar-1"

    def __post_init__(self):
        self.check_layout()
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio!r} (boost) is not allowed; it must be a number from 0 to 1")
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r} is not known; allowed: {SCORES}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed!r} is not allowed; it must be an integer from 0 to 2**31 - 1")
        if self.score != "random":
            object.__setattr__(self, "seed", 0)  # not used, and not part of the name
        if (self.bits, self.boosted_bits) != (BITS, BOOSTED_BITS):
            pair = f"bits={self.bits!r} with boosted_bits={self.boosted_bits!r}"
            raise ValueError(f"{pair} is not offered; allowed: {BITS} with {BOOSTED_BITS}")

    @property
    def name(self) -> str:
        seed = str(self.seed) if self.seed and self.score == "random" else ""
        score = "" if self.score == "magnitude" else f"-{self.score}{seed}"
        return f"boosted{self.bits}-r{str(float(self.ratio)).removesuffix('.0')}{score}{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Boosted | None:
        match = re.fullmatch(
            r"boosted(\d+)-r(\d+(?:\.\d+)?(?:e-\d+)?)(?:-([a-z]+?)((?<=-random)\d+)?)?(?:@([\w-]+))?", name
        )
        if match is None:
            return None
        bits, ratio, score, seed, layout = match.groups()
        score, layout = score or "magnitude", layout or "planar-1"
        return cls(float(ratio), score, int(seed or 0), int(bits), layout=layout)  # type: ignore[arg-type]

    def boosted(self, head_dim: int) -> int:
        """How many channels are boosted. Raises `ValueError` if a ratio above 0 gives none."""
        count = int(head_dim * self.ratio + 1e-9)  # the rounding error of a decimal ratio must not cost a channel
        if count == 0 and self.ratio > 0:
            raise ValueError(
                f"ratio={self.ratio!r} of format {self.name!r} gives no whole channel of head_dim={head_dim}; "
                f"the nearest that does: {1 / head_dim!r}"
            )
        return count

    def columns(self, head_dim: int) -> int:
        """Columns of the array `high`: the boosted channels, in `fragment-1` up to a multiple of 16."""
        count = self.boosted(head_dim)
        return count if self.layout == "planar-1" else -(-count // 16) * 16

    def validate(self, head_dim: int, page_size: int) -> None:
        super().validate(head_dim, page_size)
        self.boosted(head_dim)

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        columns = self.columns(head_dim)
        codes: list[tuple[str, torch.dtype, tuple[int, ...]]]
        codes = [
            ("codes", torch.int16, (page_size, head_dim // 8)),
            ("high", torch.int16, (columns, page_size // 8)),
        ]
        if self.layout != "planar-1":
            codes = [
                ("codes", torch.int32, fragment.shape(self.bits, head_dim, page_size)),
                ("high", torch.int32, fragment.shape(self.bits, columns, page_size)),
            ]
        return [
            *codes,
            ("scale", torch.float16, (head_dim,)),
            ("zero", torch.float16, (head_dim,)),
            ("map", _map_dtype(head_dim), (columns,)),
        ]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
        channels = self.choose(x)
        levels = torch.full_like(low, 2**self.bits - 1)
        levels.scatter_(-1, channels[..., None, :], 2.0**self.boosted_bits - 1)
        codes, scale, zero = quantize(x, low, high, levels)
        boosted = codes.gather(-1, channels[..., None, :].expand(*codes.shape[:-1], channels.shape[-1]))
        unused = self.columns(x.shape[-1]) - channels.shape[-1]
        return {
            "codes": self._pack(codes & 3),
            "high": self._pack(F.pad(boosted >> self.bits, (0, unused)), transposed=True),
            "scale": scale[..., 0, :],
            "zero": zero[..., 0, :],
            "map": F.pad(channels, (0, unused)).to(_map_dtype(x.shape[-1])),
        }

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = self._unpack(arrays["codes"], head_dim)
        high = self._unpack(arrays["high"], arrays["map"].shape[-1], transposed=True) << self.bits
        # pages without tokens are decoded too (and not used): their maps may hold anything
        channels = arrays["map"].long().clamp(0, head_dim - 1)
        codes = codes.scatter_add(-1, channels[..., None, :].expand(high.shape), high)
        return codes.float() * arrays["scale"].float()[..., None, :] + arrays["zero"].float()[..., None, :]

    def _pack(self, codes: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """int32 `[..., page, n]` -> the array `codes`, or `high` (`transposed`: which `planar-1` stores channel by
        channel)."""
        if self.layout != "planar-1":
            return fragment.pack(codes, self.bits, self.layout)
        return pack_words(codes.transpose(-1, -2) if transposed else codes, self.bits)

    def _unpack(self, words: torch.Tensor, columns: int, transposed: bool = False) -> torch.Tensor:
        """The inverse of `_pack`."""
        if self.layout != "planar-1":
            return fragment.unpack(words, self.bits, self.layout, columns).to(torch.int32)
        codes = unpack_words(words, self.bits)
        return codes.transpose(-1, -2) if transposed else codes

    def relaid(self, arrays: dict[str, torch.Tensor], head_dim: int, target: Format) -> dict[str, torch.Tensor]:
        assert isinstance(target, Boosted)
        unused = target.columns(head_dim) - self.columns(head_dim)  # negative padding removes columns, which are zeros
        high = self._unpack(arrays["high"], self.columns(head_dim), transposed=True)
        return {
            **arrays,
            "codes": target._pack(self._unpack(arrays["codes"], head_dim)),
            "high": target._pack(F.pad(high, (0, unused)), transposed=True),
            "map": F.pad(arrays["map"], (0, unused)),
        }

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        """The boosted channels of pages `[..., page_size, head_dim]` (float32): int64 `[..., boosted]`, ascending."""
        order = self.scores(x).argsort(dim=-1, descending=True, stable=True)  # ties: the lower first
        return order[..., : self.boosted(x.shape[-1])].sort(dim=-1).values

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Score of each channel, float32 `[..., head_dim]`, 0 or more: a mean times page_size, or a hash."""
        if self.score == "magnitude":
            return fold_sum(x.abs())
        if self.score == "variance":
            off = x - (fold_sum(x) / x.shape[-2]).unsqueeze(-2)
            return fold_sum(off * off)
        low = x.amin(-2)
        if self.score == "range":
            return x.amax(-2) - low
        channel = torch.arange(x.shape[-1], device=x.device)
        # adding 0 turns -0 into +0; 24 bits are exact in float32
        mixed = (low + 0.0).view(torch.int32).long() ^ channel * 0x9E3779B1 ^ self.seed * 0x27D4EB2F
        return (_hash(mixed) >> 8).float()


def _map_dtype(head_dim: int) -> torch.dtype:
    """The dtype that holds a channel's number."""
    return torch.uint8 if head_dim <= 256 else torch.int16


def fold_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over axis -2, whose size is a power of two: halves are added until one row is left. Scores decide which bytes
    are stored, so the order of additions is part of the format. A butterfly over lanes computes the sum in this order
    too."""
    while (half := x.shape[-2] // 2) > 0:
        x = x[..., :half, :] + x[..., half:, :]
    return x[..., 0, :]


def _hash(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser on the low 32 bits of int64 numbers: 0 to 2**32 - 1."""
    mask = 0xFFFFFFFF
    x = x & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return x ^ (x >> 16)
