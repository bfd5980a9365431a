"""Layout `core-1`: a page in core matrices of Hopper's tensor cores, 8 tokens x 16 bytes each (PTX ISA, `wgmma`).

A page `[tokens, width]` becomes `[tokens / 8, width / e, 8, e]`, with `e` numbers in 16 bytes. Groups of eight
tokens are copied without reordering. `formats.fp8` and `formats.dense` have this layout, for latents.
"""

from __future__ import annotations

import torch

LAYOUT = "core-1"
#: tokens of a core matrix, and its bytes per token
TOKENS, BYTES = 8, 16


def shape(width: int, page_size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape of the array that holds a page of tokens of this width."""
    numbers = BYTES // dtype.itemsize
    return page_size // TOKENS, width // numbers, TOKENS, numbers


def pack(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[..., page_size, width]` -> core matrices `[..., page_size / 8, width / e, 8, e]`."""
    numbers = BYTES // x.element_size()
    return x.unflatten(-1, (-1, numbers)).unflatten(-3, (-1, TOKENS)).transpose(-3, -2)


def unpack(matrices: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return matrices.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
