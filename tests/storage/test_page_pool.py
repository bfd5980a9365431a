"""Reference counts of pages: acquired and released by any user, in any order of ends."""

import copy
import gc
import pickle
import random
import threading

import numpy as np
import pytest

from hf_lowbit_kv.storage.page_pool import PagePool, PageUser, RowPages, Slab, locate


def _references(pages: RowPages) -> list[int]:
    return np.concatenate([slab.references for slab in pages.slabs]).tolist()


def _held(pages: int) -> tuple[PageUser, Slab]:
    """A slab, and an object with a reference to each of its pages."""
    user, slab = PageUser(), Slab(pages)
    user.set_references({slab: np.ones(pages, dtype=np.int32)})
    return user, slab


def test_forks_have_references_to_full_pages_until_they_are_collected():
    """In whatever thread that happens."""
    pages = RowPages(2, 4)
    forks = pages.fork(3, np.array([2, 1]), 5)
    assert pages.table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _references(pages) == [4, 4, 1, 1, 4, 1, 1, 1]
    assert forks[0].table.tolist() == [[7, 8, 0, 1, 2], [11, 3, 4, 5, 6]]
    for left in (2, 1, 0):
        thread = threading.Thread(target=forks.pop)
        thread.start()
        thread.join()
        gc.collect()
        assert _references(pages) == [1 + left, 1 + left, 1, 1, 1 + left, 1, 1, 1]


