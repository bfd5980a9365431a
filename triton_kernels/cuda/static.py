"""`formats.static` on the CUDA kernels: `static.cuh`, `static_values.cuh`, `encode_static.cuh`."""

from __future__ import annotations

import torch

from ...formats.static import Static, words
from .needs import Needs, slices

#: as keys, as values
SIDES = (True, True)


def divides(fmt: Static, head_dim: int, transposed: bool) -> bool:
    return transposed  # a key's words have its channels in the order of their widths


def needs(fmt: Static, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    fmt.validate(head_dim, page_size)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    groups = _groups(fmt, head_dim)
    own, where = head_dim // slices(head_dim), at["scale" if transposed else "mean"]
    thresholds = ", ".join(f"{float_bits(x)}u" for x in fmt.thresholds(head_dim).tolist())
    return Needs(
        "static_values.cuh" if transposed else "static.cuh",
        f"StaticValues<{own}, {where}, {groups[0]}>"
        if transposed
        else f"StaticKeys<{own}, {where}, {', '.join(groups)}>",
        "encode_static.cuh",
        f"StaticEncoder<{str(transposed).lower()}, {head_dim}, {where}, Thresholds<{thresholds}>, {', '.join(groups)}>",
        128 * words(fmt.planes(head_dim), fmt.layout) // slices(head_dim),
        lambda kv_tile: kv_tile // 2 if transposed else 2 * head_dim,
        bits=-(-sum(map(int, fmt.pattern)) // len(fmt.pattern)),
        same_for=0 if transposed else page_size,
        scratch=8 if transposed else 0,
        queries=3,
    )


def _groups(fmt: Static, head_dim: int) -> list[str]:
    """The C++ type of each group of channels."""
    size = head_dim // len(fmt.pattern)
    gains = fmt.gain(head_dim)[::size].tolist()
    return [f"Width<{digit}, {float_bits(gain)}u>" for digit, gain in zip(fmt.pattern, gains, strict=True)]


def float_bits(x: float) -> int:
    """The bits of a float32."""
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))
