"""Memory runs out while a growing cache grows, at each allocation in turn: layers read back what they stored, and the next pass
is refused as after any that was interrupted."""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from marked import slow_case
from sequence_operations import Setting
from sequences import Machine
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.storage.paged_store import PagedStore

LAYERS = 2
#: with a tail, and straight into pages
KINDS = [("int4-channel/int4-token", 32), ("fp8/fp8-static", 0), ("latent fp8/dense", 0)]


class OutOfMemory(TorchDispatchMode):
    """Operations that allocate are counted, and number `fails` raises."""

    def __init__(self, fails: int):
        super().__init__()
        self.fails, self.allocations = fails, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in held:
            self.allocations += 1
            if self.allocations - 1 == self.fails:
                raise torch.OutOfMemoryError(f"allocation {self.fails}: {function}")
        return out


def _fail(monkeypatch, method: str, chosen: Callable[[PagedStore], bool], mode: OutOfMemory) -> None:
    """Memory runs out inside `method` of the store that is chosen."""
    work = getattr(PagedStore, method)

    def short_of_memory(self, *args, **kwargs):
        if not chosen(self):
            return work(self, *args, **kwargs)
        with mode:
            return work(self, *args, **kwargs)

    monkeypatch.setattr(PagedStore, method, short_of_memory)


def _machine(kind: str, residual: int, tokens: int = 120) -> Machine:
    machine = Machine(kind, Setting(rows=2, layers=LAYERS, residual=residual, sink=5, seed=3))
    machine.check_output = lambda *args: None  # what is stored is the subject
    if tokens:
        machine.append(tokens, "left")
    return machine


def _again(machine: Machine) -> Machine:
    """Another with a copy of its cache."""
    new = copy.copy(machine)
    new.text = machine.text.twin(copy.deepcopy(machine.text.cache))
    return new


def _check_layers(machine: Machine) -> None:
    for layer, rows in zip(machine.text.cache.layers, machine.text.layers, strict=False):
        machine.check_layer(layer, rows)
        state = layer.store.state
        starts = [page.data_ptr() - state.pool[0].data_ptr() for block in state.pool for page in block]
        assert state.page_address.tolist() == [[starts[page] for page in row] for row in state.page_table.tolist()]


def _refused_until_reset(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="the last forward pass was interrupted"):
        machine.append(1, "")
    machine.reset(2, False)
    machine.append(40, "left")
    machine.check_stored(machine.text)
    machine.text.cache.reset()


def _completed(work: Callable[[], None]) -> bool:
    """Whether there was memory enough."""
    try:
        work()
    except torch.OutOfMemoryError:
        return False
    return True


def _short_of_memory(
    machine: Machine, layer: int, method: str, fails: int, work: Callable[[], None]
) -> OutOfMemory | None:
    """Do `work` while memory runs out at allocation number `fails` in that method of a layer's store. `None`: it failed."""
    mode, store = OutOfMemory(fails), machine.text.cache.layers[layer].store
    with pytest.MonkeyPatch.context() as patch:
        _fail(patch, method, lambda each: each is store, mode)
        return mode if _completed(work) else None


def _is_next(made: Iterator[int], number: int, store: PagedStore) -> bool:
    """Whether so many stores were made before this one."""
    return next(made) == number


def _layers(kind: str) -> range:
    return range(1 if kind.startswith("latent") else LAYERS)


parametrized = pytest.mark.parametrize(("kind", "residual"), KINDS)


@parametrized
@torch.no_grad()
def test_a_longer_text(kind, residual):
    filled = _machine(kind, residual)
    for layer in _layers(kind):
        for fails in itertools.count():
            machine = _again(filled)
            mode = _short_of_memory(machine, layer, "reserve", fails, partial(machine.append, 300, ""))
            if mode is not None:
                break
            # layers in front have stored the chunk, this one and those after it have not
            assert [rows[0].length > 120 for rows in machine.text.layers][: layer + 1] == [True] * layer + [False]
            _check_layers(machine)
            _refused_until_reset(machine)
        assert fails == mode.allocations > 2


