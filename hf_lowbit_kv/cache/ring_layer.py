"""A sliding-window layer whose rows differ in length: each row has a ring of 16-bit tokens.

The token at position `p` of a row is in slot `p % slots`. Keys are rotated already, so the order of slots does not matter
to attention. Addresses never change, and no Python value changes in a decode step, so that it can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .token_counts import RingOffset

Pair = tuple[torch.Tensor, torch.Tensor]


class RingLayer(CacheLayerMixin):
    """The rings of some rows. They belong to a pool, which knows the lengths of its rows.

    In decode steps (`positions` is given) it stores one token of each row and returns whole rings; `RingOffset` masks slots.
    A row that takes no part stores a token too. It does no harm, because the row's next token goes to the same slot.

    Without `positions` it is a layer of one row, which stores new tokens and returns all tokens in order, as transformers'
    growing layer does.

    Args:
        window: number of tokens that a token attends to, itself included.
        keys, values: `[rows, kv_heads, slots, head_dim]`.
        positions, slots: int64 `[rows]`, written before each decode step: positions of the new tokens, and their slots.
    """

    is_sliding = True
    is_compileable = True
    is_croppable = False

    def __init__(
        self,
        window: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ):
        super().__init__()
        self.window, self.positions, self.slots, self.length = window, positions, slots, 0
        self.keys: Any = keys
        self.values: Any = values
        self.is_initialized = True

    def begin(self, length: int) -> None:
        """A pass over rows of `length` tokens begins."""
        self.length = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> Pair:
        """Store new tokens `[rows, kv_heads, S, head_dim]`. Returns the keys and values that they attend to."""
        new_tokens = key_states, value_states
        if self.slots is None:
            stored = self.newest(self.window - 1)
            self.put(*new_tokens)
            if self.length == 0:
                return new_tokens
            return torch.cat([stored[0], key_states], dim=2), torch.cat([stored[1], value_states], dim=2)
        slots = self.slots.to(key_states.device)[:, None, None, None]
        for ring, states in zip((self.keys, self.values), new_tokens, strict=True):
            ring.scatter_(2, slots.expand_as(states), states)
        return self.keys, self.values

    def newest(self, most: int) -> Pair:
        """Copies of a row's newest tokens, in order; at most this many."""
        slots = self.keys.shape[2]
        count = min(self.length, most, slots)
        first = (self.length - count) % slots
        pieces = slice(first, min(first + count, slots)), slice(0, max(first + count - slots, 0))
        keys, values = (torch.cat([ring[:, :, piece] for piece in pieces], dim=2) for ring in (self.keys, self.values))
        return keys, values

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens `[1, kv_heads, n, head_dim]` of a row from position `length` on. Does not count them."""
        slots, tokens = self.keys.shape[2], keys.shape[2]
        count = min(tokens, slots)
        first = (self.length + tokens - count) % slots
        split = min(count, slots - first)
        for ring, states in ((self.keys, keys), (self.values, values)):
            if self.length == 0:
                ring[:, :, count:] = 0  # a slot that is masked must be finite
            newest = states[:, :, tokens - count :]
            ring[:, :, first : first + split] = newest[:, :, :split]
            ring[:, :, : count - split] = newest[:, :, split:]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of transformers' growing layer; in decode steps all slots, and an offset that masks them."""
        if self.positions is not None:
            return self.keys.shape[2], RingOffset.of(self.positions)
        stored = min(self.length, self.window - 1)
        return stored + query_length, self.length - stored

    def get_max_length(self) -> int:
        return self.window

    def get_max_cache_shape(self) -> int:
        return self.window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: rings are allocated with their pool."""
