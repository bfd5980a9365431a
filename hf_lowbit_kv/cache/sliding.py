"""transformers' preallocated sliding layer, with a step that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import StaticSlidingWindowLayer


class RecordableSlidingLayer(StaticSlidingWindowLayer):
    """As transformers' layer, but for a token that arrives at a full window: transformers makes an index on the CPU and sends
    it to the device there, which no graph can hold. This writes to the last slot by a slice."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """As in transformers: keys and values `[B, H, S, D]` of a chunk; those that it attends to."""
        full = self.is_initialized and self.cumulative_length_int >= self.max_cache_len
        if not full or key_states.shape[-2] > 1 or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        kept: list[tuple[Any, torch.Tensor]] = [(self.keys, key_states), (self.values, value_states)]
        for held, new in kept:
            held.copy_(held.roll(-1, dims=-2))
            held[:, :, -1:] = new
        return self.keys, self.values
