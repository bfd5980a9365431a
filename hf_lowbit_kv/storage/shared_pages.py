"""Pages that several stores use: the one place, on the CPU, that counts who holds them.

A fork of a store reads the full pages of the store that it came from, in the blocks of memory where they lie. Nobody writes to
a full page, so sharing one needs three rules:

- A block belongs to the store that used it first, of those that are alive.
- Only the owner takes free pages from a block.
- A page that another store holds is not free.

Rows of one store share pages too (beams). Their page tables tell, and nothing here knows of them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary


def mask_of(pages: torch.Tensor) -> int:
    """Pages of a block, bool `[pages]` on the CPU, as the bits of a number: page 0 is the lowest."""
    return int.from_bytes(np.packbits(pages.numpy(), bitorder="little").tobytes(), "little")


def pages_of(mask: int, count: int) -> torch.Tensor:
    """The inverse of `mask_of`, of a block of `count` pages."""
    content = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(content, count=count, bitorder="little").astype(bool))


class _Users:
    """Of one block: the stores that use it, in the order in which they came, each with the pages that it holds. Numbers,
    because a cache has many layers, and many blocks in each."""

    def __init__(self) -> None:
        self.pages_of: dict[int, int] = {}  # by a store's number, a bit for each page


#: by block, its users; a block that no two stores ever used is not listed
_users: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: by tensor that stores share and never write (records of parameters), the numbers of these stores
_readers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: reentrant: a store may be collected, and give its pages back, while another one looks
_lock = threading.RLock()
_numbers = itertools.count()


class Holding:
    """What one store has to do with blocks (uint8 `[pages, H, page_bytes]`) that others use too. Ends with the object."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._blocks: list[_Users] = []
        self._read: list[list[int]] = []
        weakref.finalize(self, _leave, self._number, self._blocks, self._read).atexit = False

    def use(self, block: torch.Tensor, pages: int = 0) -> None:
        """Count this store among the users of a block. pages: that it holds, see `mask_of`."""
        with _lock:
            if (users := _users.get(block)) is None:
                users = _users[block] = _Users()
            self._use(users, pages)

    def _use(self, users: _Users, pages: int) -> None:
        if self._number not in users.pages_of:
            self._blocks.append(users)
        users.pages_of[self._number] = users.pages_of.get(self._number, 0) | pages

    def share(self, other: Holding, block: torch.Tensor, pages: int) -> None:
        """Count this store among the users of a block, and behind it another one, which holds these pages."""
        with _lock:
            if (users := _users.get(block)) is None:
                users = _users[block] = _Users()
            self._use(users, 0)
            other._use(users, pages)

    def read(self, tensor: torch.Tensor) -> None:
        """Count this store among those that read a tensor which nobody writes."""
        with _lock:
            if (numbers := _readers.get(tensor)) is None:
                numbers = _readers[tensor] = []
            if self._number not in numbers:
                numbers.append(self._number)
                self._read.append(numbers)

    def owns(self, block: torch.Tensor) -> bool:
        """Whether the block's memory counts as this store's."""
        with _lock:
            users = _users.get(block)
            return users is None or next(iter(users.pages_of), self._number) == self._number

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that stores read counts as this store's."""
        with _lock:
            return next(iter(_readers.get(tensor) or ()), self._number) == self._number

    def closed(self, pool: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The pages of these blocks that this store must not write to, whatever its tables say: bool `[pages of all blocks]`
        on the CPU; `None`: there is no such page."""
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
        """Hold no page of a block any more; one that this store does not own, it does not use any more."""
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
