"""`formats.fp8` with a scale per token on the CUDA kernels: `fp8.cuh`, `encode_fp8.cuh`."""

from __future__ import annotations

import torch

from ...formats.fp8 import Fp8
from ...formats.fragment import LAYOUTS
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, True)


def covers(fmt: Fp8) -> bool:
    return fmt.granularity == "token"


def needs(fmt: Fp8, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    if fmt.layout != LAYOUTS[transposed]:
        raise ValueError(
            f"backend='cuda' stores {fmt.name!r} in layout {LAYOUTS[transposed]!r}: see backends.storage_spec"
        )
    own, at = head_dim // slices(head_dim), fmt.fields(head_dim, page_size, dtype)[-1].offset
    return Needs(
        "fp8.cuh",
        f"Fp8{'Values' if transposed else 'Keys'}<{own}, {at}>",
        "encode_fp8.cuh",
        f"Fp8Encoder<{head_dim}, {at}, {str(transposed).lower()}>",
        32 * own,
        lambda kv_tile: 4 * kv_tile,
        bits=8,
    )
