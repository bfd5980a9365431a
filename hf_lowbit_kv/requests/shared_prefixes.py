"""Prefixes that several requests share: full pages that were read once, and are looked up by their tokens.

A page's key is the hash of all tokens up to its end. Its contents depend only on these tokens, and on where the prompt
was divided into chunks. Pages that no row needs stay until their memory is needed. The least recently used ones are
dropped first.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .row_pool import Prefix, Row, RowPool
from .slot_memory import Pair


class _Page(NamedTuple):
    number: int
    sinks: list[Pair] | None
    """of a first page, the sink before it"""


class SharedPrefixes:
    """The known pages of one pool.

    Args:
        most_sinks: at most this many distinct first pages are kept, each with a copy of its sink. 0: pages are not shared.
    """

    def __init__(self, pool: RowPool, most_sinks: int):
        self._pool, self._most_sinks, self.sharing = pool, most_sinks, most_sinks > 0
        #: ordered by last use, and a page comes after the pages that follow it in a text
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._first_pages = 0

    def _keys(self, ids: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
        digest, start = hashlib.blake2b(digest_size=16), 0
        for length in lengths:
            digest.update(array("q", ids[start:length]).tobytes())
            start = length
            yield digest.digest()

    def find(self, ids: Sequence[int]) -> Prefix | None:
        """The longest known prefix of a text that it may share."""
        # a token remains to be prefilled, and fills the window
        lengths = self._pool.full_lengths(len(ids) - 1) if self._pages else []
        keys: list[bytes] = []
        for key in self._keys(ids, lengths):
            if key not in self._pages:
                break
            keys.append(key)
        if not keys:
            return None
        self._use(keys)
        ((paging, _),) = self._pool.page_pools.items()
        known = [self._pages[key] for key in keys]
        assert known[0].sinks is not None
        return Prefix(lengths[len(keys) - 1], {paging: [page.number for page in known]}, known[0].sinks)

    def keep(self, row: Row, ids: Sequence[int], limit: float = math.inf) -> None:
        """Remember the full pages of a row that holds these tokens (and perhaps more).

        Args:
            limit: bytes of kept prompts that may stay in the pool although no row reads them.
        """
        lengths = self._pool.full_lengths(min(row.length, len(ids))) if self.sharing else []
        keys = list(self._keys(ids, lengths))
        for index, key in enumerate(keys):
            if key in self._pages:
                continue
            ((paging, numbers),) = row.pages.items()
            self._pool.page_pools[paging].acquire(numbers[index : index + 1])
            self._pages[key] = _Page(numbers[index], self._pool.memory.sinks(row.slot) if index == 0 else None)
            self._first_pages += index == 0
        self._use(keys)
        while self._first_pages > self._most_sinks or (self._pages and self._pool.idle_bytes(limit) > limit):
            self._drop_oldest()

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._pages.move_to_end(key)

    def make_room(self, pages: int) -> int:
        """Release pages until this many more are free, or nothing is kept. Returns how many were freed."""
        freed = 0
        while freed < pages and self._pages:
            freed += self._drop_oldest()
        return freed

    def clear(self) -> None:
        while self._pages:
            self._drop_oldest()

    def _drop_oldest(self) -> int:
        _, page = self._pages.popitem(last=False)
        self._first_pages -= page.sinks is not None
        ((paging, _),) = self._pool.page_pools.items()
        return self._pool.release({paging: [page.number]})

    def __len__(self) -> int:
        return len(self._pages)

    def numbers(self) -> Iterator[int]:
        """The known pages."""
        return (page.number for page in self._pages.values())
