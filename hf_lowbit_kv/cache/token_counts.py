"""How many tokens a layer has seen and can hold, and which positions were padding.

A growing layer counts in Python. A preallocated layer counts on the device, because compiled and recorded steps advance
the count there; Python knows a lower bound. Everything that depends on a length (pages, windows, steps) is the same for
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..storage.process_stamps import Unstamped
from ..storage.store_forks import copies_of

if TYPE_CHECKING:
    from .low_bit_cache import LowBitCache
    from .low_bit_layer import LowBitLayer

#: first position, and a mask, bool `[B, n]`
Noted = tuple[int | torch.Tensor, torch.Tensor]
#: this many masks of single tokens are joined into one
BLOCK = 128


class Seen(int):
    """Tokens that a packed layer has seen before a pass of several tokens. transformers takes this number from the cache
    to the mask function, which so finds both."""

    layer: LowBitLayer
    cache: LowBitCache

    @classmethod
    def by(cls, layer: LowBitLayer) -> Seen:
        """The count of this layer; the cache adds itself. Waits for the device."""
        new = cls(int(layer.get_seq_length()))
        new.layer = layer
        return new


class Padding(Unstamped):
    """Masks of the passes that had one, with the positions of all tokens seen, padding included.

    Nothing waits for the device until `real_among_last` asks, or a block of single tokens' masks is full.
    """

    def __init__(self):
        self._noted: list[Noted] = []
        self._singles = 0  # how many of the last masks are of one token

    def __copy__(self) -> Padding:
        """A copy with its own list."""
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
        """How many of the last `count` positions before `end` were not padding: a number, or int32 `[B, 1]`."""
        padding: int | torch.Tensor = 0
        for first, mask in self._noted:
            start = int(first)
            low, high = max(start, end - count), min(start + mask.shape[1], end)
            if low < high:
                padding = padding + (~mask[:, low - start : high - start]).sum(1, keepdim=True, dtype=torch.int32)
        return count - padding

    def real(self, end: int) -> torch.Tensor | None:
        """bool `[B, end]`: which of the positions before `end` were not padding; `None`: all. Waits for the device."""
        self._noted = _put_together([(int(start), mask) for start, mask in self._noted])
        self._singles = 0
        if not self._noted:
            return None
        mask = self._noted[0][1]
        real = torch.ones(len(mask), end, dtype=torch.bool, device=mask.device)
        for start, mask in self._noted:
            real[:, int(start) : int(start) + mask.shape[1]] = mask
        return real

    def cut(self, end: int) -> None:
        """Forget positions from `end` on."""
        noted = [(int(start), mask) for start, mask in self._noted]
        self._noted = [(start, mask[:, : end - start]) for start, mask in noted if start < end]
        self._singles = 0

    def select(self, rows: torch.Tensor) -> None:
        """Row `b` gets the masks of row `rows[b]`."""
        # beams are chosen in every step: indexing one joined mask is faster than one for each token
        known = _put_together(self._noted)
        if len(known) < len(self._noted):
            self._singles = 0
        self._noted = [(start, mask[rows.to(mask.device)]) for start, mask in known]


def _put_together(noted: list[Noted]) -> list[Noted]:
    """Join masks that are known to follow each other."""
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
    """A count that Python knows: of a growing layer, and of rows in a pool, which knows their lengths.

    Args:
        capacity: tokens that a row can hold; `None`: there is no bound.
    """

    #: tokens seen, padding included: a number, or a tensor int64 `[]` on the layer's device
    seen: int | torch.Tensor
    #: how many of them Python knows about
    at_least: int

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.seen = self.at_least = 0

    @property
    def fixed(self) -> bool:
        """Whether tensors stay where they are, so that compiled and recorded steps can use the layer."""
        return self.capacity is not None

    def place(self, device: torch.device) -> None:
        """The layer's tensors are on this device."""

    def add(self, tokens: int) -> None:
        """Count tokens of a pass (also of one that is being compiled)."""
        self.seen = self.at_least = self.at_least + tokens

    def set(self, tokens: int) -> None:
        """Set the count. Waits for nothing."""
        self.seen = self.at_least = tokens

    def fork(self, capacity: int | None, copies: Iterator[torch.Tensor]) -> Length:
        """A count of the same tokens, see `fork_lengths`. copies: the next one is that of `seen` if it is a tensor."""
        new = Length()
        new.set(self.at_least)
        return new

    def ask(self) -> int:
        """The number of tokens seen. Waits for the device if only the device knows it."""
        self.at_least = int(self.seen)
        return self.at_least

    def agrees_with(self, others: Sequence[Length]) -> None:
        """Bring the counts of a cache's layers up to date at the begin of a pass. The layers have seen the same tokens, so
        only this count is read from the device, and the next `check` of the others need not wait."""

    def check(self, tokens: int, wait: bool) -> None:
        """Raise `ValueError` if there is no room for this many more tokens. wait: wait for the device if only it
        knows."""


class FixedLength(Length):
    """The count of a preallocated layer."""

    capacity: int
    seen: torch.Tensor
    #: whether `at_least` is what the device has counted, so that the next check need not wait
    _compared = False

    @torch.inference_mode(False)  # the count must be writable outside it
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.seen, self.at_least = torch.tensor(0), 0

    def __copy__(self) -> FixedLength:
        """A count with its own bound; it uses the same tensor."""
        new = FixedLength(self.capacity)
        new.__dict__.update(self.__dict__)
        return new

    def place(self, device: torch.device) -> None:
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.seen)

    def fork(self, capacity: int | None, copies: Iterator[torch.Tensor]) -> FixedLength:
        assert capacity is not None
        new = FixedLength.__new__(FixedLength)  # without a tensor that would be replaced
        new.capacity, new.seen, new.at_least = capacity, next(copies), self.at_least
        torch._dynamo.mark_static_address(new.seen)
        return new

    def add(self, tokens: int) -> None:
        self.seen.add_(tokens)  # in place: a compiled step reads this address
        if not torch.compiler.is_compiling():
            self.at_least += tokens

    def set(self, tokens: int) -> None:
        self.seen.fill_(tokens)
        self.at_least = tokens

    def agrees_with(self, others: Sequence[Length]) -> None:
        before = self.at_least
        missed = self.ask() - before  # tokens of compiled steps
        for other in others:
            assert isinstance(other, FixedLength)
            if other is not self:
                other.at_least += missed
            other._compared = True

    def check(self, tokens: int, wait: bool) -> None:
        if wait and not self._compared:
            self.ask()
        self._compared = False
        if self.at_least + tokens > self.capacity:
            raise ValueError(
                f"max_cache_len={self.capacity} is too small: {self.at_least} tokens are stored and {tokens} came in"
            )


@torch.inference_mode(False)
def fork_lengths(lengths: Sequence[Length], capacity: int | None, n: int) -> list[list[Length]]:
    """`n` times counts of the same tokens, for layers with room for `capacity` tokens (`None`: they grow)."""
    seen = [length.seen for length in lengths if isinstance(length, FixedLength)] * n
    copies = iter(copies_of(seen) if seen else ())
    return [[length.fork(capacity, copies) for length in lengths] for _ in range(n)]
