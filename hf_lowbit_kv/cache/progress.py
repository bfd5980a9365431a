"""How far a layer has read: counts on the host beside those on the device, and what `crop` must know."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import PagedStore
from .padding import Padding
from .token_counts import Length


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
    length: Length

    def _forget(self) -> None:
        self._mode: str | None = None  # "packed" (our attention) or "dense" (any other) since the last reset
        self.taken = 0  # tokens of eager passes
        self.storing = False  # an eager pass is at work here; where the next one finds it so, that one was interrupted
        self._in_tail = 0  # so many newest tokens of every row are surely not packed yet
        self._padding = Padding()

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Keep what `crop` needs to know without asking the device."""
        if mask is None:
            self._in_tail += tokens
        else:  # a row may have got none of these tokens
            seen = self.length.seen if tokens == 1 else self.length.ask()
            self._padding.note(seen - tokens, mask)
        self._in_tail = min(self._in_tail, self.spec.residual)  # packing leaves that many

    def advance(self) -> None:
        """Count a token in Python that a replayed step has stored: on the device the replay counts by itself."""
        self.taken += 1
        self.length.at_least += 1
        self._in_tail = min(self._in_tail + 1, self.spec.residual)

    def _make_room(self, tokens: int, mode: str) -> None:
        """Count `tokens` more, and have pages for them."""
        self.length.add(tokens)
        if torch.compiler.is_compiling():
            return
        self._mode, self.storing = mode, True
        self.taken += tokens
        self.store.reserve(self.length.at_least)

    def snapshot(self) -> Progress:
        """How far the rows have come, to `restore` them later. Waits for the device."""
        state = self.store.state
        return Progress(state.length.clone(), state.paged.clone(), self.length.ask(), self._mode)

    def restore(self, progress: Progress) -> None:
        """Set the counters back to `progress`; for measurements, which repeat a step on a layer. Tokens stay as they are: where
        later steps wrote over slots of the tail, those tokens are lost."""
        state = self.store.state
        state.length.copy_(progress.length)
        state.paged.copy_(progress.paged)
        self._forget()
        self._mode = progress.mode
        self.length.set(progress.seen)
