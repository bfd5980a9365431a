"""The prefix store in a `generate` call: it supplies a prefix of the prompt, and stores the tokens of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.prefix_store import Match, PrefixStore
from .prefill import ChunkedPrefill, token_rows
from .stored_text import sequences_of
from .whole_prompt import rope_of_whole_prompt

#: a text that diverges from a stored one at least this many tokens after the usable prefix is also stored up to there
WORTH_AN_END = 64


class PrefixCall:
    """The prefix store in one call: `begin` with an empty cache, `end` with the generated tokens."""

    def __init__(self, model: Any, cache: LowBitCache, options: Mapping[str, Any], prefixes: PrefixStore):
        self.model, self.cache, self.prefixes = model, cache, prefixes
        self.ids, self.mask = _prompt(model, options)
        self.padded = self.mask is not None and not bool(self.mask.all())
        if self.padded and any(not isinstance(layer, LowBitLayer) for layer in cache.layers):
            self.ids = None  # native layers store padding

    def begin(self) -> None:
        """Load the stored prefix of the prompt into the cache, and set `cache.cached_tokens`, its length per row."""
        self.cache.cached_tokens = 0
        if self.ids is None or self.mask is None:
            return
        match = self.prefixes.restore(self.cache, _rows(self.ids, self.mask))
        self.cache.cached_tokens = match.tokens
        with rope_of_whole_prompt(self.model, self.mask):
            if match.tokens and self.padded:
                self._prefill_after_prefix(match.tokens)
            if any(not isinstance(layer, LowBitLayer) for layer in self.cache.layers):
                self._store_ends(match)

    def end(self, out: Any) -> None:
        """Store the tokens in the cache. out: the result of `generate`; without ids of all tokens nothing is stored."""
        sequences, stored = sequences_of(out), int(self.cache.packed_layers[0].get_seq_length())
        if self.ids is None or self.mask is None or sequences is None or sequences.shape[1] < stored:
            return
        mask = torch.nn.functional.pad(self.mask, (0, sequences.shape[1] - self.mask.shape[1]), value=1)
        self.prefixes.add(self.cache, _rows(sequences[:, :stored], mask[:, :stored]))

    def _prefill_after_prefix(self, tokens: int) -> None:
        """Prefill the rest of left-padded rows that hold `tokens` tokens each, except for the last token, which `generate`
        reads. Stored tokens take the place of padding."""
        assert self.ids is not None
        assert self.mask is not None
        padding = self.mask.shape[1] - self.mask.sum(1, keepdim=True)
        begin = tokens + int(padding.min())
        column = torch.arange(self.mask.shape[1], device=self.mask.device)
        unread = self.mask.bool() & (column >= padding + tokens)
        for layer in self.cache.packed_layers:
            layer.length.set(begin)
            layer._in_tail = 0
            layer.set_stored_positions(unread[:, :begin])  # the mask of the prefill
        prefill = ChunkedPrefill(self.model, self.cache, self.ids, unread.to(self.mask.dtype))
        prefill.positions = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        if prefill.left > 1:
            prefill.advance(prefill.left - 1)
        for layer in self.cache.packed_layers:
            layer.set_stored_positions(self.mask[:, : prefill.seen].bool())

    def _store_ends(self, match: Match) -> None:
        """Store the prompt up to its end, and up to where it diverges from a stored text, usually the end of a system
        prompt. Native layers can only be restored at such ends. `generate` reads the last token."""
        assert self.ids is not None
        assert self.mask is not None
        prefill = ChunkedPrefill(self.model, self.cache, self.ids, self.mask)
        last = self.ids.shape[1] - 1
        for end in (min(match.common, last), last):
            if end - max(match.tokens, prefill.seen) >= (WORTH_AN_END if end < last else 1):
                prefill.advance(end - prefill.seen)
                self.prefixes.add(self.cache, _rows(self.ids[:, :end], self.mask[:, :end]))


def _prompt(model: Any, options: Mapping[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Ids and mask `[B, S]` of all rows. `None`, `None` if the prompt is more than tokens, or is not padded on the left."""
    rows = token_rows(model, options)
    if isinstance(rows, str) or rows[0].shape != rows[1].shape or bool((rows[1][:, 1:] < rows[1][:, :-1]).any()):
        return None, None
    return rows


def _rows(ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Ids of each row without padding, on the CPU."""
    # in NumPy: PyTorch would index with all threads, which takes 20 ms if other work keeps them busy
    rows = zip(ids.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)
    return [torch.from_numpy(row[is_token]) for row, is_token in rows]
