"""Checks of a cache's forward passes: interruption, and prompts of another text.

A pass begins when it reaches the first layer that counts tokens (`PassGuard.begin`). Each packed layer reports when it begins
to store the new tokens, and when they are stored (`PassGuard.changing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

INTERRUPTED = "the last forward pass was interrupted: {}; reset() the cache and read the text again"


def another_text(tokens: int, seen: int) -> str:
    """The message for a prompt of `tokens` tokens that is not longer than what the cache holds."""
    return (
        f"got a prompt of {tokens} tokens, but the cache holds {seen} already: pass the full text so far plus the new "
        "tokens. Call cache.reset() to begin another text; lb.generate without a cache begins one itself"
    )


class PassGuard:
    """Detects passes that stored tokens only in some layers, and texts that do not continue the stored text.

    Packed and sliding layers count their tokens. Recurrent layers hold only a state, so their passes are counted here, and
    compared with the passes of the first packed layer. Compiled and recorded passes are not counted. An interruption inside
    the last layer is not detected if that layer is recurrent.

    Args:
        first_packed: index of the cache's first packed layer.
        sliding: indices of its sliding layers.
    """

    def __init__(self, first_packed: int = 0, sliding: Sequence[int] = ()):
        self.first_packed, self.sliding = first_packed, sliding
        #: index of the first layer that counts tokens
        self.starts_at = min([first_packed, *sliding])
        self.forget()

    def forget(self) -> None:
        """Restart all counts: the cache is empty, or was filled without a pass."""
        #: whether a layer is storing tokens, dropping tokens, or selecting rows. If a pass begins while this is set, that
        #: operation was interrupted
        self.changing = False
        #: passes that have reached the first packed layer, and each recurrent layer
        self.passes = 0
        self.read: dict[int, int] = {}
        #: whether all passes since `forget` were counted
        self.counted = True

    def uncounted(self) -> None:
        """Note a compiled or recorded pass, in which recurrent layers are not counted."""
        self.read, self.counted = {}, False

    # ---- passes ---------------------------------------------------------------------------------------------------

    def begin(self, cache: Any, tokens: int, arguments: Mapping[str, Any]) -> None:
        """Check a pass that begins.

        Args:
            tokens: number of new tokens.
            arguments: keyword arguments that the model passes to its layers.

        Raises:
            RuntimeError: the last pass was interrupted.
            ValueError: a model that runs with `use_cache=False` processes a whole text whose beginning is stored. Waits for
                the device. Some models always pass that value, and others pass none, so the value itself is no error.
        """
        self.check_whole(cache)
        seen, positions = cache.layers[self.first_packed].length.at_least, arguments.get("position_ids")
        if arguments.get("use_cache") or not isinstance(positions, torch.Tensor) or not 0 < seen < tokens:
            return
        if positions.shape[-1] != tokens:
            return
        # a row with stored tokens gets a whole text without padding; hidden tokens may have any position
        stored = cache.layers[self.first_packed].store.state.length[:, 0] > 0
        whole = (positions == torch.arange(tokens, device=positions.device)).all(-1)
        if bool((whole.to(stored.device) & stored).any()):
            raise ValueError(
                f"got a whole text of {tokens} tokens, but the cache holds {seen} already: with use_cache=False each step "
                "would store the whole text again. Pass use_cache=True, or set model.generation_config.use_cache = True"
            )

    def begin_recurrent(self, layer: int) -> None:
        """Count a pass of a recurrent layer. Raises if this layer or the first packed layer has missed an earlier pass."""
        in_front = layer < self.first_packed
        before = self.passes if in_front else self.passes - 1
        if self.read.get(layer, 0 if self.counted else before) != before:
            raise RuntimeError(INTERRUPTED.format(f"layer {layer} and others have not read the same tokens"))
        self.read[layer] = before + 1

    def take_back(self, layer: int) -> None:
        """Undo `begin_recurrent` of a layer before the first packed one: the pass was rejected."""
        if self.read.get(layer) == self.passes + 1:
            self.read[layer] = self.passes

    @contextmanager
    def change(self) -> Iterator[None]:
        """Inside this context all layers drop tokens. If that ends in an exception, e.g. because memory runs out between two
        layers, the next pass detects it."""
        before, self.changing = self.changing, True
        yield
        self.changing = before

    def check_whole(self, cache: Any) -> None:
        """Raise if the last pass was interrupted, i.e. stored its tokens only in some layers."""
        if self.changing:
            raise RuntimeError(INTERRUPTED.format("a layer had begun to store or drop tokens, or to choose rows"))
        sliding = {int(cache.layers[index].get_seq_length()) for index in self.sliding}
        packed = [layer.length for layer in cache.packed_layers]
        if len(sliding | {length.at_least for length in packed}) == 1:
            return
        seen = sliding | {length.read_count() for length in packed}  # may wait after compiled steps
        if len(seen) > 1:
            skipped = "" if min(seen) else " (or the model runs fewer layers than its configuration says: correct that)"
            raise RuntimeError(
                INTERRUPTED.format(f"some layers hold {min(seen)} tokens and others {max(seen)}{skipped}")
            )

    # ---- texts ----------------------------------------------------------------------------------------------------

    def check_text(self, layer: Any, tokens: int, position_ids: Any, mask: torch.Tensor | None) -> None:
        """Raise `ValueError` if new tokens belong to a prompt that is not longer than what is stored. Waits for the device,
        so a single token is checked on a CPU only.

        Args:
            layer: the first packed layer.
            tokens: number of new tokens.
            position_ids: those that the model passes to its layers.
            mask: padding mask of the new tokens, bool `[B, S]`; `None`: no padding.
        """
        seen = layer.length.at_least
        if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != tokens:
            return
        if seen == 0 or (tokens == 1 and position_ids.device.type != "cpu"):
            return
        if mask is None and (whole := _cut_prompt(position_ids, seen)) is not None and not layer.holds_padded_rows():
            raise ValueError(another_text(whole, seen))


def _cut_prompt(position_ids: torch.Tensor, seen: int) -> int | None:
    """Length of a prompt that is not longer than the stored text, inferred from the positions of its slice that transformers'
    `generate` passes to the model; `None`: the tokens are no such slice.

    `generate` skips as many tokens as the cache holds: of a prompt of `n` tokens it passes `ids[:, -(n - seen):]`. If `n` is
    at most `seen`, this slice has the last `2 n - seen` tokens, or all if both are equal. Their positions begin
    with `seen - n` and end with `n - 1`. The positions of a continued text begin with `seen`.

    Args:
        position_ids: `[B or 1, S]`, of rows without padding.
    """
    tokens = position_ids.shape[1]
    first, last = position_ids[0, [0, -1]].tolist()
    whole = last + 1
    return whole if (first, whole - first) == (seen - whole, tokens) else None
