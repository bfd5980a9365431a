"""SnapMLA's FP8 decoding pipeline in plain PyTorch: queries and weights quantized too (paper, section 3.2 and algorithm 1).

Kernels that multiply FP8 with FP8 are compared with this. The kernels of backend `cuda` so far multiply in fp16, which
quantizes neither queries nor weights; `reference.attend` defines their results.
"""

from __future__ import annotations

import torch

from .formats.fp8 import E4M3_MAX, scale_of, to_e4m3

#: tokens whose weights share a scale
BLOCK = 64


def quantize_queries(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries `[..., rank]` -> e4m3 numbers in float32, and their scales `[..., 1]`, a scale a row."""
    scale = scale_of(content.float().abs().amax(-1, keepdim=True))
    return to_e4m3(content.float() / scale).float(), scale


def attention(
    query: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    rope: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query rows to FP8 latents, blocks of 64 tokens strictly in order.

    Args:
        query: absorbed, `[rows, rank + rope]`. codes: e4m3 numbers in float32 `[n, rank]`. scale: float32 `[n]`.
        rope: RoPE parts of the keys `[n, rope]`. scaling: factor on q.k.

    Returns:
        Output float32 `[rows, rank]`, and the natural log-sum-exp of the scores `[rows]`.
    """
    rank = codes.shape[1]
    q, q_scale = quantize_queries(query[:, :rank])
    # both RoPE parts are divided by the scales of the content: one accumulation serves
    q_rope = query[:, rank:].float() / q_scale
    out = torch.zeros(len(q), rank)
    total, top, p_scale = torch.zeros(len(q)), torch.full((len(q),), float("-inf")), torch.ones(len(q))
    for start in range(0, len(codes), BLOCK):
        block = slice(start, start + BLOCK)
        v, v_scale = codes[block].float(), scale[block]
        score = (q @ v.T + q_rope @ (rope[block].float() / v_scale[:, None]).T) * (q_scale * v_scale) * scaling
        new_top = torch.maximum(top, score.amax(-1))
        p = torch.exp(score - new_top[:, None])
        part = p.sum(-1)  # before the scales of values are fused in
        p = p * v_scale
        new_scale = scale_of(p.amax(-1))
        p = to_e4m3(p / new_scale[:, None]).float()
        decay = torch.exp(top - new_top) * p_scale / new_scale
        out = out * decay[:, None] + p @ v
        total = total * decay + part / new_scale
        top, p_scale = new_top, new_scale
    return out / total[:, None], top + torch.log(p_scale * total)


def quantize(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Tokens `[n, channels]` as FP8 and back, float32: a scale a `token`, a `block` of 64 x 64, one for the whole `tensor`, or
    the fixed scale 1 (`static`). (Paper, table 2.)"""
    x = x.float()
    if granularity == "static":
        return to_e4m3(x).float()
    if granularity == "tensor":
        scale = scale_of(x.abs().amax())
    elif granularity == "token":
        scale = scale_of(x.abs().amax(-1, keepdim=True))
    elif granularity == "block":
        rows, columns = x.shape
        padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
        scale = scale_of(blocks).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    else:
        raise ValueError(f"granularity={granularity!r} is not known; allowed: token, block, tensor, static")
    return to_e4m3(x / scale).float() * scale


#: the paper's table 2: how the content and the RoPE part are quantized (`None`: not)
CONFIGURATIONS: dict[str, tuple[str, str | None]] = {
    "snapmla": ("token", None),
    "A: RoPE-unaware": ("token", "token"),
    "B: per tensor, static": ("static", None),
    "C: per tensor, dynamic": ("tensor", None),
    "D: per block": ("block", None),
}

__all__ = ["BLOCK", "CONFIGURATIONS", "E4M3_MAX", "attention", "quantize", "quantize_queries"]
