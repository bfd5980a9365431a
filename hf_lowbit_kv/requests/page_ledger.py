"""Page numbers of a pool: which pages are free, and how many holders each of the others has."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..storage.shared_pages import Holding


@dataclass(eq=False)
class AttachedBlock:
    """A block of pages that belongs to a kept text or to a cache, in every layer of one paging."""

    key: torch.Tensor
    """identifies it: the first layer's, as its owner has it"""
    blocks: list[torch.Tensor]
    """by layer, in the pool's layout"""
    first: int
    """number of its first page"""
    place: int
    """pages that come before it in page tables"""
    holders: int = 0
    """of all of its pages together"""
    holding: Holding = field(default_factory=Holding)
    """keeps the pages from being written"""

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class PageLedger:
    """Counts the holders of every page of one paging. Rows, forks and kept prefixes hold pages; a page without a holder is
    free. Blocks of others can be attached. Their pages have numbers from `count` on, which are never used again.

    Args:
        count: pages of the pool, numbered from 0.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self.blocks: list[AttachedBlock] = []
        """in the order of page tables"""
        self._block_of: dict[int, AttachedBlock] = {}
        self._next = count

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page; it then has one holder. Raises `IndexError` if there is none."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is not free."""
        if page >= self.count:
            self._block_of[page].holders += 1
            return
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] += 1

    def drop(self, page: int) -> bool:
        """Remove a holder. Returns whether the page is free now."""
        if page >= self.count:
            self._block_of[page].holders -= 1
            return False
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
            return True
        return False

    def holders(self, page: int) -> int:
        return self._holders[page]

    # ---- blocks of others -----------------------------------------------------------------------------------------

    def attached(self, key: torch.Tensor) -> AttachedBlock | None:
        return next((block for block in self.blocks if block.key is key), None)

    def attach(self, key: torch.Tensor, blocks: list[torch.Tensor]) -> AttachedBlock:
        """Number the pages of a block. They have no holder yet."""
        block = AttachedBlock(key, blocks, self._next, self.count + sum(len(each.key) for each in self.blocks))
        self._next += len(key)
        self.blocks.append(block)
        self._block_of.update(dict.fromkeys(range(block.first, self._next), block))
        return block

    def detach(self, block: AttachedBlock) -> None:
        """Forget a block. Later ones move up in page tables."""
        self.blocks.remove(block)
        for page in range(block.first, block.first + len(block.key)):
            del self._block_of[page]
        for each, end in zip(self.blocks, accumulate(len(each.key) for each in self.blocks), strict=True):
            each.place = self.count + end - len(each.key)

    def block_of(self, page: int) -> AttachedBlock | None:
        """`None`: a page of the pool."""
        return self._block_of.get(page)

    def place(self, page: int) -> int:
        """The page's number in page tables, which count through the pool's pages and the attached blocks."""
        return page if (block := self._block_of.get(page)) is None else block.place + page - block.first
