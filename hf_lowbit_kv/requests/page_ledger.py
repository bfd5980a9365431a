"""Which pages of a pool are free, and how many holders each of the others has."""

from __future__ import annotations


class PageLedger:
    """Counts the holders of every page. Rows, forks and kept prefixes hold pages; a page without a holder is free.

    Args:
        count: pages of the pool, numbered from 0.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page; it then has one holder. Raises `IndexError` if there is none."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is not free."""
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] += 1

    def drop(self, page: int) -> bool:
        """Remove a holder. Returns whether the page is free now."""
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
            return True
        return False

    def holders(self, page: int) -> int:
        return self._holders[page]
