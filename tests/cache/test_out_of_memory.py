"""Memory runs out while a growing cache grows, at each allocation in turn.

Pages of all layers are allocated before a layer changes, so the text goes on when there is memory again. Where layers have
changed before, they read back what they stored, and the next pass is refused as after any that was interrupted."""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cases import filled, left_padded, next_logits, tiny_models
from sequence_operations import Setting
from sequences import Machine
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.row_memory import RowMemory

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


def _fail(monkeypatch, cls: type, method: str, chosen: Callable[[Any], bool], mode: OutOfMemory) -> None:
    """Memory runs out inside `method` of the object that is chosen."""
    work = getattr(cls, method)

    def short_of_memory(self, *args, **kwargs):
        if not chosen(self):
            return work(self, *args, **kwargs)
        with mode:
            return work(self, *args, **kwargs)

    monkeypatch.setattr(cls, method, short_of_memory)


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


def _short_of_memory(method: str, fails: int, work: Callable[[], None]) -> OutOfMemory | None:
    """Do `work` while memory runs out at allocation number `fails` in that method of the rows' memory. `None`: it failed."""
    mode = OutOfMemory(fails)
    with pytest.MonkeyPatch.context() as patch:
        _fail(patch, RowMemory, method, lambda memory: True, mode)
        return mode if _completed(work) else None


def _goes_on(machine: Machine) -> None:
    """No layer has changed: the text continues."""
    _check_layers(machine)
    machine.append(40, "left")
    machine.check_stored(machine.text)
    machine.text.cache.reset()


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
    for fails in itertools.count():
        machine = _again(filled)
        mode = _short_of_memory("reserve", fails, partial(machine.append, 300, ""))
        if mode is not None:
            break
        assert [rows[0].length > 120 for rows in machine.text.layers] == [False] * len(_layers(kind))
        _goes_on(machine)
    assert fails == mode.allocations > 2 * len(_layers(kind))


@parametrized
@torch.no_grad()
def test_the_first_tokens(kind, residual):
    for layer in _layers(kind):
        for fails in itertools.count():
            machine, mode, made = _machine(kind, residual, tokens=0), OutOfMemory(fails), itertools.count()
            with pytest.MonkeyPatch.context() as patch:
                _fail(patch, PagedStore, "__init__", partial(_is_next, made, layer), mode)
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
        (rows, kind, residual)
        if (rows == "as-many") == (residual == 0)
        else pytest.param(rows, kind, residual, marks=pytest.mark.slow)
        for rows in ROWS
        for kind, residual in KINDS
    ],
)
@torch.no_grad()
def test_rows_are_chosen(kind, residual, rows):
    filled = _machine(kind, residual)
    for fails in itertools.count():
        machine = _again(filled)
        chosen = partial(machine.text.cache.reorder_cache, torch.tensor(ROWS[rows]))
        mode = _short_of_memory("selecting", fails, chosen)
        if mode is not None:
            break
        _goes_on(machine)
    assert fails == mode.allocations > 2 * len(_layers(kind))


@parametrized
@torch.no_grad()
def test_rows_that_share_pages_are_cropped(kind, residual):
    """Each row then needs a page of its own, and there may be none."""
    filled = _machine(kind, residual, tokens=250)
    filled.repeat(3)
    for fails in itertools.count():
        machine = _again(filled)
        mode = _short_of_memory("own_pages", fails, partial(machine.text.cache.crop, -150))
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
    """In place, but only when everything is allocated."""
    for fails in itertools.count():
        machine = Machine("int4-channel/int4-token", Setting(rows=2, capacity=300, layers=1, seed=3))
        machine.append(200, "left")
        chosen = partial(machine.text.cache.reorder_cache, torch.tensor([1, 0]))
        mode = _short_of_memory("selecting", fails, chosen)
        if mode is not None:
            break
        _goes_on(machine)
    assert fails == mode.allocations > 2


@torch.no_grad()
def test_nothing_is_allocated_when_rows_change():
    """After everything has been: rows and layers would be mixed up."""
    for setting in (Setting(rows=2, layers=2, residual=0, seed=3), Setting(rows=2, capacity=300, layers=2, seed=3)):
        machine = Machine("fp8/fp8-static", setting)
        machine.append(200, "left")
        (memory,) = machine.text.cache.memories
        change, mode = memory.selecting(torch.tensor([1, 0])), OutOfMemory(-1)
        with mode:
            change()
        assert mode.allocations == 0
        machine.text.cache.reset()


@torch.no_grad()
def test_a_longer_text_of_two_windows():
    """Layers with other pages have a memory of their own. It grows, too, before the first layer stores a token."""
    model = tiny_models("llama")[0]
    cache = filled(model, per_layer={1: {"residual": 64}})
    lengths = [layer.store.state.length.clone() for layer in cache.packed_layers]
    with pytest.MonkeyPatch.context() as patch:
        _fail(patch, RowMemory, "reserve", lambda memory: memory is cache.memories[1], OutOfMemory(0))
        with pytest.raises(torch.OutOfMemoryError):
            model(left_padded(1, 500)[0], past_key_values=cache)
    assert all(torch.equal(layer.store.state.length, x) for layer, x in zip(cache.layers, lengths, strict=True))
    next_logits(model, cache)


@torch.no_grad()
def test_an_empty_cache_of_another_dtype():
    """Allocating again fails at each allocation in turn. Nothing is left of the old memory, and the next call allocates."""
    model = tiny_models("llama")[0]
    cache, ids = filled(model, max_cache_len=200), left_padded(1, 80)[0]
    model.bfloat16()
    cache.reset()
    for fails in itertools.count():
        mode = OutOfMemory(fails)
        with pytest.MonkeyPatch.context() as patch:
            _fail(patch, PagedStore, "__init__", lambda store: True, mode)
            try:
                model(ids, past_key_values=cache)
                break
            except torch.OutOfMemoryError:
                cache.reset()
    assert fails > 2
    assert torch.equal(next_logits(model, cache), next_logits(model, filled(model, max_cache_len=200)))
    assert {layer.store.state.tail_k.dtype for layer in cache.packed_layers} == {torch.bfloat16}
