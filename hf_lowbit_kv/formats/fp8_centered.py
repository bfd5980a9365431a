"""Keys in FP8 (`fp8`: e4m3, a scale per token) after a center per channel is subtracted.

    center = fp16((min + max) / 2)   of a channel's numbers in the page
    token  = fp8(x - center)

e4m3 rounds a number to four significant bits. A channel with a large constant part, such as a bias of the model's key
projection, therefore loses the part that differs between tokens. The center holds the constant part. It is rounded
before it is subtracted, so its own rounding costs nothing.

For a kernel the center is one product for each page: q.k = scale (q.codes) + q.center.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import fragment
from .affine import FP16_MAX
from .base import Format, Tensors
from .fp8 import Fp8


def center_of(x: torch.Tensor) -> torch.Tensor:
    """The middle of each channel's range, fp16 `[..., head_dim]`, of a page `[..., page_size, head_dim]` (float32). Inf
    and NaN do not count; the center of a channel without other numbers is 0."""
    low = x.where(x.isfinite(), torch.inf).amin(-2)
    high = x.where(x.isfinite(), -torch.inf).amax(-2)
    middle = (low * 0.5 + high * 0.5).clamp(-FP16_MAX, FP16_MAX)
    # adding 0 turns -0 into +0: which of the two zeros a minimum picks is not defined
    return middle.where(low <= high, 0.0).half() + 0.0


@dataclass(frozen=True, repr=False)
class Fp8Centered(Format):
    """e4m3 codes with a float32 scale for each token, and an fp16 center for each channel of a page. A token with an Inf
    or NaN decodes to NaN; other tokens are not affected.

    Args:
        layout: order of the codes, as in `Fp8`: token after token (`planar-1`), or `fragment-1`. The backend chooses it.

    Example:
        >>> cache = lb.LowBitCache(model, "fp8-centered", "fp8")
        >>> lb.parse_format("fp8-centered").bits_per_value(128)
        8.375
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", fragment.LAYOUTS[0])
    grammar: ClassVar[str] = "'fp8-centered'"

    layout: str = "planar-1"

    def __post_init__(self):
        self.check_layout()

    @property
    def name(self) -> str:
        return f"fp8-centered{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Fp8Centered | None:
        match = re.fullmatch(r"fp8-centered(?:@([\w-]+))?", name)
        return cls(match[1] or "planar-1") if match else None

    @property
    def _tokens(self) -> Fp8:
        """How tokens are stored when the center is off."""
        return Fp8(layout=self.layout)

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        return [*self._tokens.arrays(head_dim, page_size, dtype), ("center", torch.float16, (head_dim,))]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        center = center_of(x)
        return self._tokens.encode_arrays(x - center.float()[..., None, :]) | {"center": center}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        return self._tokens.decode_arrays(arrays, head_dim) + arrays["center"].float()[..., None, :]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        return self._tokens._pack(codes)

    def _unpack(self, codes: torch.Tensor, head_dim: int) -> torch.Tensor:
        return self._tokens._unpack(codes, head_dim)
