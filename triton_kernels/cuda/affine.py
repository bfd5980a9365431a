"""`formats.affine` on the CUDA kernels: `affine_keys.cuh`, `affine_values.cuh`, `encode_affine.cuh`."""

from __future__ import annotations

import torch

from ...formats.affine import Affine
from ...formats.fragment import LAYOUTS
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, True)


def needs(fmt: Affine, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    if fmt.layout != LAYOUTS[transposed]:
        raise ValueError(
            f"backend='cuda' stores {fmt.name!r} in layout {LAYOUTS[transposed]!r}: see backends.storage_spec"
        )
    fmt.validate(head_dim, page_size)
    channel = fmt.axis == "channel"
    group = fmt.group_size or (page_size if channel else head_dim)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    own = head_dim // slices(head_dim)
    form, places = f"{fmt.bits}, {str(channel).lower()}, {group}", f"{at['scale']}, {at['zero']}"

    def meta(kv_tile: int) -> int:
        return 4 * own * max(kv_tile // group, 1) if channel else 4 * kv_tile * (head_dim // group)

    return Needs(
        "affine_values.cuh" if transposed else "affine_keys.cuh",
        f"Affine{'Values' if transposed else 'Keys'}<{form}, {own}, {places}>",
        "encode_affine.cuh",
        f"AffineEncoder<{form}, {head_dim}, {places}, {str(transposed).lower()}>",
        4 * own * fmt.bits,  # of 32 tokens
        meta,
        bits=fmt.bits,
        grouped=fmt.group_size is not None,
        longer=channel,
        same_for=group if channel else 0,
        scratch=12 if not channel and fmt.group_size is None else 0,
        queries=3 if channel and fmt.bits == 2 else 2,
        sums=1 if channel else max(own // group, 1),
    )
