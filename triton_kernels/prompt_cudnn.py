"""Stretches of history that every query of a chunk sees whole, attended to by cuDNN: a part of `prompt`.

Where PyTorch's own attention would take cuDNN, that is about 1.3 times as fast as `prompt_kernel`. It prepares itself for every
new pair of lengths, some 30 ms, which would eat the gain. So it gets stretches of one length (`STRETCH`), and chunks whose
length is a multiple of `QUERY_MULTIPLE`: those of a prompt that is cut into chunks, not each continued turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend

from .common import LOG2E, padded_width
from .common import launch as _launch
from .config import processors

#: tokens of history, and query tokens, that it is given
STRETCH = 8192
QUERY_MULTIPLE = 256
#: it divides query rows among blocks of threads by 128, and history not at all: below this share of busy multiprocessors it is
#: not taken
BUSY = 0.75
#: rows of a program that carries its results on
ROWS = 16


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether to attend with cuDNN: for chunks of a usual length, where PyTorch itself would."""
    if q.device.type != "cuda" or q.shape[2] % QUERY_MULTIPLE:
        return False
    if q.shape[0] * q.shape[1] * (q.shape[2] // 128) < BUSY * processors(q.device):
        return False
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=q.shape[1] != k.shape[1])
    return chosen == SDPBackend.CUDNN_ATTENTION.value


@triton.jit(do_not_specialize=["rows", "first"])
def carry_kernel(
    x, x_lse, partial, lse, x_stride_b, x_stride_h, x_stride_s, heads, rows, first,
    D: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge outputs x `[B, H * GROUPS, S, D]` with log-sum-exp `[B, H * GROUPS, S]` (natural) into what is carried, laid out as
    `prompt_kernel` does; the first stretch begins it. Grid (B * H, block of rows)."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    token, q_head = (row // GROUPS).to(tl.int64), h * GROUPS + row % GROUPS
    channel = tl.arange(0, PADDED)[None, :]
    keep = valid[:, None] & (channel < D)
    new_lse = tl.load(x_lse + (b * heads * GROUPS + q_head) * (rows // GROUPS) + token, mask=valid, other=0.0) * LOG2E
    new = tl.load(
        (x + b * x_stride_b + q_head * x_stride_h + token * x_stride_s)[:, None] + channel, mask=keep, other=0.0
    )
    carried = row < tl.where(first > 0, rows, 0)
    place = bh * rows + row
    old_lse = tl.load(lse + place, mask=carried, other=float("-inf"))
    old = tl.load(partial + place[:, None] * D + channel, mask=keep & carried[:, None], other=0.0)
    most = tl.maximum(old_lse, new_lse)
    old_weight, new_weight = tl.exp2(old_lse - most), tl.exp2(new_lse - most)
    total = old_weight + new_weight
    merged = old * (old_weight / total)[:, None] + new.to(tl.float32) * (new_weight / total)[:, None]
    tl.store(partial + place[:, None] * D + channel, merged, mask=keep)
    tl.store(lse + place, most + tl.log2(total), mask=valid)


def carry(
    x: torch.Tensor, x_lse: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, heads: int, first: int
) -> None:
    """Merge a stretch's output `[B, Hq, S, D]` and log-sum-exp `[B, Hq, S]` into partial and lse of `prompt_kernel`."""
    batch, q_heads, tokens, head_dim = x.shape
    rows = q_heads // heads * tokens
    assert x.stride(3) == 1
    _launch(
        carry_kernel,
        (batch * heads, triton.cdiv(rows, ROWS)),
        *(x, x_lse.contiguous(), partial, lse, *x.stride()[:3], heads, rows, first),
        device=x.device,
        D=head_dim,
        PADDED=padded_width(head_dim),
        GROUPS=q_heads // heads,
        BLOCK=ROWS,
        num_warps=4,
    )


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query `[B, Hq, S, D]` to all keys `[B, H, n, D]`: output `[B, Hq, S, Dv]`, log-sum-exp `[B, Hq, S]`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, keys, values, None, True, 0.0, False, False, scale=scaling
    )
    return out, lse.reshape(q.shape[:3])
