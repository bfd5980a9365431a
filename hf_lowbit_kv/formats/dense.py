"""Tokens as they are, in the model's dtype: for exactness tests, and for layers or sides that should not be packed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Format, Tensors


@dataclass(frozen=True, repr=False)
class Dense(Format):
    """The model's own dtype, token after token."""

    grammar: ClassVar[str] = "'dense'"
    stores_latents: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "dense"

    @classmethod
    def parse(cls, name: str) -> Dense | None:
        return cls() if re.fullmatch("dense", name) else None

    @property
    def tokenwise(self) -> bool:
        return True

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        return [("codes", dtype, (page_size, head_dim))]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        return {"codes": x}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        return arrays["codes"]
