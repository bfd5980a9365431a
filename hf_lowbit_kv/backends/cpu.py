"""The backend for CPUs. In each step it unpacks the tokens of a layer once, and calls PyTorch's own attention.

`storage/reference.py` defines the results. It reads every score several times in float32, which is slow on a CPU. This
backend calls `scaled_dot_product_attention` instead. Memory: one layer's history at a time is unpacked to float32, in
groups of sequences if the batch is large. Storing, reading and transforms are the reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..storage.paged_store import PagedStore
from ..storage.reference import QUERY_BLOCK, Reference, history, plain_attention
from ..storage.step import StepInputs

#: largest number of unpacked numbers (float32) in memory at a time, unless one sequence has more
BUFFER_NUMBERS = 2**26
#: largest number of scores in memory at a time if PyTorch's attention cannot be used (softcap, sinks)
SCORES = 2**24


class Cpu(Reference):
    """Operations on CPUs."""

    def _attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        batch, heads, tokens, _ = inputs.k.shape
        stored = int(store.state.length.max()) + tokens
        rows = max(BUFFER_NUMBERS // (stored * heads * (inputs.k.shape[-1] + inputs.v.shape[-1])), 1)
        if rows >= batch:
            return _attend(inputs, store)
        outputs = []
        for first in range(0, batch, rows):
            rows_slice = slice(first, first + rows)
            outputs.append(_attend(inputs.rows(rows_slice), store.rows(rows_slice)))
        return torch.cat(outputs)


OPERATIONS = Cpu()


def _attend(step_inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """Attention of sequences whose unpacked histories fit into memory together."""
    q, mask, softcap, sinks = step_inputs.queries.float(), step_inputs.mask, step_inputs.softcap, step_inputs.sinks
    tokens, new_tokens = q.shape[2], step_inputs.k.shape[2]
    keys, values, valid = _gathered(step_inputs, store)
    stored, earlier = keys.shape[2] - new_tokens, new_tokens - tokens
    before = stored + earlier
    query_block = QUERY_BLOCK
    if softcap is not None or sinks is not None:
        query_block = max(min(query_block, SCORES // (q.shape[0] * q.shape[1] * keys.shape[2])), 1)
    outputs = []
    for start in range(0, tokens, query_block):
        stop = min(start + query_block, tokens)
        allowed = _allowed(earlier + start, earlier + stop, stored, mask, valid)
        inputs = q[:, :, start:stop], keys[:, :, : before + stop], values[:, :, : before + stop]
        score_bias = None if step_inputs.score_bias is None else step_inputs.score_bias[:, :, start:stop]
        outputs.append(
            _attention(*inputs, allowed, step_inputs.scaling, softcap, sinks, score_bias).to(step_inputs.k.dtype)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _gathered(inputs: StepInputs, store: PagedStore):
    """The stored tokens, in any order, followed by the new tokens: keys and values float32 `[B, H, n, D]`. And a mask of the
    stored tokens of each row, bool `[B, n - S]`, or `None` if all are valid."""
    k, v, mask = inputs[1:4]
    keys, values, valid = [], [], []
    for block_keys, block_values, block_valid in history(store):
        used = block_valid.any(0)
        if not used.all():
            block_keys, block_values, block_valid = (
                block_keys[:, :, used],
                block_values[:, :, used],
                block_valid[:, used],
            )
        keys.append(block_keys)
        values.append(block_values)
        valid.append(block_valid)
    keys.append(k)
    values.append(v)
    # unused slots may hold NaN, and a weight of 0 times NaN is NaN
    for i, real in enumerate(valid if mask is None else (*valid, mask)):
        if not real.all():
            keys[i], values[i] = (x.masked_fill(~real[:, None, :, None], 0.0) for x in (keys[i], values[i]))
    belonging = torch.cat(valid, dim=1) if valid else k.new_ones(k.shape[0], 0, dtype=torch.bool)
    streams = store.spec.attention_kind.join(*(torch.cat([x.float() for x in side], dim=2) for side in (keys, values)))
    return *streams, None if belonging.all() else belonging


def _allowed(start: int, stop: int, before: int, mask, valid) -> torch.Tensor | None:
    """The tokens to which query tokens `start` to `stop` attend: bool `[B or 1, 1, stop - start, before +
    stop]`, stored tokens first; `None`: all tokens."""
    if stop == start + 1 and mask is None and valid is None:
        return None
    position = torch.arange(stop)
    new = (position <= position[start:, None])[None]
    if mask is not None:
        new = new & mask[:, None, :stop]
    stored = torch.ones(1, 1, before, dtype=torch.bool) if valid is None else valid[:, None]
    rows = max(new.shape[0], stored.shape[0])
    return torch.cat([each.expand(rows, stop - start, -1) for each in (stored, new)], dim=-1)[:, None]


def _attention(q, k, v, allowed: torch.Tensor | None, scaling: float, softcap, sinks, score_bias) -> torch.Tensor:
    """Attention in float32, `[B, S, Hq, head_dim_v]`; zero for queries without any token."""
    if softcap is not None or sinks is not None:
        return plain_attention(q, k, v, allowed, scaling, softcap, sinks, score_bias)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)
    if allowed is None:
        return out
    nothing = ~allowed.any(-1)[:, 0, :, None, None]
    return out.masked_fill(nothing, 0.0) if nothing.any() else out
