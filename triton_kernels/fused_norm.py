"""RMS norms of a decode step in one launch, rounded once. They multiply by the weight, or by one plus the weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import launch, next_power_of_2


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, D: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr):
    """x `[rows, D]` -> out `[rows, D]`, contiguous. Grid (rows). OFFSET: added to the weight `[D]`."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    keep = channel < D
    w = tl.load(weight + channel, mask=keep, other=0.0).to(tl.float32) + OFFSET
    v = tl.load(x + row * x_stride + channel, mask=keep, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
    tl.store(out + row * D + channel, (v * scale * w).to(out.dtype.element_ty), mask=keep)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension, in float32, rounded to the dtype of `x`.

    Args:
        x: `[..., D]`, any strides. weight: `[D]`, of any floating dtype.

    Returns:
        `[..., D]`, contiguous, in the dtype of `x`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = next_power_of_2(x.shape[-1])
    launch(
        *(rms_norm_kernel, (rows.shape[0],), rows, weight.contiguous(), out, rows.stride(0), eps),
        device=x.device,
        D=x.shape[-1],
        PADDED=padded,
        OFFSET=offset,
        num_warps=min(max(padded // 512, 1), 16),
    )
    return out
