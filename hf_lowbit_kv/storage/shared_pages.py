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

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class _Users:
    """Of one block: the stores that use it, in the order in which they came, and how many of them hold each page."""

    def __init__(self, pages: int):
        self.held: dict[int, torch.Tensor] = {}  # by a store's number, bool [pages]
        self.holders = torch.zeros(pages, dtype=torch.int32)


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

    def use(self, block: torch.Tensor, pages: torch.Tensor | None = None) -> None:
        """Count this store among the users of a block. pages: bool `[pages]`, those that it holds, on the CPU."""
        with _lock:
            if (users := _users.get(block)) is None:
                users = _users[block] = _Users(len(block))
            if self._number not in users.held:
                users.held[self._number] = torch.zeros(len(block), dtype=torch.bool)
                self._blocks.append(users)
            if pages is not None:
                new = pages & ~users.held[self._number]
                users.held[self._number] |= new
                users.holders += new

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
            return users is None or next(iter(users.held), self._number) == self._number

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that stores read counts as this store's."""
        with _lock:
            return next(iter(_readers.get(tensor) or ()), self._number) == self._number

    def closed(self, pool: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The pages of these blocks that this store must not write to, whatever its tables say: bool `[pages of all blocks]`
        on the CPU; `None`: there is no such page."""
        with _lock:
            parts = [self._closed(block) for block in pool]
        found = torch.cat(parts)
        return found if bool(found.any()) else None

    def _closed(self, block: torch.Tensor) -> torch.Tensor:
        if (users := _users.get(block)) is None:
            return torch.zeros(len(block), dtype=torch.bool)
        if not self.owns(block):
            return torch.ones(len(block), dtype=torch.bool)
        own = users.held.get(self._number)
        return users.holders > (0 if own is None else own.int())

    def let_go(self, block: torch.Tensor) -> None:
        """Hold no page of a block any more; one that this store does not own, it does not use any more."""
        with _lock:
            if (users := _users.get(block)) is None or self._number not in users.held:
                return
            owned = self.owns(block)
            users.holders -= users.held.pop(self._number).int()
            if owned:  # and stays the first
                users.held = {self._number: torch.zeros(len(block), dtype=torch.bool), **users.held}
            else:
                self._blocks.remove(users)


def _leave(number: int, blocks: list[_Users], read: list[list[int]]) -> None:
    with _lock:
        while blocks:
            users = blocks.pop()
            users.holders -= users.held.pop(number).int()
        while read:
            read.pop().remove(number)
