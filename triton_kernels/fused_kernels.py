"""Pieces of a model's step in one launch each, rounded once: RMS norms, rotary position embeddings, and the gate of a
feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import cdiv, launch, next_power_of_2

#: activations that kernels know; the index of each is its number in the kernel
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


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
        x: `[..., D]`, any strides.
        weight: `[D]`, of any floating dtype.

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
        q: `[B, q_heads, S, D]`, any strides.
        k: `[B, heads, S, D]` of the same dtype.
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


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of `x`, in float32. ACTIVATION: the index in `ACTIVATIONS`."""
    # below -80 a sigmoid's exponential overflows, and its product is 0 already
    if ACTIVATION == 0:
        y = x * tl.sigmoid(tl.maximum(x, -80.0))
    elif ACTIVATION == 1:
        # 0.5 (1 + tanh z) = sigmoid(2 z)
        y = x * tl.sigmoid(tl.maximum(1.5957691216057308 * (x + 0.044715 * x * x * x), -80.0))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def gate_kernel(gate, up, out, gate_stride, up_stride, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """gate, up `[rows, N]` -> out `[rows, N]`, contiguous. Grid (rows, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    g = tl.load(gate + row * gate_stride + n, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + n, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (activated(g, ACTIVATION) * u).to(out.dtype.element_ty), mask=keep)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up`, in float32, rounded once.

    Args:
        gate, up: `[..., N]` of one dtype; the last dimension dense, as in halves of one tensor.
        activation: one of `ACTIVATIONS`.

    Returns:
        `[..., N]`, contiguous.
    """
    width = gate.shape[-1]
    gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = 1024
    launch(
        *(gate_kernel, (gates.shape[0], cdiv(width, block)), gates, ups, out),
        *(gates.stride(0), ups.stride(0), width),
        device=gate.device,
        ACTIVATION=ACTIVATIONS.index(activation),
        BLOCK=block,
    )
    return out
