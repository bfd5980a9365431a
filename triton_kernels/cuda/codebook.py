"""`formats.codebook` on the CUDA kernels: `codebook.cuh`, `encode_codebook.cuh`."""

from __future__ import annotations

import torch

from ...formats.codebook import Codebook
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, True)
#: bytes that the replicas of a codebook entry fill, so that lanes of one memory transaction have no bank conflict; largest
#: size of a codebook in shared memory, in bytes (large codebooks get fewer replicas, at least one)
LANES_BYTES, MAX_TABLE = 128, 64 * 1024


def divides(fmt: Codebook, head_dim: int, transposed: bool) -> bool:
    # a warp's words of 32 tokens are whole loads of four
    return head_dim // slices(head_dim) // fmt.dim * fmt.bits // 32 % 4 == 0


def needs(fmt: Codebook, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    copies = max(min(LANES_BYTES, MAX_TABLE >> fmt.bits) // (2 * fmt.dim), 1)
    own = head_dim // slices(head_dim)
    arguments = f"{fmt.dim}, {fmt.bits}"
    return Needs(
        "codebook.cuh",
        f"Codebook{'Values' if transposed else 'Keys'}<{arguments}, {copies}, {own}>",
        "encode_codebook.cuh",
        f"CodebookEncoder<{arguments}, {head_dim}, {str(transposed).lower()}>",
        4 * own * fmt.bits // fmt.dim,
        lambda kv_tile: 0,
        bits=-(-fmt.bits // fmt.dim),
        table=2 * fmt.dim * copies << fmt.bits,
    )
