"""How many tokens a layer has seen and may see, and where that is counted: all that sets growing and preallocated layers apart.

A growing layer counts in Python. A preallocated one counts on the device, because compiled and recorded steps advance the count
there, and knows a lower bound in Python. What a layer does with a length (pages, windows, steps) is the same for both.
"""

from __future__ import annotations

import torch


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
