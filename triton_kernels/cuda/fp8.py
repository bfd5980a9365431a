"""`formats.fp8` with a scale per token on the CUDA kernels: `fp8.cuh`, `encode_fp8.cuh`."""

from __future__ import annotations

import torch

from ...formats.fp8 import Fp8
from ...formats.fragment import LAYOUTS
from .needs import Needs

#: as keys, as values
SIDES = (True, True)


def covers(fmt: Fp8) -> bool:
    return fmt.granularity == "token"


def needs(fmt: Fp8, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    if fmt.layout != LAYOUTS[transposed]:
        raise ValueError(
            f"backend='cuda' stores {fmt.name!r} in layout {LAYOUTS[transposed]!r}: see backends.storage_spec"
        )
    arguments = f"{head_dim}, {fmt.fields(head_dim, page_size, dtype)[-1].offset}"
    return Needs(
        "fp8.cuh",
        f"Fp8{'Values' if transposed else 'Keys'}<{arguments}>",
        "encode_fp8.cuh",
        f"Fp8Encoder<{arguments}, {str(transposed).lower()}>",
        32 * head_dim,
        lambda piece: 4 * piece,
        bits=8,
    )
