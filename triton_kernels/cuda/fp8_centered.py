"""`formats.fp8_centered` on the CUDA kernels, only for keys: `fp8_centered.cuh`, `encode_fp8_centered.cuh`."""

from __future__ import annotations

import torch

from ...formats.fp8_centered import Fp8Centered
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, False)


def needs(fmt: Fp8Centered, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    own, places = head_dim // slices(head_dim), f"{at['scale']}, {at['center']}"
    return Needs(
        "fp8_centered.cuh",
        f"Fp8CenteredKeys<{own}, {places}>",
        "encode_fp8_centered.cuh",
        f"Fp8CenteredEncoder<{head_dim}, {places}>",
        32 * own,
        lambda kv_tile: 2 * own + 4 * kv_tile,
        bits=8,
        same_for=page_size,
        again=4,
    )
