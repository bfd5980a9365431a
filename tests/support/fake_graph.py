"""A fake of CUDA graphs on any device, with their meaning: operations at fixed addresses, no Python, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_lowbit_kv.generation import recording

#: operations that read the device, which no graph can hold
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class FakeGraph:
    """Records operations as they are dispatched, undoes what they wrote, and runs them again at the same addresses.

    reads: operations that raise while recording, as those that wait for a GPU do.
    """

    made: list[FakeGraph]

    def __init__(self, reads: tuple[str, ...] = ()):
        self.reads = reads
        self.operations: list[tuple[Callable, tuple, dict, Any]] = []
        self.replays = 0

    def capture(self, call: Callable[[], Any]) -> Any:
        mode = _Recording(self)
        try:
            with mode:
                return call()
        finally:
            for tensor, before in mode.written.values():
                tensor.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, out in self.operations:
            found = [_waited(function, each) for each in tree_leaves(function(*args, **kwargs))]
            for held, new in zip(tree_leaves(out), found, strict=True):
                if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)


def _wraps(kind: type) -> bool:
    """Whether tensors of this class hold other tensors (`DTensor`, results of collectives)."""
    return hasattr(kind, "__tensor_flatten__")


def _waited(function: Any, result: Any) -> Any:
    """The result of an operation, after its end if it is a collective."""
    if isinstance(result, torch.ScriptObject):
        result.wait()
    elif function.namespace == "_c10d_functional":
        return torch.ops._c10d_functional.wait_tensor(result)
    return result


class _Recording(TorchDispatchMode):
    def __init__(self, graph: FakeGraph):
        super().__init__()
        self.graph = graph
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.own: set[int] = set()  # memory that the recording allocated

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(_wraps, types)):  # the operations on what it wraps come here, too
            return NotImplemented
        if function._schema.name in self.graph.reads:
            raise RuntimeError(f"{function._schema.name} is not permitted while recording")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            self._before(argument, value)
        for argument in function._schema.arguments:
            if argument.name in kwargs:
                self._before(argument, kwargs[argument.name])
        out = function(*args, **kwargs)
        if _wraps(type(out)):
            return out
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.own.add(tensor.untyped_storage().data_ptr())
        self.graph.operations.append((function, args, kwargs, out))
        return out

    def _before(self, argument, value) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage().data_ptr()
                if key not in self.own and key not in self.written:
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.written[key] = whole, whole.clone()


def in_place_of_graphs(monkeypatch) -> list[FakeGraph]:
    """Steps are recorded in fake graphs from here on; those that were made since."""
    made: list[FakeGraph] = []

    def make() -> FakeGraph:
        made.append(FakeGraph())
        return made[-1]

    monkeypatch.setattr(recording, "graphs_for", lambda device: make)
    return made
