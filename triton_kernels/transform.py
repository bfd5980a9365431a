"""Factors of channels and the Hadamard rotation. One launch transforms new keys and queries, bit for bit as
`transforms` defines it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(x, y, PTX: tl.constexpr):
    """x * y, rounded: the multiplication must not be fused with a following addition."""
    if PTX:
        z = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        z = x * y
    return z


@triton.jit
def _rotated(
    x,
    signs,
    channel,
    D: tl.constexpr,
    BASE: tl.constexpr,
    BLOCKS_LOG2: tl.constexpr,
    NORM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rotate rows `[ROWS, PADDED]`, float32. channel: the index of each element. Elements past D mix only with each
    other."""
    block, position = channel // BASE, channel % BASE
    if BASE > 1:
        total = tl.zeros_like(x)
        for i in tl.static_range(BASE):
            sign = tl.load(signs + i * BASE + position)
            term = tl.gather(x, tl.minimum(block * BASE + i, D - 1), 1) * sign  # a product with 1 or -1 is exact
            total = term if i == 0 else total + term
        x = total
    for i in tl.static_range(BLOCKS_LOG2):
        partner = tl.gather(x, tl.minimum((block ^ (1 << i)) * BASE + position, D - 1), 1)
        x = tl.where((block & (1 << i)) != 0, partner - x, x + partner)
    return _product(x, tl.full(x.shape, NORM, tl.float32), PTX)


@triton.jit(do_not_specialize=["q_heads", "heads", "tokens", "rows"])
def transform_kernel(
    q, k, q_out, k_out, q_scale, k_scale, signs,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    q_heads, heads, tokens, rows, scale_stride,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BASE: tl.constexpr, BLOCKS_LOG2: tl.constexpr,
    NORM: tl.constexpr, BEFORE: tl.constexpr, ROTATED: tl.constexpr, AFTER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """q `[B, q_heads, tokens, D]` and k `[B, heads, tokens, D]` -> contiguous tensors. Grid (rows of both / ROWS).

    q_scale, k_scale: factors; those of KV head `h` begin at `h * scale_stride`. BEFORE, AFTER: whether they are applied
    before or after the rotation.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row % tokens, row // tokens
    b, head = head // (q_heads + heads), head % (q_heads + heads)
    is_q, valid = head < q_heads, row < rows
    h = tl.where(is_q, head, head - q_heads)
    from_q = q + b * q_stride_b + h * q_stride_h + token * q_stride_s
    from_k = k + b * k_stride_b + h * k_stride_h + token * k_stride_s
    channel = tl.arange(0, PADDED)[None, :] + tl.zeros((ROWS, PADDED), tl.int32)
    of_q = (is_q & valid)[:, None] & (channel < D)
    of_k = (valid & (head >= q_heads))[:, None] & (channel < D)
    x = tl.load(from_q[:, None] + channel * q_stride_d, mask=of_q, other=0.0).to(tl.float32)
    x += tl.load(from_k[:, None] + channel * k_stride_d, mask=of_k, other=0.0).to(tl.float32)
    if BEFORE or AFTER:
        at = (tl.where(is_q, h * heads // tl.maximum(q_heads, 1), h) * scale_stride)[:, None] + channel
        scale = tl.load(q_scale + at, mask=of_q, other=0.0) + tl.load(k_scale + at, mask=of_k, other=0.0)
    if BEFORE:
        x = _product(x, scale, PTX)
    if ROTATED:
        x = _rotated(x, signs, channel, D, BASE, BLOCKS_LOG2, NORM, PTX)
    if AFTER:
        x = _product(x, scale, PTX)
    to_q = q_out + ((b * q_heads + h) * tokens + token) * D
    to_k = k_out + ((b * heads + h) * tokens + token) * D
    tl.store(to_q[:, None] + channel, x.to(q_out.dtype.element_ty), mask=of_q)
    tl.store(to_k[:, None] + channel, x.to(k_out.dtype.element_ty), mask=of_k)
