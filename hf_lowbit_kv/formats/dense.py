"""Tokens in the model's dtype: for exactness tests, and for layers, keys or values that should not be quantized."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import core_matrices
from .base import Format, Tensors


@dataclass(frozen=True, repr=False)
class Dense(Format):
    """The model's dtype, token by token (layout `planar-1`), or in `core_matrices`. The backend chooses the layout.

    Example:
        >>> cache = lb.LowBitCache(model, lb.Dense(), "int4-token")  # keys in 16 bits, values in 4
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", core_matrices.LAYOUT)

    layout: str = "planar-1"

    grammar: ClassVar[str] = "'dense'"
    stores_latents: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"dense{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Dense | None:
        match = re.fullmatch(f"dense(?:@({core_matrices.LAYOUT}))?", name)
        return cls(match[1] or "planar-1") if match else None

    @property
    def tokenwise(self) -> bool:
        return True

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        if self.layout != "planar-1":
            return [("codes", dtype, core_matrices.shape(head_dim, page_size, dtype))]
        return [("codes", dtype, (page_size, head_dim))]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        return {"codes": self._pack(x)}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        return self._unpack(arrays["codes"], head_dim)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.layout == "planar-1" else core_matrices.pack(x)

    def _unpack(self, codes: torch.Tensor, head_dim: int) -> torch.Tensor:
        return codes if self.layout == "planar-1" else core_matrices.unpack(codes)
