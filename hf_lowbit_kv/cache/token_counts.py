"""How many tokens a layer has seen and can hold, and which positions were padding.

A growing layer counts in Python (`Length`). A preallocated layer counts on the device, because compiled and recorded steps
advance the count there (`DeviceLength`). Python then knows only a lower bound, `at_least`. A pool counts its rows itself
(`PoolLength`). All have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..storage.process_stamps import Unstamped
from ..storage.row_memory import copies_of

if TYPE_CHECKING:
    from .low_bit_cache import LowBitCache
    from .low_bit_layer import LowBitLayer

#: position of the mask's first column; mask, bool `[B, n]`, False for padding
Noted = tuple[int | torch.Tensor, torch.Tensor]
#: number of one-token masks that are joined into one mask
BLOCK = 128


class Seen(int):
    """The number of tokens that a packed layer has seen before a pass of several tokens, with references to layer and cache.
    transformers gets it from the cache and passes it to the mask function, which needs both."""

    layer: LowBitLayer
    cache: LowBitCache

    @classmethod
    def by(cls, layer: LowBitLayer) -> Seen:
        """The count of a layer. The caller sets `cache`. Waits for the device."""
        new = cls(int(layer.get_seq_length()))
        new.layer = layer
        return new


class RingOffset(int):
    """The positions of keys in rings (`ring_layer`), which differ between rows. transformers gets this object from the cache as
    the offset of a mask, and passes it to the mask function."""

    new: torch.Tensor
    """int64 `[rows]`: positions of the new tokens, which are in the rings already"""

    @classmethod
    def of(cls, new: torch.Tensor) -> RingOffset:
        offset = cls()
        offset.new = new
        return offset

    def mask(self, slots: int, allows: Callable[..., Any]) -> torch.Tensor:
        """bool `[rows, 1, 1, slots]`: which slots the new tokens attend to.

        Args:
            allows: a mask function of `transformers.masking_utils`.
        """
        new = self.new[:, None, None, None]
        keys = new - (new - torch.arange(slots, device=new.device)) % slots
        rows = torch.arange(len(new), device=new.device)[:, None, None, None]
        return (keys >= 0) & allows(rows, torch.zeros_like(rows), new, keys)


class Padding(Unstamped):
    """The padding among the positions that a cache has seen: the masks of all passes with a mask.

    Positions count padding too, although it is not stored. Only joining `BLOCK` masks of single tokens waits for the device,
    and the methods that state it.
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
        """Add the mask of a pass: bool `[B, n]`, False for padding. start: position of its first column; a tensor if only the
        device knows it."""
        self._noted.append((start, mask))
        self._singles = self._singles + 1 if mask.shape[1] == 1 else 0
        if self._singles == BLOCK:
            self._noted[-BLOCK:] = _put_together([(int(start), mask) for start, mask in self._noted[-BLOCK:]])
            self._singles = 0

    def real_among_last(self, count: int, end: int) -> int | torch.Tensor:
        """How many of the last `count` positions before `end` were not padding: a number, or int32 `[B, 1]`. Waits for the
        device."""
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
        """Forget positions from `end` on. Waits for the device."""
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
    """Join each mask with the next one if the CPU knows that it begins where this one ends."""
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
    """A count in Python, for growing layers."""

    #: whether a pool counts the rows, and knows which texts they hold
    of_pool = False
    #: tokens that a row can hold; `None`: there is no bound
    capacity: int | None = None
    #: whether the layer's tensors never move. Compiled and recorded steps need that
    fixed = False
    #: tokens seen, padding included: a number, or a tensor int64 `[]` on the layer's device
    seen: int | torch.Tensor
    #: lower bound of `seen`, known in Python
    at_least: int

    def __init__(self) -> None:
        self.seen = self.at_least = 0

    def place(self, device: torch.device) -> None:
        """Called when the layer allocates its tensors on this device."""

    def add(self, tokens: int) -> None:
        """Count tokens of a pass (also of one that is being compiled)."""
        self.seen = self.at_least = self.at_least + tokens

    def set(self, tokens: int) -> None:
        """Set the count. Does not wait for the device."""
        self.seen = self.at_least = tokens

    def fork(self, capacity: int | None, copies: Iterator[torch.Tensor]) -> Length:
        """A new count of the same tokens. copies: if `seen` is a tensor, the next of these is its copy (`fork_lengths`)."""
        new = Length()
        new.set(self.at_least)
        return new

    def read_count(self) -> int:
        """The number of tokens seen. Waits for the device if only the device knows it."""
        self.at_least = int(self.seen)
        return self.at_least

    def sync_counts(self, others: Sequence[Length]) -> None:
        """Update the counts of all layers of a cache at the beginning of a pass. The layers have seen the same tokens, so only
        this count is read from the device. The next `check` of each layer then does not wait.

        Args:
            others: the counts of all layers, this one included.
        """

    def check(self, tokens: int, wait: bool) -> None:
        """Raise `ValueError` if there is no room for this many more tokens. wait: whether to wait for the device if only it
        knows the count. Otherwise the lower bound is checked."""


class DeviceLength(Length):
    """The number of tokens in a preallocated layer, an int64 scalar on the device."""

    capacity: int
    fixed = True
    seen: torch.Tensor
    #: whether `at_least` is the device's count, so that the next `check` need not wait
    _compared = False

    @torch.inference_mode(False)  # the count must be writable outside of inference mode
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.seen, self.at_least = torch.tensor(0), 0

    def __copy__(self) -> DeviceLength:
        """A count with its own `at_least`. Both use the same tensor."""
        new = DeviceLength(self.capacity)
        new.__dict__.update(self.__dict__)
        return new

    def place(self, device: torch.device) -> None:
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.seen)

    def fork(self, capacity: int | None, copies: Iterator[torch.Tensor]) -> DeviceLength:
        assert capacity is not None
        new = DeviceLength.__new__(DeviceLength)  # `__init__` would allocate a tensor only to be replaced
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

    def sync_counts(self, others: Sequence[Length]) -> None:
        before = self.at_least
        missed = self.read_count() - before  # tokens of compiled steps
        for other in others:
            assert isinstance(other, DeviceLength)
            if other is not self:
                other.at_least += missed
            other._compared = True

    def check(self, tokens: int, wait: bool) -> None:
        if wait and not self._compared:
            self.read_count()
        self._compared = False
        if self.at_least + tokens > self.capacity:
            raise ValueError(
                f"max_cache_len={self.capacity} is too small: the cache holds {self.at_least} tokens and got {tokens} more"
            )


class PoolLength(Length):
    """The length of rows of a pool. The pool sets it before each pass, sees to the rows' room, and crops no row. If rows
    differ in length, any of their lengths is correct."""

    fixed = of_pool = True

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def add(self, tokens: int) -> None:
        """Counts nothing: layers share this object."""


@torch.inference_mode(False)
def fork_lengths(lengths: Sequence[Length], capacity: int | None, n: int) -> list[list[Length]]:
    """The token counts of `n` forks, for each fork and layer. capacity: of the forks, tokens per row; `None`: they grow."""
    seen = [length.seen for length in lengths if isinstance(length, DeviceLength)] * n
    copies = iter(copies_of(seen) if seen else ())
    return [[length.fork(capacity, copies) for length in lengths] for _ in range(n)]
