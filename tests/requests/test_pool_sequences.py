"""Random sequences of operations on a pool of rows without a model: every row holds its own text, and every page has its
holders.

Keys and values follow only from token and position. So the contents of a row do not depend on the row that stored them
first. The truth is a store of one row that got all tokens at once. Operations are drawn by hypothesis, and checked one by one.

Free pages and windows of empty slots are NaN all the time. `SEQUENCES=n` runs n sequences; `make test-all` runs 5000.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from pool_cases import poison, references
from sequence_operations import for_each

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.contents import Contents, take_rows
from hf_lowbit_kv.formats import fragment
from hf_lowbit_kv.requests.row_pool import Prefix, Row, RowPool
from hf_lowbit_kv.requests.shared_prefixes import SharedPrefixes
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.page_pool import locate
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.row_memory import RowMemory, fork_stores
from hf_lowbit_kv.storage.step import StepInputs

HEADS, HEAD_DIM, SLOTS, TOKENS, LONGEST = 2, 32, 4, 20 * 32, 320
#: by name, the specs of the layers
KINDS = {
    "dense": ["dense|dense|32|32|32"],
    "no sink": ["int8-token|int4-token|0|32|32"],
    "open page": ["int8-token|int8-token|8|0|32"],
    "two layers": ["int8-token|int4-token|8|32|32", "int4-channel|int8-token|8|32|32"],
    "two windows": ["int4-channel|int4-token|32|32|32", "int8-token|int8-token|0|0|64"],
}
OPERATIONS = (
    *("enter", "enter", "chunk", "chunk", "chunk", "step", "step", "fork", "end", "end", "keep", "make room"),
    *("kept prompt", "cache", "change the cache", "fork the cache"),
)


class Operation(NamedTuple):
    name: str
    which: int
    """a row, counted around"""
    amount: int


def sequences():
    """Lists of operations."""
    one = st.builds(Operation, st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(1, 200))
    return st.lists(one, min_size=12, max_size=40)


class Machine:
    """A pool, and beside each row its text."""

    def __init__(self, kind: str):
        specs = [LayerSpec.parse(text) for text in KINDS[kind]]
        self.layers = [PagedStore(spec, 0, HEADS, HEAD_DIM, HEAD_DIM, torch.float32, "cpu") for spec in specs]
        self.pool = RowPool(self.layers, SLOTS, TOKENS, LONGEST)
        self.prefixes = SharedPrefixes(self.pool, 3)
        self.texts: dict[Row, list[int]] = {}
        self._stories: dict[Row, list[int]] = {}
        """what chunks of a row bring; steps bring other tokens"""
        self.hits = self.adopted = 0
        """rows that began with a shared prefix, and with a kept prompt or a cache"""
        generator = torch.Generator().manual_seed(5)
        self._table = torch.randn(2, 8, HEADS, HEAD_DIM, generator=generator)
        self._cached = [self._text(which) for which in (0, 1)]
        #: by text, stores of the layers; they change while rows read their pages
        self._caches = [
            self._stored(ids, capacity) for ids, capacity in zip(self._cached, (None, 2 * LONGEST), strict=True)
        ]
        self._kept = [take_rows(dict(enumerate(stores))).copied() for stores in self._caches]
        self._kept[1] = _in_another_layout(self._kept[1])
        poison(self.pool)

    def run(self, operations: list[Operation]) -> None:
        for operation in operations:
            self.run_one(operation)
        for row in list(self.pool.rows):
            self.check(row)
            self._leave(row)
        self.prefixes.clear()
        assert all(pages.free == pages.count for pages in self.pool.page_pools.values())
        assert not any(pages.adopted for pages in self.pool.page_pools.values()), "texts are adopted that no row reads"
        own = [{slab.untyped_storage().data_ptr() for slab in each.state.pool} for each in self.pool.memory.stores]
        assert all(len(storages) == 1 for storages in own)
        assert self.pool.memory.lost == 0
        for store in (store for stores in self._caches for store in stores):
            references = store.memory.pages.acquired.items()
            assert all((slab.references == counts).all() for slab, counts in references), (
                "references of rows or forks are left"
            )

    def run_one(self, operation: Operation) -> None:
        getattr(self, "_" + operation.name.replace(" ", "_"))(operation)
        poison(self.pool)
        self.check_ledgers()

    # ---- operations -----------------------------------------------------------------------------------------------

    def _row(self, which: int) -> Row | None:
        rows = self.pool.rows
        return rows[which % len(rows)] if rows else None

    def _enter(self, operation: Operation) -> None:
        """A row whose text begins like those of others: texts differ from some place on, or not at all."""
        limit = 120 + operation.amount
        ids = [0] * 20 + [operation.which % 2] * (limit - 20)
        row = self._admit(limit, ids, lambda: self.prefixes.find(ids[: limit - 1]))
        self.hits += row is not None and row.length > 0

    def _admit(self, limit: int, ids: list[int], find: Callable[[], Prefix | None]) -> Row | None:
        if not self.pool.free_slots or (row := self.pool.admit(limit, find, self.prefixes.make_room)) is None:
            return None
        self.texts[row], self._stories[row] = ids[: row.length], ids
        self.check(row)
        return row

    def _kept_prompt(self, operation: Operation) -> None:
        """A row continues from a text that is kept elsewhere, from some page or some token of its window on."""
        which = operation.which % 2
        self._go_on(self._text(which), self._kept[which], operation.amount)

    def _cache(self, operation: Operation) -> None:
        """A row continues from the present contents of a cache, which may change later."""
        which = operation.which % 2
        contents = take_rows(dict(enumerate(self._caches[which])))
        self._go_on(self._cached[which], contents, operation.amount)

    def _go_on(self, ids: list[int], contents: Contents, amount: int) -> None:
        match = len(ids) if amount % 4 == 0 else min(amount, len(ids))
        in_tail = match == len(ids) or match > max(x.spec.sink + x.paged[0] for x in contents.groups.values())
        tokens = match if in_tail else contents.whole_pages(match)
        if not tokens:
            return
        part = contents.first(tokens)
        before = [slab.clone() for x in part.layers.values() for slab in x.slabs]
        story = ids[:tokens] + [amount % 8] * amount
        row = self._admit(min(tokens + amount, LONGEST), story, lambda: self.pool.kept(part))
        self.adopted += row is not None
        after = [slab for x in part.layers.values() for slab in x.slabs]
        assert all(map(torch.equal, before, after))

    def _change_the_cache(self, operation: Operation) -> None:
        """Other tokens in the place of those that rows read."""
        which = operation.which % 2
        self._cached[which] = [0] * 20 + [operation.amount % 8] * operation.amount
        keys, values = self._numbers(self._cached[which], 0)
        for store in self._caches[which]:
            store.reset()
            store.reserve(len(self._cached[which]))  # a fork has room for few tokens
            ops.append(StepInputs(None, keys, values), store, "cpu")
        for row in self.pool.rows:
            self.check(row)

    def _fork_the_cache(self, operation: Operation) -> None:
        """A row continues from a fork. What it came from is gone afterwards, or the fork is."""
        which, capacity = operation.which % 2, self._caches[operation.which % 2][0].memory.capacity
        (fork,) = fork_stores(self._caches[which], capacity)
        if capacity is None and operation.amount % 3 == 0:  # as beams do
            for rows in ([0, 0], [1]):
                for memory in {store.memory for store in fork}:
                    memory.selecting(torch.tensor(rows))()
        self._go_on(self._cached[which], take_rows(dict(enumerate(fork))), operation.amount)
        if operation.amount % 2:
            self._caches[which] = fork

    def _chunk(self, operation: Operation) -> None:
        row = self._row(operation.which)
        if row is None:
            return
        tokens = min(operation.amount, row.limit - row.length)
        if tokens == 0:
            return
        new = self._stories[row][row.length : row.length + tokens]
        self.pool.extend(row, tokens)
        self.pool.flush()
        self._store(slice(row.slot, row.slot + 1), [row], [new])
        self.check(row)

    def _step(self, operation: Operation) -> None:
        """One token for some of the rows; the others and empty slots are masked."""
        rows = [row for row in self.pool.rows if row.length < row.limit and (row.slot + operation.which) % 3]
        if not rows:
            return
        for row in rows:
            self.pool.extend(row, 1)
        self.pool.flush()
        self._store(slice(0, SLOTS), rows, [[operation.amount % 8] for _ in rows], masked=True)
        for row in rows:
            self.check(row)

    def _fork(self, operation: Operation) -> None:
        row = self._row(operation.which)
        if row is None or not self.pool.free_slots or self.pool.missing(row.limit, fork_of=row) > 0:
            return
        new = self.pool.fork(row, row.limit)
        self.texts[new], self._stories[new] = list(self.texts[row]), self._stories[row]
        self.check(new)

    def _end(self, operation: Operation) -> None:
        if (row := self._row(operation.which)) is not None:
            if operation.amount % 3:
                self.prefixes.keep(row, self.texts[row])
            self._leave(row)
            for other in self.pool.rows:
                self.check(other)

    def _leave(self, row: Row) -> None:
        del self.texts[row], self._stories[row]
        self.pool.leave(row)

    def _keep(self, operation: Operation) -> None:
        if (row := self._row(operation.which)) is not None:
            self.prefixes.keep(row, self.texts[row])

    def _make_room(self, operation: Operation) -> None:
        self.prefixes.make_room(operation.amount % 5)

    # ---- texts that are kept elsewhere ----------------------------------------------------------------------------

    def _text(self, which: int) -> list[int]:
        """Its last page is not full, where layers have partial pages."""
        return [0] * 20 + [which] * 170

    def _stored(self, ids: list[int], capacity: int | None) -> list[PagedStore]:
        """By layer, a store of one row with these tokens."""
        stores: list[PagedStore] = []
        memories: dict[Hashable, RowMemory] = {}
        sizes = 1, HEADS, HEAD_DIM, HEAD_DIM, torch.float32, "cpu", capacity
        for layer in self.layers:
            store = PagedStore(layer.spec, *sizes, memory=memories.get(layer.spec.paging))
            memories[layer.spec.paging] = store.memory
            store.reserve(2 * LONGEST)
            ops.append(StepInputs(None, *self._numbers(ids, 0)), store, "cpu")
            stores.append(store)
        return stores

    # ---- storing and checking -------------------------------------------------------------------------------------

    def _numbers(self, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens from a position on, `[1, heads, n, head_dim]`."""
        tokens = torch.tensor(ids, dtype=torch.long)
        position = torch.arange(start, start + len(ids))[None, :, None] / 64
        keys, values = self._table[:, tokens].transpose(1, 2)
        return (keys + position.sin())[None], (values + position.cos())[None]

    def _store(self, slots: slice, rows: list[Row], new: list[list[int]], masked: bool = False) -> None:
        """What a pass of the model does in every layer. The output is compared with attention over the true numbers."""
        count, tokens = slots.stop - slots.start, len(new[0])
        keys = torch.full((count, HEADS, tokens, HEAD_DIM), 7.0)
        values, query = keys.clone(), torch.full((count, 2 * HEADS, tokens, HEAD_DIM), 0.25)
        mask = torch.zeros(count, tokens, dtype=torch.bool)
        for row, ids in zip(rows, new, strict=True):
            place = row.slot - slots.start
            keys[place : place + 1], values[place : place + 1] = self._numbers(ids, row.length)
            mask[place] = True
            row.length += len(ids)
            self.texts[row] += ids
        for store in self.pool.memory.stores:
            inputs = StepInputs(query, keys, values, mask if masked else None, HEAD_DIM**-0.5)
            out = ops.step(inputs, store.rows(slots), "cpu")
            for row in rows:
                found = out[row.slot - slots.start, -1]
                k, v = self._numbers(self.texts[row], 0)
                scores = (query[0, :, -1:].unflatten(0, (HEADS, 2)) @ k[0].unsqueeze(1).mT) * HEAD_DIM**-0.5
                expected = (scores.softmax(-1) @ v[0].unsqueeze(1)).flatten(0, 1)[:, 0]
                coarse = store.spec.key_format.name != "dense"
                torch.testing.assert_close(found, expected, rtol=0, atol=0.25 if coarse else 1e-4)

    def check(self, row: Row) -> None:
        """The row holds what a store of its own holds that got its text at once."""
        self.pool.flush()
        text = self.texts[row]
        assert row.length == len(text)
        if not text:
            return
        keys, values = self._numbers(text, 0)
        for of_all in self.pool.memory.stores:
            own = PagedStore(of_all.spec, 1, HEADS, HEAD_DIM, HEAD_DIM, torch.float32, "cpu")
            own.reserve(len(text))
            ops.append(StepInputs(None, keys, values), own, "cpu")
            store = of_all.rows(slice(row.slot, row.slot + 1))
            here = store.state
            assert int(here.length[0, 0]) == len(text)
            # after a shared prefix the window is short until it has filled again
            assert int(here.paged[0, 0]) >= int(own.state.paged[0, 0])
            if int(here.paged[0, 0]) == int(own.state.paged[0, 0]):
                for found, expected in zip(
                    ops.read(store, len(text), "cpu"),
                    ops.read(own, len(text), "cpu"),
                    strict=True,
                ):
                    assert torch.equal(found, expected)

    def check_ledgers(self) -> None:
        """Pages have the references of rows and prefixes, and slots are dense."""
        assert [row.slot for row in self.pool.rows] == list(range(len(self.pool.rows)))
        for paging, pages in self.pool.page_pools.items():
            expected = Counter(page for row in self.pool.rows for page in row.pages[paging])
            expected.update(self.prefixes.numbers())
            assert all(references(pages, page) == expected[page] for page in (*range(pages.count), *expected))
            assert pages.free == pages.count - sum(page < pages.count for page in expected)
            adopted = {pages.slabs[locate(pages.slabs, np.array(page))[0]] for page in expected} - {pages.slabs[0]}
            assert set(pages.adopted) == adopted
            specs = [layer.spec for layer in self.layers if layer.spec.paging == paging]
            missing = (specs[0].pages_for(row.limit) - len(row.pages[paging]) for row in self.pool.rows)
            promised = sum(max(pages, 0) for pages in missing)  # a kept prompt's pages may reach further
            assert promised <= pages.free, "every row gets the pages that it was promised"


