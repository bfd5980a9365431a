"""A layer's operations on its backend (`choice`).

In eager and recorded steps the backend gets objects. While a model is compiled or traced, the same call becomes one
`torch.library` operation. It takes the spec as text and the state as separate tensors, because inductor updates a
mutated tensor in place, but clones a mutated list. Preallocated caches have one block of pages. Only growing caches,
which are not compiled, have `more` blocks. Lists that are only read cost nothing. Signatures are derived from
`LayerState`, so a new field needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_origin, get_type_hints

import torch

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import READ_ONLY, LayerState, LayerStore
from ..storage.step import Chunk, Operations
from .choice import operations_of

#: a `Chunk` in the schema of an operation
_CHUNK = (
    "Tensor? q, Tensor k, Tensor v, Tensor? mask, float scaling, float? softcap, Tensor? sinks, SymInt? seen, "
    "Tensor? lacking"
)
_CHUNK_SIZE = len(Chunk._fields)


def _state_schema(mutated: bool) -> str:
    """The part of a signature that `_flat` fills."""
    arguments = []
    for name, kind in get_type_hints(LayerState).items():
        tensor = f"Tensor(a_{name}!)" if mutated and name not in READ_ONLY else "Tensor"
        if name == "pool":
            arguments += [f"{tensor} pool", "Tensor[] more"]
        else:
            arguments.append(f"Tensor[] {name}" if get_origin(kind) is list else f"{tensor} {name}")
    return ", ".join(arguments)


def _flat(state: LayerState) -> list:
    return [state.pool[0], state.pool[1:], *state[1:]]


def _state(tensors) -> LayerState:
    """The inverse of `_flat`."""
    block, more, *rest = tensors
    return LayerState([block, *more], *rest)


def _operation(name: str, result: str, mutates: bool, work: Callable, fake: Callable) -> Callable:
    """A `torch.library` operation `(chunk, spec, backend, state) -> result`.

    Args:
        work: called with the backend's operations, the chunk and the store.
        fake: called with the chunk and the `LayerSpec`.

    Returns:
        A function of the chunk, the store and the backend's name.
    """
    schema = f"({_CHUNK}, str spec, str backend, {_state_schema(mutates)}) -> {result}"
    written = [field for field in LayerState._fields if field not in READ_ONLY] if mutates else []

    def run(*args):
        spec, backend = LayerSpec.parse(args[_CHUNK_SIZE]), args[_CHUNK_SIZE + 1]
        store = LayerStore(_state(args[_CHUNK_SIZE + 2 :]), spec)
        return work(operations_of(backend, spec.reading.name), Chunk(*args[:_CHUNK_SIZE]), store)

    operation = torch.library.custom_op(f"hf_lowbit_kv::{name}", run, mutates_args=written, schema=schema)
    operation.register_fake(lambda *args: fake(Chunk(*args[:_CHUNK_SIZE]), LayerSpec.parse(args[_CHUNK_SIZE])))

    def call(chunk: Chunk, store: LayerStore, backend: str):
        return operation(*chunk, store.key, backend, *_flat(store.state))

    return call


def _output(chunk: Chunk, spec: LayerSpec) -> torch.Tensor:
    q, k, v = chunk.queries, chunk.k, chunk.v
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, spec.reading.widths(k.shape[-1], v.shape[-1])[1])


def _attend_whole(operations: Operations, chunk: Chunk, store: LayerStore) -> torch.Tensor:
    return _with_all_queries(operations.attend, operations, chunk, store)


def _step_whole(operations: Operations, chunk: Chunk, store: LayerStore) -> torch.Tensor:
    return _with_all_queries(operations.step, operations, chunk, store)


def _with_all_queries(work: Callable, operations: Operations, chunk: Chunk, store: LayerStore) -> torch.Tensor:
    """The output of `attend` or `step`. A backend that needs a query per token gets zeros for missing queries."""
    if operations.takes_few_queries or (before := chunk.tokens_before) == 0:
        return work(chunk, store).contiguous()
    filled = chunk._replace(q=torch.nn.functional.pad(chunk.queries, (0, 0, before, 0)))
    return work(filled, store)[:, before:].contiguous()


def _append_whole(operations: Operations, chunk: Chunk, store: LayerStore) -> None:
    operations.append(chunk, store)


_attend = _operation("attend", "Tensor", False, _attend_whole, _output)
_step = _operation("step", "Tensor", True, _step_whole, _output)
_append = _operation("append", "()", True, _append_whole, lambda chunk, spec: None)


def _watched(x: Any) -> bool:
    """Whether operations must stay opaque: under a compiler, a function transform, a tensor subclass, or a dispatch mode
    (tracing, fake tensors, logging of operations)."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(x) is not torch.Tensor
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    )


def attend(chunk: Chunk, store: LayerStore, backend: str) -> torch.Tensor:
    """`Operations.attend` on the backend with this name."""
    if _watched(chunk.k):
        return _attend(chunk, store, backend)
    return _attend_whole(operations_of(backend, store.spec.reading.name), chunk, store)


def step(chunk: Chunk, store: LayerStore, backend: str) -> torch.Tensor:
    """`Operations.step` on the backend with this name. Compilation can neither reorder nor separate attending and
    storing."""
    if _watched(chunk.k):
        return _step(chunk, store, backend)
    return _step_whole(operations_of(backend, store.spec.reading.name), chunk, store)


def append(chunk: Chunk, store: LayerStore, backend: str) -> None:
    """`Operations.append` on the backend with this name. After an `attend` of the same layer, use `step` instead:
    inductor moves a separate append before the attend, and must then copy the whole pool."""
    if _watched(chunk.k):
        return _append(chunk, store, backend)
    return operations_of(backend, store.spec.reading.name).append(chunk, store)


def expect_steps(chunk: Chunk, store: LayerStore, backend: str, masked: bool) -> None:
    """`Operations.expect_steps` on the backend with this name."""
    operations_of(backend, store.spec.reading.name).expect_steps(chunk, store, masked)


def read(store: LayerStore, max_length: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`Operations.read` on the backend with this name."""
    return operations_of(backend, store.spec.reading.name).read(store, max_length)
