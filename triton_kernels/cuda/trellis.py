"""`formats.trellis` on the CUDA kernels: `trellis.cuh`, `static_values.cuh`, `encode_trellis.cuh`."""

from __future__ import annotations

import torch

from ...formats.static import vector
from ...formats.trellis import CHAIN_TOKENS, Trellis
from .needs import Needs
from .static import float_bits

#: as keys, as values
SIDES = (False, True)


def divides(fmt: Trellis, head_dim: int, transposed: bool) -> bool:
    return False  # a chain goes through all channels, and its search keeps 64 steps


def needs(fmt: Trellis, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    fmt.validate(head_dim, page_size)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}["scale"]
    width = f"TrellisWidth<{float_bits(fmt.gain(head_dim)[0].item())}u>"
    thresholds = ", ".join(f"{float_bits(x)}u" for x in fmt.thresholds(head_dim).tolist())
    each = vector(head_dim // 16)

    def meta(kv_tile: int) -> int:
        # if a work tile is shorter than a chain: the three words of each lane before the work tile, in whole loads
        split = 2 * kv_tile < min(CHAIN_TOKENS, page_size)
        return kv_tile // 2 + (-(-3 // each) * each * 128 if split else 0)

    return Needs(
        "static_values.cuh",
        f"StaticValues<{head_dim}, {at}, {width}>",
        "encode_trellis.cuh",
        f"TrellisEncoder<{head_dim}, {at}, Thresholds<{thresholds}>, {width}>",
        8 * head_dim,
        meta,
        bits=2,
        scratch=8,
    )