def test_rows_share_full_pages_and_no_others():
    """Random rows are chosen: entries before a row's end name the pages of the row it was, all others belong to one entry."""
    generator = np.random.default_rng(0)
    pages = RowPages(4, 6)
    paged = np.zeros(4, dtype=np.int64)
    fork, fork_full = None, np.zeros(4, dtype=np.int64)
    for step in range(200):
        paged = np.minimum(paged + generator.integers(0, 12, 4), 6 * 16)
        rows = generator.integers(0, 4, 4)
        before, full = pages.table[rows], np.arange(6) < (paged[rows] // 16)[:, None]
        pages.set(pages.selected(paged[rows], 16, rows))
        paged = paged[rows]
        assert (pages.table == before)[full].all()
        own = pages.table[~full]
        assert len(np.unique(own)) == len(own)
        assert not np.isin(own, pages.table[full]).any()
        if fork is not None:  # nor to a page of the fork
            shared = fork.table[np.arange(6) < fork_full[:, None]]
            slab, index = locate(fork.slabs, shared)
            kept = {(id(fork.slabs[b]), p) for b, p in zip(slab.tolist(), index.tolist(), strict=True)}
            slab, index = locate(pages.slabs, own)
            assert kept.isdisjoint((id(pages.slabs[b]), p) for b, p in zip(slab.tolist(), index.tolist(), strict=True))
        if step % 40 == 20:
            fork_full = paged // 16
            (fork,) = pages.fork(1, fork_full, 6)
        if step % 40 == 39:
            paged = np.zeros(4, dtype=np.int64)
            pages.set(pages.emptied())
    assert sum(map(len, pages.slabs)) <= 2 * 4 * 6


def test_a_copy_has_references_of_its_own():
    pages = RowPages(1, 3)
    (fork,) = pages.fork(1, np.array([2]), 3)
    for new in (copy.deepcopy(fork), pickle.loads(pickle.dumps(fork))):
        assert _references(pages) == [2, 2, 1]
        assert _references(new) == [1, 1, 1, 0]
        assert all(slab.owner is new for slab in new.slabs)


def test_a_slab_belongs_to_its_oldest_living_user():
    kept, slab = _held(3)
    one, other = (RowPages(1, 1) for _ in range(2))
    for pages in (one, other):
        pages.set(pages.adopting([slab], np.array([[0, 1]]), np.array([[True, True]])))
    assert slab.owner is kept
    assert slab.references.tolist() == [3, 3, 1]
    del kept
    assert slab.owner is one
    del one, pages
    assert slab.owner is other
    assert slab.references.tolist() == [1, 1, 0]
    other.set(other.emptied())  # and may now use all of it
    assert other.table.tolist() == [[0, 1]]
    assert len(other.slabs) == 1


def test_rows_that_leave_a_slab_have_no_part_in_it():
    (kept, slab), pages = _held(2), RowPages(1, 1)
    pages.set(pages.adopting([slab], np.array([[0, 1]]), np.array([[True, True]])))
    assert slab.references.tolist() == [2, 2]
    pages.set(pages.emptied())
    assert slab not in pages.slabs
    assert slab.references.tolist() == [1, 1]
    del kept
    assert slab.owner is None
    assert slab.references.tolist() == [0, 0]


def test_numbers_that_are_not_set_have_no_references():
    """Memory runs out for them: the present ones and their counts stay."""
    pages = RowPages(2, 3)
    (fork,) = pages.fork(1, np.array([2, 1]), 3)
    table, references = pages.table.tolist(), _references(pages)
    rows = pages.selected(np.array([32, 32]), 16, np.array([0, 0]))
    added = pages.widened(1).slabs[-1]
    assert pages.table.tolist() == table
    assert _references(pages) == references
    assert _references(fork) == [1, 1, 1, *references]
    assert added.references.tolist() == [0] * len(added)
    pages.set(rows)
    assert _references(pages)[: len(references)] != references


def test_entries_are_all_that_have_another_page():
    """Layers write only these entries' addresses. A number may stay while its slab is another one."""

    def present() -> list[list[tuple[Slab, int]]]:
        located = zip(*(part.tolist() for part in locate(pages.slabs, pages.table)), strict=True)
        return [[(pages.slabs[slab], index) for slab, index in zip(*row, strict=True)] for row in located]

    (_kept, slab), pages = _held(2), RowPages(2, 3)
    adopted = np.array([[False, False, False], [False, True, True]])
    for change in (
        lambda: pages.selected(np.array([33, 20]), 16, np.array([1, 1])),
        lambda: pages.adopting([slab], np.array([[0, 0, 0], [0, 0, 1]]), adopted),
        pages.emptied,
        lambda: pages.widened(1),
    ):
        before, numbers = present(), change()
        entries = set(zip(*(part.tolist() for part in pages.entries(numbers)), strict=True))
        pages.set(numbers)
        rows = range(2) if numbers.rows is None else numbers.rows
        for b, row in enumerate(present()):
            assert {p for p, page in enumerate(row) if before[rows[b]][p : p + 1] != [page]} <= {
                column for each, column in entries if each == b
            }


def test_numbers_of_adopted_slabs_stay_and_are_used_again():
    """A thousand texts come and go, three at a time: page numbers do not grow with them."""
    pages, generator, held = PagePool(8), random.Random(0), []
    for _ in range(1000):
        slab = Slab(generator.randint(1, 5))
        first = pages.first_page(pages.adopt(slab))
        numbers = list(range(first, first + len(slab)))
        pages.acquire(numbers)
        held.append((slab, numbers))
        for each, of_slab in held:
            assert {pages.slabs[number] for number in locate(pages.slabs, np.array(of_slab))[0]} == {each}
        if len(held) == 3:
            gone, numbers = held.pop(generator.randrange(3))
            assert pages.release(numbers) == 0
            assert gone not in pages.adopted or pages.drop_unread()
    assert numbers[-1] < 8 + 3 * (1 + 2 + 3 + 4 + 5)
    assert pages.free == 8


def test_a_page_of_the_pool_is_free_without_references():
    pages = PagePool(2)
    (page,) = pages.take(1)
    pages.acquire([page])
    assert pages.release([page]) == 0
    assert pages.free == 1
    assert pages.release([page]) == 1
    assert pages.free == 2
    with pytest.raises(IndexError, match="only 2 are"):
        pages.take(3)


def test_a_page_of_the_pool_to_which_another_object_refers_is_not_free():
    pages, other = PagePool(2), PageUser()
    (page,) = pages.take(1)
    other.set_references({pages.slabs[0]: (np.arange(2) == page).astype(np.int32)})
    assert pages.release([page]) == 0
    assert pages.take(1) == [1 - page]
    with pytest.raises(IndexError, match="only 0 are"):
        pages.take(1)


def test_the_memory_of_an_adopted_slab_does_not_count_in_the_pool():
    pages, (kept, slab) = PagePool(1), _held(2)
    pages.adopt(slab)
    pages.acquire([1, 2])
    del kept
    assert slab.owner is None
    assert slab.references.tolist() == [1, 1]
