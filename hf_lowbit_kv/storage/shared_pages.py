"""Pages that several stores share. This is the only place, on the CPU, that counts which store holds which page.

A fork reads the full pages of the store that it came from, in the memory blocks where they are. A full page is never written
to, so sharing needs only three rules:

- A block belongs to the oldest living store that uses it.
- Only the owner takes free pages from a block.
- A page that another store holds is not free.

Rows of one store share pages too (beams). Their page tables show that; it is not counted here.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary


def mask_of(pages: np.ndarray) -> int:
    """Pages of a block, bool `[pages]`, as the bits of a number; page 0 is the lowest bit."""
    return int.from_bytes(np.packbits(pages, bitorder="little").tobytes(), "little")


def pages_of(mask: int, count: int) -> torch.Tensor:
    """The inverse of `mask_of`, for a block of `count` pages: bool `[count]` on the CPU."""
    content = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(content, count=count, bitorder="little").astype(bool))


class _Users:
    """The stores that use one block, in the order in which they came, each with the pages that it holds. Numbers,
    because a cache has many layers, and many blocks in each."""

    def __init__(self) -> None:
        self.pages_of: dict[int, int] = {}  # by a store's number, a bit for each page


#: the users of each block; blocks that only one store has ever used are not listed
_users: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: for each tensor that stores share and never write (records of parameters): the numbers of these stores
_readers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: reentrant, because a store may be garbage-collected and release its pages while another store holds the lock
_lock = threading.RLock()
_numbers = itertools.count()


class Holding:
    """One store's part in blocks (uint8 `[pages, H, page_bytes]`) that other stores use too. It ends when the object is
    deleted."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._blocks: list[_Users] = []
        self._read: list[list[int]] = []
        weakref.finalize(self, _leave, self._number, self._blocks, self._read).atexit = False

    def use(self, block: torch.Tensor, pages: int = 0) -> None:
        """Count this store among the users of a block. pages: the pages that it holds, see `mask_of`."""
        with _lock:
            if (users := _users.get(block)) is None:
                users = _users[block] = _Users()
            self._use(users, pages)

    def _use(self, users: _Users, pages: int) -> None:
        if self._number not in users.pages_of:
            self._blocks.append(users)
        users.pages_of[self._number] = users.pages_of.get(self._number, 0) | pages

    def share(self, others: Sequence[Holding], blocks: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Count this store among the users of each block, and after it other stores, which hold these pages of it."""
        with _lock:
            for block, pages in blocks:
                if (users := _users.get(block)) is None:
                    users = _users[block] = _Users()
                for holding, held in ((self, 0), *((other, pages) for other in others)):
                    holding._use(users, held)

    def read(self, tensor: torch.Tensor) -> None:
        """Count this store among the readers of a read-only tensor."""
        with _lock:
            if (numbers := _readers.get(tensor)) is None:
                numbers = _readers[tensor] = []
            if self._number not in numbers:
                numbers.append(self._number)
                self._read.append(numbers)

    def owns(self, block: torch.Tensor) -> bool:
        """Whether the block's memory counts in this store."""
        with _lock:
            users = _users.get(block)
            return users is None or next(iter(users.pages_of), self._number) == self._number

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a shared tensor counts in this store."""
        with _lock:
            return next(iter(_readers.get(tensor) or ()), self._number) == self._number

    def closed(self, pool: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The pages of these blocks that this store must not write, whatever its tables say: bool `[pages of all
        blocks]` on the CPU; `None`: there is no such page."""
        with _lock:
            masks = [self._closed(block) for block in pool]
        if not any(masks):
            return None
        return torch.cat([pages_of(mask, len(block)) for mask, block in zip(masks, pool, strict=True)])

    def _closed(self, block: torch.Tensor) -> int:
        if (users := _users.get(block)) is None:
            return 0
        if not self.owns(block):
            return (1 << len(block)) - 1
        closed = 0
        for number, pages in users.pages_of.items():
            if number != self._number:
                closed |= pages
        return closed

    def let_go(self, block: torch.Tensor) -> None:
        """Release all pages of a block. If this store does not own the block, it is no longer a user of it."""
        with _lock:
            if (users := _users.get(block)) is None or self._number not in users.pages_of:
                return
            owned = self.owns(block)
            del users.pages_of[self._number]
            if owned:  # and stays the first
                users.pages_of = {self._number: 0, **users.pages_of}
            else:
                self._blocks.remove(users)


def _leave(number: int, blocks: list[_Users], read: list[list[int]]) -> None:
    with _lock:
        while blocks:
            del blocks.pop().pages_of[number]
        while read:
            read.pop().remove(number)
