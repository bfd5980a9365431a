"""Page formats of the methods in `baselines`: integers with 16-bit scales for each token, as in the papers.

These formats exist only for measurements. They have no kernels and no presets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_lowbit_kv.formats import Format
from hf_lowbit_kv.formats.affine import FP16_MAX, pack_words, quantize, unpack_words
from hf_lowbit_kv.formats.base import Tensors
from hf_lowbit_kv.formats.static import PLANES, STEP

BITS = (2, 3, 4)


class _TokenIntegers(Format):
    """Base of formats with integer codes for each token. The array `codes` is int16
    `[page_size, head_dim * bits / 16]`: bit planes, packed into 16-bit words."""

    bits: int

    @property
    def tokenwise(self) -> bool:
        return True

    def _check_bits(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r} is not offered; allowed: {BITS}")

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        scales = [(name, torch.float16, (page_size, 1)) for name in self.scales]
        return [("codes", torch.int16, (page_size, head_dim * self.bits // 16)), *scales]

    #: names of the arrays that hold one 16-bit number for each token
    scales: ClassVar[tuple[str, ...]] = ("scale",)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int32 `[..., page, head_dim]` -> the array `codes`. The plane of the high bits comes first."""
        parts, left = [], self.bits
        for width in PLANES[self.bits]:
            left -= width
            parts.append(pack_words(codes >> left & 2**width - 1, width))
        return torch.cat(parts, -1)

    def _unpack(self, words: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The inverse of `_pack`."""
        codes = torch.zeros(*words.shape[:-1], head_dim, dtype=torch.int32, device=words.device)
        first = 0
        for width in PLANES[self.bits]:
            count = head_dim * width // 16
            codes = codes << width | unpack_words(words.narrow(-1, first, count), width)
            first += count
        return codes


@dataclass(frozen=True, repr=False)
class Quest(_TokenIntegers):
    """The quantizer that WUSH-KV uses in its analysis and perplexities (arXiv 2609.38121, equation 5; QuEST's
    projection). The levels are symmetric, the step comes from the token's root mean square, and larger numbers are
    clipped.

        step = 2 alpha_b / (2^b - 1) * rms(x)      Q(x) = step * (floor(x / step) + 1/2)

    alpha_b has the least squared error on Gaussian numbers, so the step is `STEP[b] * rms`. A page stores the codes and
    the step in fp16.
    """

    grammar: ClassVar[str] = "'quest<2|3|4>'"

    bits: int = 2

    def __post_init__(self):
        self._check_bits()

    @property
    def name(self) -> str:
        return f"quest{self.bits}"

    @classmethod
    def parse(cls, name: str) -> Quest | None:
        return cls(int(match[1])) if (match := re.fullmatch("quest([234])", name)) else None

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        step = (STEP[self.bits] * x.square().mean(-1, keepdim=True).sqrt()).clamp(max=FP16_MAX).half()
        codes = ((x / step.float()).floor() + 2 ** (self.bits - 1)).clamp(0, 2**self.bits - 1)
        return {"codes": self._pack(torch.where(step > 0, codes, 0.0).to(torch.int32)), "scale": step}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = self._unpack(arrays["codes"], head_dim).float()
        return (codes - (2**self.bits - 1) / 2) * arrays["scale"].float()


@dataclass(frozen=True, repr=False)
class Clipped(_TokenIntegers):
    """OSCAR's quantizer (arXiv 2605.17757; 2609.38121 writes it out in equation 7). Numbers are clipped at a quantile
    of the magnitudes. Asymmetric integers then cover the range from a token's smallest to its largest number. A page
    stores the codes, and scale and zero point in fp16.

    Args:
        share: percentage of the magnitudes that are not clipped. The papers take 96 for keys and 92 for values.
    """

    grammar: ClassVar[str] = "'clipped<2|3|4>-q<1 to 100>'"
    scales: ClassVar[tuple[str, ...]] = ("scale", "zero")

    bits: int = 2
    share: int = 96

    def __post_init__(self):
        self._check_bits()
        if not 1 <= self.share <= 100:
            raise ValueError(f"share={self.share!r} is not allowed; it must be 1 to 100 (hundredths)")

    @property
    def name(self) -> str:
        return f"clipped{self.bits}-q{self.share}"

    @classmethod
    def parse(cls, name: str) -> Clipped | None:
        match: Any = re.fullmatch(r"clipped([234])-q([1-9]\d?|100)", name)
        return cls(int(match[1]), int(match[2])) if match else None

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        limit = x.abs().quantile(self.share / 100, dim=-1, keepdim=True)
        low, high = x.amin(-1, keepdim=True).maximum(-limit), x.amax(-1, keepdim=True).minimum(limit)
        codes, scale, zero = quantize(x, low, high, torch.full_like(low, 2**self.bits - 1))
        return {"codes": self._pack(codes), "scale": scale, "zero": zero}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = self._unpack(arrays["codes"], head_dim).float()
        return codes * arrays["scale"].float() + arrays["zero"].float()
