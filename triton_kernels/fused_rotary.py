"""Rotary position embeddings in halves (`rotate_half`): one launch rotates queries and keys of a step into new
tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import launch, next_power_of_2


@triton.jit(do_not_specialize=["tokens", "q_heads", "heads"])
def rotary_kernel(
    q, k, cos, sin, q_out, k_out,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, tokens, q_heads, heads,
    D: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, SECOND: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """A program rotates one head of one token. Grid (rows * tokens * (q_heads + heads)).

    HALF: channels of a half; channels after both halves are copied. SECOND: the index of the second half's cosines:
    HALF, or 0 if both halves share them.
    """
    program = tl.program_id(0).to(tl.int64)
    head, program = program % (q_heads + heads), program // (q_heads + heads)
    s, b = program % tokens, program // tokens
    is_q = head < q_heads
    h = tl.where(is_q, head, head - q_heads)
    of_q = q + b * q_stride_b + h * q_stride_h + s * q_stride_s
    of_k = k + b * k_stride_b + h * k_stride_h + s * k_stride_s
    x = tl.where(is_q, of_q, of_k)
    stride = tl.where(is_q, q_stride_d, k_stride_d)
    out_q = q_out + b * q_out_stride_b + h * q_out_stride_h + s * q_out_stride_s
    out_k = k_out + b * k_out_stride_b + h * k_out_stride_h + s * k_out_stride_s
    out = tl.where(is_q, out_q, out_k)
    cos += b * cos_stride_b + s * cos_stride_s
    sin += b * sin_stride_b + s * sin_stride_s

    j = tl.arange(0, HALF_PADDED)
    keep = j < HALF
    first = tl.load(x + j * stride, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(x + (HALF + j) * stride, mask=keep, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + j, mask=keep, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + j, mask=keep, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + SECOND + j, mask=keep, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + SECOND + j, mask=keep, other=0.0).to(tl.float32)
    dtype = q_out.dtype.element_ty
    tl.store(out + j, (first * cos_first - second * sin_first).to(dtype), mask=keep)
    tl.store(out + HALF + j, (second * cos_second + first * sin_second).to(dtype), mask=keep)
    if REST_PADDED > 0:
        i = 2 * HALF + tl.arange(0, REST_PADDED)
        tl.store(out + i, tl.load(x + i * stride, mask=i < D, other=0.0), mask=i < D)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys rotated by halves: `x * cos + rotate_half(x) * sin`, in float32, rounded once.

    Args:
        q: `[B, q_heads, S, D]`, any strides. k: `[B, heads, S, D]` of the same dtype.
        cos, sin: `[B or 1, S, R]`, R even. The first R channels are rotated, the others copied. If the halves are
            `shared`, 2 R channels are rotated.

    Returns:
        Both as new tensors, whose dimensions have the same order in memory as the arguments'.
    """
    half = cos.shape[-1] if shared else cos.shape[-1] // 2
    batch, q_heads, tokens, width = q.shape
    q_out, k_out = _like(q), _like(k)
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
    rest = width - 2 * half
    launch(
        *(rotary_kernel, (batch * tokens * (q_heads + k.shape[1]),), q, k, cos, sin, q_out, k_out),
        *(*q.stride(), *k.stride(), *q_out.stride()[:3], *k_out.stride()[:3]),
        *(cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)),
        *(sin.stride(0) if sin.shape[0] > 1 else 0, sin.stride(1)),
        *(tokens, q_heads, k.shape[1]),
        device=q.device,
        D=width,
        HALF=half,
        HALF_PADDED=next_power_of_2(half),
        SECOND=0 if shared else half,
        REST_PADDED=next_power_of_2(rest) if rest else 0,
        num_warps=1,
    )
    return q_out, k_out


def _like(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this shape, whose last dimension is dense."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
