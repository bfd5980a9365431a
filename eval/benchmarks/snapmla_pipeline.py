"""SnapMLA's FP8 decoding pipeline in plain PyTorch. It quantizes queries and weights too (paper, section 3.2 and
algorithm 1).

The kernel that multiplies FP8 with FP8 (`latent_wide.cu`) is compared with this pipeline. The narrow kernel of backend
`cuda` multiplies in fp16, and quantizes neither queries nor weights. `storage/reference.py` defines the results of the
narrow kernel.
"""

from __future__ import annotations

import torch

from hf_lowbit_kv.formats.fp8 import Fp8, scale_of, to_e4m3
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import LayerState, PagedStore, read_pages
from hf_lowbit_kv.storage.step import StepInputs

#: tokens in a block; their weights share a scale
BLOCK = 64


def quantize_queries(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries `[..., rank]` -> e4m3 numbers in float32, and their scales `[..., 1]`, one scale for each
    row."""
    scale = scale_of(content.float().abs().amax(-1, keepdim=True))
    return to_e4m3(content.float() / scale).float(), scale


def attention(
    query: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    rope: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query rows to FP8 latents. Blocks of 64 tokens are processed strictly in order.

    Args:
        query: absorbed, `[rows, rank + rope]`.
        codes: e4m3 numbers in float32 `[n, rank]`.
        scale: float32 `[n]`.
        rope: RoPE parts of the keys `[n, rope]`.
        scaling: factor on q.k.

    Returns:
        Output float32 `[rows, rank]`, and the natural log-sum-exp of the scores `[rows]`.
    """
    rank = codes.shape[1]
    q, q_scale = quantize_queries(query[:, :rank])
    # both RoPE parts are divided by the scales of the content: one accumulation serves
    q_rope = query[:, rank:].float() / q_scale
    out = q.new_zeros(len(q), rank)
    total, top, p_scale = q.new_zeros(len(q)), q.new_full((len(q),), float("-inf")), q.new_ones(len(q))
    for start in range(0, len(codes), BLOCK):
        block = slice(start, start + BLOCK)
        v, v_scale = codes[block].float(), scale[block]
        score = (q @ v.T + q_rope @ (rope[block].float() / v_scale[:, None]).T) * (q_scale * v_scale) * scaling
        new_top = torch.maximum(top, score.amax(-1))
        p = torch.exp(score - new_top[:, None])
        part = p.sum(-1)  # before the scales of the values are multiplied in
        p = p * v_scale
        new_scale = scale_of(p.amax(-1))
        p = to_e4m3(p / new_scale[:, None]).float()
        decay = torch.exp(top - new_top) * p_scale / new_scale
        out = out * decay[:, None] + p @ v
        total = total * decay + part / new_scale
        top, p_scale = new_top, new_scale
    return out / total[:, None], top + torch.log(p_scale * total)


def attend(inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """`Operations.attend` by this pipeline, in float32. Attention to stored tokens is quantized, attention to the new tokens
    is exact.

    Args:
        inputs: q absorbed queries `[B, Hq, S, rank + rope]`; k, v content and RoPE part of the new tokens `[B, 1, S, width]`.
        store: of a layer without a window, with its content in `fp8`.

    Returns:
        `[B, S, Hq, rank]`.
    """
    q, k, v, mask, scaling = inputs.queries, *inputs[1:5]
    state = store.state
    codes, scale, rope = stored(state, store.spec)
    outs = []
    for row in range(len(q)):
        n, parts = int(state.length[row, 0]), []
        new = torch.cat([k[row, 0], v[row, 0]], -1).float()
        for token in range(q.shape[2]):
            query = q[row, :, token].float()
            real = torch.arange(len(new), device=q.device) <= token
            if mask is not None:
                real &= mask[row]
            scores = (query @ new[real].T) * scaling
            merged = [(torch.softmax(scores, -1) @ k[row, 0][real].float(), scores.logsumexp(-1))] if real.any() else []
            if n:
                merged.append(attention(query, codes[row, :n], scale[row, :n], rope[row, :n], scaling))
            weights = torch.softmax(torch.stack([lse for _, lse in merged]), 0) if merged else None
            none = query.new_zeros(len(query), k.shape[-1])
            parts.append(none if weights is None else sum(w[:, None] * out for w, (out, _) in zip(weights, merged)))
        outs.append(torch.stack(parts))
    return torch.stack(outs)


def stored(state: LayerState, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contents of the pages of a layer without a window, float32: e4m3 numbers `[B, n, rank]`, their scales `[B, n]`,
    and RoPE parts `[B, n, rope]`."""
    dtype, (rank, rope) = state.sink_k.dtype, state.head_dims
    pages = read_pages(state.pool, state.page_table)[:, :, 0]
    bytes_of_content = spec.part_bytes(rank, rope, dtype)[0]
    content, rest = pages[..., :bytes_of_content], pages[..., bytes_of_content:]
    arrays = spec.key_format.split(content, rank, spec.page_size, dtype)
    ones = {**arrays, "scale": torch.ones_like(arrays["scale"])}
    assert isinstance(spec.key_format, Fp8)
    codes = spec.key_format.decode_arrays(ones, rank)
    parts = spec.value_format.decode(rest, rope, spec.page_size, dtype)
    return codes.flatten(1, 2), arrays["scale"].flatten(1), parts.flatten(1, 2)
