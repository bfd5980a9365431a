"""`formats.boosted` on the CUDA kernels, only for keys: `boosted.cuh`, `encode_boosted.cuh`."""

from __future__ import annotations

import torch

from ...formats.boosted import SCORES, Boosted
from .needs import Needs

#: as keys, as values
SIDES = (True, False)


def divides(fmt: Boosted, head_dim: int, transposed: bool) -> bool:
    return False  # boosted channels may be anywhere in the head


def needs(fmt: Boosted, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    count, columns = fmt.boosted(head_dim), fmt.columns(head_dim)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    arguments = f"{columns}, {head_dim}, {at['high']}, {at['scale']}, {at['zero']}, {at['map']}"
    return Needs(
        "boosted.cuh",
        f"BoostedKeys<{arguments}>",
        "encode_boosted.cuh",
        f"BoostedEncoder<{count}, {arguments}, {SCORES.index(fmt.score)}, {fmt.seed}u>",
        8 * (head_dim + columns),
        lambda kv_tile: 4 * head_dim + columns,
        bits=fmt.bits,
        longer=True,
        queries=3,
        by_thread=True,
    )