def _in_another_layout(contents: Contents) -> Contents:
    """As files have them that another backend wrote."""
    for group in contents.groups.values():
        for i, x in group.layers.items():
            group.layers[i] = x.in_layout_of(x.spec.with_layouts(*fragment.LAYOUTS))
    return contents


#: sequences of all kinds together
FAST, ALL = 60, 5000


def explore(kind: str, count: int) -> int:
    """Run sequences. How many rows began with a shared prefix."""
    machines = []

    def run(sequence):
        machine = Machine(kind)
        machine.run(sequence)
        machines.append((machine.hits, machine.adopted))

    for_each(sequences(), count, f"pool {kind}", run)
    hits, adopted = map(sum, zip(*machines, strict=True))
    print(f"{hits} rows with a prefix, {adopted} with a kept prompt or a cache")
    assert adopted > 0
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


def test_kept_texts_stay_adopted_while_rows_read_them_or_as_many_as_are_allowed():
    """Of two texts one may stay when no row reads them: that which was used last."""
    machine = Machine("dense")
    prefixes, pool = machine.prefixes, machine.pool
    for which in (0, 1):
        machine.run_one(Operation("kept prompt", which, 4))
    rows, (pages,) = list(pool.rows), pool.page_pools.values()
    texts, allowed = [machine.texts[row] for row in rows], len(pages.adopted[0]) * HEADS * machine.layers[0].page_bytes
    for row, text in zip(rows, texts, strict=True):
        prefixes.keep(row, text, allowed)
    assert [prefixes.find(text) is not None for text in texts] == [True, True]
    for _ in rows:
        machine.run_one(Operation("end", 0, 3))
    assert len(pages.adopted) == 2
    prefixes.keep(pool.enter(40), [], allowed)
    assert [prefixes.find(text) is not None for text in texts] == [False, True]
    assert len(pages.adopted) == 1


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
