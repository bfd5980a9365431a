"""Checks of forward passes: tokens that came to a full cache, interrupted passes, and prompts of another text.

Operations count tokens without room on the device (`LayerState.lost`). A decode step must not wait for the device. So
the CPU queues a copy of the count, and looks at the copy when it has arrived, usually a step later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Ledger:
    """Tokens read by each recurrent layer, kept against the tokens that the cache's first packed layer has taken.

    An interrupted forward pass leaves its tokens in some layers and not in others. Recurrent layers hold a state, not
    tokens, so they do not show it. This counts their tokens in eager passes, and starts again after compiled ones. An
    interruption inside the last layer goes unnoticed if that layer is recurrent.
    """

    def __init__(self, empty: bool = True):
        """empty: nothing has been read yet; otherwise it is not known how much has been read."""
        self.empty = empty
        self.read: dict[int, int] = {}
        # layers in front of the first packed one that have begun to read a pass's tokens
        self.waiting: set[int] = set()
        self.chunk = 0  # tokens of the pass

    def begins(self, layer: int, in_front: bool, taken: int) -> bool:
        """A layer begins to read. Returns whether it has read all earlier tokens.

        Args:
            in_front: whether it comes before the first packed layer. taken: tokens that the first packed layer has
                taken so far.
        """
        before = taken if in_front else taken - self.chunk
        if layer in self.waiting or self.read.get(layer, 0 if self.empty else before) != before:
            return False
        if in_front:
            self.waiting.add(layer)  # the number of tokens is known when the pass reaches the packed layer
        else:
            self.read[layer] = taken
        return True

    def takes_back(self, layer: int) -> None:
        """Undo `begins`: the layer did not read the pass's tokens."""
        self.waiting.discard(layer)

    def packed(self, taken: int, tokens: int) -> None:
        """The pass has reached the first packed layer.

        Args:
            taken: tokens that this layer has taken before. tokens: tokens that it gets now.
        """
        self.chunk = tokens
        self.read |= dict.fromkeys(self.waiting, taken + tokens)
        self.waiting.clear()

    def crop(self, tokens: int) -> None:
        self.read = {layer: count - tokens for layer, count in self.read.items()}


class OverrunError(RuntimeError):
    """A preallocated cache had no room for some tokens, and they are lost."""


def another_text(tokens: int, seen: int) -> str:
    """The message for a prompt of `tokens` tokens that is not longer than what the cache holds."""
    return (
        f"a prompt of {tokens} tokens came in, and the cache holds {seen} already: a prompt must be the whole text so far and "
        "go on behind it. Call cache.reset() to begin another text; lb.generate without a cache begins one itself"
    )


def same_text_again(tokens: int, seen: int) -> str:
    """The message for a text of `tokens` tokens that comes in whole, although the cache holds its beginning."""
    return (
        f"a text of {tokens} tokens came in whole, and the cache holds {seen} already: with use_cache=False each step would "
        "store the whole text again. If that comes from the checkpoint, set model.generation_config.use_cache = True, or pass "
        "use_cache=True to generate"
    )


def check_use_cache(arguments: Mapping[str, Any], tokens: int, seen: int) -> None:
    """Raise `ValueError` if a model that runs with `use_cache=False` reads a text again whose beginning is stored. Waits for
    the device. Some models always hand on that value, so it is no error by itself.

    Args:
        arguments: what the model hands to its layers. tokens: of the chunk. seen: tokens that are stored.
    """
    positions = arguments.get("position_ids")
    if arguments.get("use_cache") is not False or not isinstance(positions, torch.Tensor) or not 0 < seen < tokens:
        return
    if positions.shape[-1] == tokens and int(positions[..., 0].min()) == 0:
        raise ValueError(same_text_again(tokens, seen))


