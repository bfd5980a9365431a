"""Forward passes that were interrupted: some layers have stored their tokens, others have not. The next pass finds out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from transformers.cache_utils import Cache

from .ledger import Ledger
from .low_bit_layer import LowBitLayer
from .own_layers import SLIDING

INTERRUPTED = "the last forward pass was interrupted: {}; reset() the cache and read the text again"


class Watched(Cache, ABC):
    """A cache that notices. `LowBitCache` supplies the attributes and what is abstract."""

    _first_packed: int
    _ledger: Ledger | None  # None: passes were compiled, and not counted

    @property
    @abstractmethod
    def packed_layers(self) -> list[LowBitLayer]:
        """The layers that are packed, without those that stay transformers' own."""

    @property
    @abstractmethod
    def _first(self) -> LowBitLayer:
        """The first packed layer."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        self._reads(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None and not hasattr(Cache, "get_conv_state"):  # what layers ask first in transformers 5.17
            self._reads(layer_idx, state_idx or 0)
        return super().has_previous_state(layer_idx, state_idx)

    def _check_whole(self) -> None:
        """Raise where the last forward pass stored its tokens in some layers alone, as one does that was interrupted."""
        packed = self.packed_layers
        if any(layer.storing for layer in packed):
            raise RuntimeError(INTERRUPTED.format("a layer had begun to store or drop tokens, or to choose rows"))
        sliding = {int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, SLIDING)}
        if len(sliding | {layer.length.at_least for layer in packed}) == 1:
            return
        seen = sliding | {layer.length.ask() for layer in packed}  # after compiled steps Python may not know it yet
        if len(seen) > 1:
            raise RuntimeError(INTERRUPTED.format(f"some layers hold {min(seen)} tokens and others {max(seen)}"))

    def _reads(self, layer_idx: int, state_idx: int) -> None:
        """A recurrent layer begins a pass. Raises where it, or the first packed one, has not had all of the last."""
        if torch.compiler.is_compiling():
            self._ledger = None
            return
        if self._ledger is None:
            self._ledger = Ledger(empty=False)
        in_front, taken = layer_idx < self._first_packed, self._first.taken
        if state_idx == 0 and not self._ledger.begins(layer_idx, in_front, taken):
            raise RuntimeError(INTERRUPTED.format(f"layer {layer_idx} and others have not read the same tokens"))
