"""`formats.dense` on the CUDA kernels: `dense.cuh`, `encode_dense.cuh`."""

from __future__ import annotations

import torch

from ...formats.dense import Dense
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, True)


def needs(fmt: Dense, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    own = head_dim // slices(head_dim)
    struct = f"Dense{'Values' if transposed else 'Keys'}<{own}>"
    encoder = f"DenseEncoder<{head_dim}>"
    return Needs("dense.cuh", struct, "encode_dense.cuh", encoder, 64 * own, lambda kv_tile: 0, queries=1)
