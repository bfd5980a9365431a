"""How far a layer has read: counts on the host beside those on the device, and what `crop` must know."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .padding import Padding
from .pages import PagedStore
from .spec import LayerSpec


class Progress(NamedTuple):
    """What `Counted.snapshot` keeps of a layer: counters alone, not tokens."""

    length: torch.Tensor
    """int32 `[B, H]`, as in `LayerState`"""
    paged: torch.Tensor
    seen: int
    """padded tokens seen"""
    mode: str | None


class Counted:
    """A layer that counts. `LowBitLayer` supplies the attributes."""

    spec: LayerSpec
    store: PagedStore
    max_cache_len: int | None
    #: padded tokens seen; a tensor where addresses are fixed, so that a compiled step can advance it
    cumulative_length: int | torch.Tensor

    def _forget(self) -> None:
        self._mode: str | None = None  # "packed" (our attention) or "dense" (any other) since the last reset
        self.taken = 0  # tokens of eager passes
        self.storing = False  # an eager pass is at work here; where the next one finds it so, that one was interrupted
        self._seen_at_least = 0  # host's lower bound of `cumulative_length`; compiled steps do not count here
        self._in_tail = 0  # so many newest tokens of every row are surely not packed yet
        self._padding = Padding()

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Keep what `crop` needs to know without asking the device."""
        if mask is None:
            self._in_tail += tokens
        else:  # a row may have got none of these tokens
            seen = self.cumulative_length if tokens == 1 else int(self.cumulative_length)
            self._padding.note(seen - tokens, mask)
        self._in_tail = min(self._in_tail, self.spec.residual)  # packing leaves that many

    def advance(self) -> None:
        """Count a token in Python that a replayed step has stored: on the device the replay counts by itself."""
        self.taken += 1
        self._seen_at_least += 1
        self._in_tail = min(self._in_tail + 1, self.spec.residual)

    def _make_room(self, tokens: int, mode: str) -> None:
        """Count `tokens` more, and have pages for them."""
        self._count(tokens)
        if torch.compiler.is_compiling():
            return
        self._mode, self.storing = mode, True
        self._seen_at_least += tokens
        self.taken += tokens
        if self.max_cache_len is None:
            self.store.reserve(self._seen_at_least)

    def _count(self, tokens: int) -> None:
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length.add_(tokens)  # in place: a compiled step reads this address
        else:
            self.cumulative_length += tokens

    def snapshot(self) -> Progress:
        """How far the rows have come, to `restore` them later. Waits for the device."""
        state = self.store.state
        return Progress(state.length.clone(), state.paged.clone(), int(self.cumulative_length), self._mode)

    def restore(self, progress: Progress) -> None:
        """Set the counters back to `progress`; for measurements, which repeat a step on a layer. Tokens stay as they are: where
        later steps wrote over slots of the tail, those tokens are lost."""
        state = self.store.state
        state.length.copy_(progress.length)
        state.paged.copy_(progress.paged)
        self._forget()
        self._mode, self._seen_at_least = progress.mode, progress.seen
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length.fill_(progress.seen)
        else:
            self.cumulative_length = progress.seen
