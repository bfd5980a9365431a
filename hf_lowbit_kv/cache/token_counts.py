"""How many tokens a layer has seen and may see, where that is counted, and which positions were padding.

A growing layer counts in Python. A preallocated one counts on the device, because compiled and recorded steps advance the count
there, and knows a lower bound in Python. What a layer does with a length (pages, windows, steps) is the same for both.
"""

from __future__ import annotations

import torch

#: first position, and a mask, bool `[B, n]`
Noted = tuple[int | torch.Tensor, torch.Tensor]
#: masks of single tokens are put together by so many
BLOCK = 128


class Padding:
    """Masks of the passes that had one, against the positions of all tokens seen, padding counted.

    Nothing waits for the device until `real_among_last` asks, or a block of single tokens' masks is full.
    """

    def __init__(self):
        self._noted: list[Noted] = []
        self._singles = 0  # how many of the last of these are of one token

    def __copy__(self) -> Padding:
        """With a list of its own: what is noted in one is not noted in the other."""
        new = Padding()
        new._noted, new._singles = list(self._noted), self._singles
        return new

    def note(self, start: int | torch.Tensor, mask: torch.Tensor) -> None:
        """mask: bool `[B, n]`, False for padding, of positions `start` and up (a tensor where only the device knows)."""
        self._noted.append((start, mask))
        self._singles = self._singles + 1 if mask.shape[1] == 1 else 0
        if self._singles == BLOCK:
            self._noted[-BLOCK:] = _put_together([(int(start), mask) for start, mask in self._noted[-BLOCK:]])
            self._singles = 0

    def real_among_last(self, count: int, end: int) -> int | torch.Tensor:
        """How many of the last `count` positions before `end` were no padding: a number, or int32 `[B, 1]`."""
        padding: int | torch.Tensor = 0
        for first, mask in self._noted:
            start = int(first)
            low, high = max(start, end - count), min(start + mask.shape[1], end)
            if low < high:
                padding = padding + (~mask[:, low - start : high - start]).sum(1, keepdim=True, dtype=torch.int32)
        return count - padding

    def cut(self, end: int) -> None:
        """Forget positions from `end` on."""
        noted = [(int(start), mask) for start, mask in self._noted]
        self._noted = [(start, mask[:, : end - start]) for start, mask in noted if start < end]
        self._singles = 0

    def select(self, rows: torch.Tensor) -> None:
        """Row `b` becomes what row `rows[b]` was."""
        # beams are chosen in every step: one mask to choose from, not one a token
        known = _put_together(self._noted)
        if len(known) < len(self._noted):
            self._singles = 0
        self._noted = [(start, mask[rows.to(mask.device)]) for start, mask in known]


def _put_together(noted: list[Noted]) -> list[Noted]:
    """Masks that follow each other as one, where it is known that they do."""
    runs: list[tuple[int | torch.Tensor, list[torch.Tensor]]] = []
    end: int | None = None
    for start, mask in noted:
        if isinstance(start, int) and start == end:
            runs[-1][1].append(mask)
        else:
            runs.append((start, [mask]))
        end = start + mask.shape[1] if isinstance(start, int) else None
    return [(start, masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)) for start, masks in runs]


class Length:
    """Of a growing layer: no bound, and the count is known."""

    #: tokens that a row may have, or `None`
    capacity: int | None = None
    #: whether tensors stay where they are, so that compiled and recorded steps can use the layer
    fixed = False
    #: padded tokens seen: a number, or a tensor int64 `[]` on the layer's device
    seen: int | torch.Tensor
    #: how many of them Python knows of
    at_least: int

    def __init__(self):
        self.seen = self.at_least = 0

    def place(self, device: torch.device) -> None:
        """The layer's tensors are on this device."""

    def add(self, tokens: int) -> None:
        """Count tokens of a pass (also of one that is being compiled)."""
        self.seen = self.at_least = self.at_least + tokens

    def set(self, tokens: int) -> None:
        """So many have been seen. Waits for nothing."""
        self.seen = self.at_least = tokens

    def fork(self, capacity: int | None) -> Length:
        """Another count of the same tokens, for another layer with room for `capacity` (`None`: it grows)."""
        new = Length()
        new.set(self.at_least)
        return new

    def ask(self) -> int:
        """How many have been seen; waits for the device where only the device knows."""
        self.at_least = int(self.seen)
        return self.at_least

    def check(self, tokens: int, wait: bool) -> None:
        """Raise `ValueError` where there is no room for so many more. wait: for the device, where only that can tell."""


class FixedLength(Length):
    """Of a preallocated layer."""

    fixed = True
    capacity: int
    seen: torch.Tensor

    @torch.inference_mode(False)  # the count must be writable outside it
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.seen, self.at_least = torch.tensor(0), 0

    def __copy__(self) -> FixedLength:
        """With a bound of its own; the count is the same tensor."""
        new = FixedLength(self.capacity)
        new.__dict__.update(self.__dict__)
        return new

    def place(self, device: torch.device) -> None:
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.seen)

    @torch.inference_mode(False)
    def fork(self, capacity: int | None) -> FixedLength:
        assert capacity is not None
        new = FixedLength(capacity)
        new.seen, new.at_least = self.seen.clone(), self.at_least
        torch._dynamo.mark_static_address(new.seen)
        return new

    def add(self, tokens: int) -> None:
        self.seen.add_(tokens)  # in place: a compiled step reads this address
        if not torch.compiler.is_compiling():
            self.at_least += tokens

    def set(self, tokens: int) -> None:
        self.seen.fill_(tokens)
        self.at_least = tokens

    def check(self, tokens: int, wait: bool) -> None:
        if wait:
            self.ask()
        if self.at_least + tokens > self.capacity:
            raise ValueError(
                f"max_cache_len={self.capacity} is too small: {self.at_least} tokens are stored and {tokens} came in"
            )
