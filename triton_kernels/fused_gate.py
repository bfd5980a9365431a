"""The gate of a feed-forward layer: `activation(gate) * up` in one launch, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import cdiv, launch

#: activations that kernels know; the index of each is its number in the kernel
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


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
