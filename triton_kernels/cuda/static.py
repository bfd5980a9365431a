"""`formats.static` on the CUDA kernels: `static.cuh`, `static_values.cuh`, `encode_static.cuh`."""

from __future__ import annotations

import torch

from ...formats.static import Static, words
from .needs import Needs

#: as keys, as values
SIDES = (True, True)


def needs(fmt: Static, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    fmt.validate(head_dim, page_size)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    groups = _groups(fmt, head_dim)
    place = f"{head_dim}, {at.get('mean', -1)}"  # -1: the pages have no means
    scaled = f"{str(fmt.token_scale).lower()}, {place}, {at.get('scale', 0)}"
    values = f"StaticValues<{scaled}, {groups[0]}>"
    thresholds = ", ".join(f"{float_bits(x)}u" for x in fmt.thresholds(head_dim).tolist())
    return Needs(
        "static_values.cuh" if transposed else "static.cuh",
        values if transposed else f"StaticKeys<{place}, {', '.join(groups)}>",
        "encode_static.cuh",
        f"StaticEncoder<{str(transposed).lower()}, {scaled}, Thresholds<{thresholds}>, {', '.join(groups)}>",
        128 * words(fmt.planes(head_dim), fmt.layout),
        lambda piece: (head_dim if fmt.page_mean else 0) + (piece // 2 if fmt.token_scale else 0),
        bits=-(-sum(map(int, fmt.pattern)) // len(fmt.pattern)),
        same_for=0 if transposed else page_size,
        scratch=8 if transposed and fmt.token_scale else 0,
        queries=3,
    )


def _groups(fmt: Static, head_dim: int) -> list[str]:
    """The C++ type of each group of channels."""
    size = head_dim // len(fmt.pattern)
    numbers = zip(fmt.gain(head_dim)[::size].tolist(), fmt.mean_step(head_dim)[::size].tolist(), strict=True)
    return [
        f"Width<{digit}, {float_bits(gain)}u, {float_bits(unit)}u>"
        for digit, (gain, unit) in zip(fmt.pattern, numbers, strict=True)
    ]


def float_bits(x: float) -> int:
    """The bits of a float32."""
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))