def cut_prompt(position_ids: torch.Tensor, seen: int) -> int | None:
    """The number of tokens of a prompt that is not longer than what the cache holds, told by the positions of the part
    that transformers' `generate` reads of it. `None`: another chunk. Waits for the device.

    `generate` skips the tokens that the cache holds: of a prompt of `n` tokens it reads `ids[:, -(n - seen):]`. If `n` is
    not more than `seen`, this slice has the last `2 n - seen` tokens, or all if both are equal. Their positions begin
    with `seen - n` and end with `n - 1`. Those of a text that goes on begin with `seen`.

    Args:
        position_ids: `[B or 1, S]`, S of at least 2, of rows without padding.
    """
    tokens = position_ids.shape[1]
    first, last = position_ids[0, :: tokens - 1].tolist()
    whole = last + 1
    return whole if (first, whole - first) == (seen - whole, tokens) else None


def padded_prompt(position_ids: torch.Tensor, mask: torch.Tensor | None, stored: torch.Tensor) -> bool:
    """Whether a chunk with at least as many columns as the cache has, perhaps some of them padding, is a prompt of its own.
    Waits for the device.

    `generate` reads such a prompt whole (see `cut_prompt`), and counts the positions of a row from its first token on. In
    a chunk that goes on they count what the row has stored, too. Rows that have stored nothing, or get nothing, say
    neither.

    Args:
        position_ids: `[B or 1, S]`. mask: the chunk's padding, bool `[B, S]`; `None`: it has none. stored: tokens of each
            row, int `[B]`.
    """
    if mask is None:
        mask = torch.ones(1, position_ids.shape[1], dtype=torch.bool, device=position_ids.device)
    new = mask.sum(1)
    last = torch.where(mask, position_ids.to(mask.device), -1).amax(1)
    return bool(((last == new - 1) & (new > 0) & (stored.to(mask.device) > 0)).any())


def _message(capacity: int, lost: int) -> str:
    return (
        f"max_cache_len={capacity} was too small: {lost} tokens of a row came when it was full and are lost, so what was "
        "generated since is wrong. Make the cache for as many tokens as prompt and answer have together, or reset() it"
    )


class OverrunWatch:
    """What the CPU knows about one layer's lost tokens. A copy knows nothing, because the copied layer has its own
    count."""

    def __init__(self) -> None:
        self._arrived: torch.cuda.Event | None = None  # recorded behind the copy that is under way
        self._copy: torch.Tensor | None = None

    def __reduce__(self):
        return OverrunWatch, ()

    def forget(self) -> None:
        """The layer was reset."""
        self._arrived = None

    @torch.inference_mode(False)
    def check(self, lost: torch.Tensor, capacity: int, wait: bool) -> None:
        """Raise `OverrunError` if the device has counted lost tokens.

        Args:
            lost: `LayerState.lost` of a layer, int32 `[B, H]`.
            wait: wait for all queued work. Otherwise the newest known count is used, and a new copy is queued.
        """
        if lost.device.type != "cuda":
            self._raise(int(lost.max()), capacity)
            return
        if torch.cuda.is_current_stream_capturing():  # no copy may be queued while a graph is recorded
            return
        at_once = wait or torch.cuda.current_stream(lost.device).query()  # an idle device answers at once
        if self._arrived is not None and (at_once or self._arrived.query()):
            self._look(capacity)
        if self._arrived is None:
            self._ask(lost)
            if at_once:
                self._look(capacity)

    def _ask(self, lost: torch.Tensor) -> None:
        if self._copy is None or self._copy.shape != lost.shape:
            self._copy = torch.zeros(lost.shape, dtype=lost.dtype, pin_memory=True)
        with torch.cuda.device(lost.device):
            self._copy.copy_(lost, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def _look(self, capacity: int) -> None:
        assert self._arrived is not None
        assert self._copy is not None
        self._arrived.synchronize()
        self._arrived = None
        self._raise(int(self._copy.max()), capacity)

    def _raise(self, lost: int, capacity: int) -> None:
        if lost:
            raise OverrunError(_message(capacity, lost))