@parametrized
@torch.no_grad()
def test_the_first_tokens(kind, residual):
    for layer in _layers(kind):
        for fails in itertools.count():
            machine, mode, made = _machine(kind, residual, tokens=0), OutOfMemory(fails), itertools.count()
            with pytest.MonkeyPatch.context() as patch:
                _fail(patch, "__init__", partial(_is_next, made, layer), mode)
                if _completed(partial(machine.append, 50, "")):
                    break
            _check_layers(machine)
            if layer:
                _refused_until_reset(machine)
            else:  # nothing has been stored
                machine.append(50, "")
                machine.check_stored(machine.text)
        assert fails == mode.allocations > 2


#: which rows are chosen: each with one size of the window, the other is slow
ROWS = {"more": [0, 0, 1, 1, 1], "as-many": [1, 0]}


@pytest.mark.parametrize(
    ("rows", "kind", "residual"),
    [
        (rows, kind, residual) if (rows == "as-many") == (residual == 0) else slow_case(rows, kind, residual)
        for rows in ROWS
        for kind, residual in KINDS
    ],
)
@torch.no_grad()
def test_rows_are_chosen(kind, residual, rows):
    rows = ROWS[rows]
    filled = _machine(kind, residual)
    for layer in _layers(kind):
        for fails in itertools.count():
            machine = _again(filled)
            cache = machine.text.cache
            mode = _short_of_memory(
                machine, layer, "select_rows", fails, partial(cache.reorder_cache, torch.tensor(rows))
            )
            if mode is not None:
                break
            for index, own in enumerate(machine.text.layers):
                if index < layer:
                    machine.text.layers[index] = [own[row] for row in rows]
            _check_layers(machine)
            if layer:
                _refused_until_reset(machine)
            else:  # no layer has chosen rows
                machine.append(40, "left")
                machine.check_stored(machine.text)
        assert fails == mode.allocations > 2


@parametrized
@torch.no_grad()
def test_rows_that_share_pages_are_cropped(kind, residual):
    """Each row then needs a page of its own, and there may be none."""
    filled = _machine(kind, residual, tokens=250)
    filled.repeat(3)
    for layer in _layers(kind):
        for fails in itertools.count():
            machine = _again(filled)
            mode = _short_of_memory(machine, layer, "own_pages", fails, partial(machine.text.cache.crop, -150))
            if mode is not None:
                break
            for each, rows in zip(machine.text.cache.layers, machine.text.layers, strict=True):
                _check_prefix(each, rows)
            _refused_until_reset(machine)
        assert fails == mode.allocations > 2


def _check_prefix(layer, rows) -> None:
    """The tokens that a layer says it holds are the first ones that it has stored."""
    lengths = layer.store.state.length[:, 0].tolist()
    for found, side in zip(ops.read(layer.store, max(lengths), layer.backend), (0, 1), strict=True):
        for row, length, own in zip(rows, lengths, found, strict=True):
            assert torch.equal(own[:, :length], row.stored()[side][:, :length].to(own.dtype))


@torch.no_grad()
def test_rows_of_a_preallocated_cache_are_chosen():
    """In place: rows may be mixed up when memory runs out, so the next pass is refused."""
    refused = 0
    for fails in itertools.count():
        setting = Setting(rows=2, capacity=300, layers=1, seed=3)
        machine = Machine("int4-channel/int4-token", setting)
        machine.append(200, "left")
        cache = machine.text.cache
        mode = _short_of_memory(machine, 0, "select_rows", fails, partial(cache.reorder_cache, torch.tensor([1, 0])))
        if mode is not None:
            break
        _refused_until_reset(machine)
        refused += 1
    assert refused == mode.allocations > 2
