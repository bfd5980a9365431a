"""Random sequences of a pool's operations: every row holds its own text, and every page has its holders.

Free pages and windows of empty slots are NaN all the time. `SEQUENCES=n` runs n sequences; `make test-all` runs 5000.
"""

import os

import pytest
from pool_machine import KINDS, Machine, Operation, sequences
from sequence_operations import for_each

from hf_lowbit_kv.requests.shared_prefixes import SharedPrefixes

#: sequences of all kinds together
FAST, ALL = 120, 5000


def explore(kind: str, count: int) -> int:
    """Run sequences. How many rows began with a shared prefix."""
    machines = []

    def run(sequence):
        machine = Machine(kind)
        machine.run(sequence)
        machines.append((machine.hits, machine.attached))

    for_each(sequences(), count, f"pool {kind}", run)
    hits, attached = map(sum, zip(*machines, strict=True))
    print(f"{hits} rows with a prefix, {attached} with a kept prompt or a cache")
    assert attached > 0
    return hits


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence(kind, one_thread):
    hits = explore(kind, int(os.environ.get("SEQUENCES") or FAST) // len(KINDS))
    assert (hits > 0) == (kind != "two windows")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_sequences(kind, one_thread):
    explore(kind, ALL // len(KINDS))


@pytest.mark.parametrize("most", [1, 2])
def test_as_many_beginnings_are_kept_as_there_is_room_for(most):
    """Of two texts that differ in their first page, both or the later one."""
    machine = Machine("dense")
    machine.prefixes, texts = SharedPrefixes(machine.pool, most), []
    for which in (0, 1):
        machine.run_one(Operation("enter", which, 60))
        machine.run_one(Operation("chunk", which, 128))
        machine.run_one(Operation("keep", which, 1))
        texts.append(machine.texts[machine.pool.rows[which]])
    assert [machine.prefixes.find(text) is not None for text in texts] == [most == 2, True]


def test_kept_texts_stay_attached_while_rows_read_them_or_as_many_as_are_allowed():
    """Of two texts one may stay when no row reads them: that which was used last."""
    machine = Machine("dense")
    prefixes, pool = machine.prefixes, machine.pool
    for which in (0, 1):
        machine.run_one(Operation("kept prompt", which, 4))
    rows, (pages,) = list(pool.rows), pool.page_pools.values()
    texts, allowed = [machine.texts[row] for row in rows], len(pages.attached[0]) * machine.layers[0].page_bytes
    for row, text in zip(rows, texts, strict=True):
        prefixes.keep(row, text, allowed)
    assert [prefixes.find(text) is not None for text in texts] == [True, True]
    for _ in rows:
        machine.run_one(Operation("end", 0, 3))
    assert len(pages.attached) == 2
    prefixes.keep(pool.enter(40), [], allowed)
    assert [prefixes.find(text) is not None for text in texts] == [False, True]
    assert len(pages.attached) == 1


#: what random sequences seldom come to
KEPT = {
    "a kept prompt is gone, and an empty slot's table has named its pages": [
        Operation("enter", 0, 40), Operation("enter", 0, 136), Operation("enter", 0, 168), Operation("end", 0, 1),
        Operation("kept prompt", 0, 4), Operation("chunk", 0, 64), Operation("end", 2, 1), Operation("make room", 0, 1),
        Operation("step", 0, 1),
    ],
    "a prefix is used, dropped and its row goes on": [
        Operation("enter", 1, 110), Operation("chunk", 1, 110), Operation("keep", 0, 1), Operation("end", 0, 1),
        Operation("enter", 1, 110), Operation("make room", 0, 4), Operation("chunk", 1, 100), Operation("step", 1, 3),
    ],
    "a row is forked before its window has filled after a prefix": [
        Operation("enter", 1, 110), Operation("chunk", 0, 128), Operation("end", 0, 1), Operation("enter", 1, 10),
        Operation("fork", 0, 1), Operation("chunk", 1, 40), Operation("step", 1, 3), Operation("chunk", 0, 40),
    ],
    "a fork outlives the row it came from, whose slot another one takes": [
        Operation("enter", 1, 60), Operation("chunk", 1, 100), Operation("enter", 2, 30), Operation("fork", 0, 1),
        Operation("end", 0, 1), Operation("step", 1, 3), Operation("step", 0, 5), Operation("chunk", 1, 40),
    ],
    "there is no room for a row that would go on from a kept prompt": [
        Operation("enter", 0, 200), Operation("enter", 0, 200), Operation("enter", 0, 60), Operation("kept prompt", 0, 130),
    ],
    "rows go on from a cache, which then reads another text": [
        Operation("cache", 0, 4), Operation("cache", 0, 4), Operation("change the cache", 0, 190),
        Operation("cache", 1, 4), Operation("cache", 1, 4), Operation("change the cache", 1, 190),
    ],
    "rows go on from kept prompts in two layouts": [
        Operation("kept prompt", 0, 4), Operation("kept prompt", 1, 4), Operation("chunk", 0, 40), Operation("chunk", 1, 40),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_sequence(kind, name):
    Machine(kind).run(KEPT[name])
