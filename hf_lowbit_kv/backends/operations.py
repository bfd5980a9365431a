"""A layer's operations on its backend (`choice`).

In eager and recorded steps the backend gets objects. While a model is compiled or traced, the same call becomes one
`torch.library` operation. It takes the spec as text and the state as separate tensors, because inductor updates a
mutated tensor in place, but clones a mutated list. Preallocated caches have one slab of pages. Only growing caches,
which are not compiled, have `more` slabs. Lists that are only read cost nothing. Signatures are derived from
`LayerState`, so a new field needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_origin, get_type_hints

import torch

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import READ_ONLY, LayerState, PagedStore
from ..storage.step import Operations, StepInputs
from .choice import operations_of

#: `StepInputs` in the schema of an operation
_INPUTS = (
    "Tensor? q, Tensor k, Tensor v, Tensor? mask, float scaling, float? softcap, Tensor? sinks, SymInt? seen, "
    "Tensor? score_bias"
)
_NUMBER_OF_INPUTS = len(StepInputs._fields)


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
    slab, more, *rest = tensors
    return LayerState([slab, *more], *rest)


def _operation(name: str, result: str, mutates: bool, work: Callable, fake: Callable) -> Callable:
    """A `torch.library` operation `(inputs, spec, backend, state) -> result`.

    Args:
        work: called with the backend's operations, the inputs and the store.
        fake: called with the inputs and the `LayerSpec`.

    Returns:
        A function of the inputs, the store and the backend's name.
    """
    schema = f"({_INPUTS}, str spec, str backend, {_state_schema(mutates)}) -> {result}"
    written = [field for field in LayerState._fields if field not in READ_ONLY] if mutates else []

    def run(*args):
        spec, backend = LayerSpec.parse(args[_NUMBER_OF_INPUTS]), args[_NUMBER_OF_INPUTS + 1]
        store = PagedStore.over(_state(args[_NUMBER_OF_INPUTS + 2 :]), spec)
        return work(operations_of(backend, spec.attention_kind.name), StepInputs(*args[:_NUMBER_OF_INPUTS]), store)

    operation = torch.library.custom_op(f"hf_lowbit_kv::{name}", run, mutates_args=written, schema=schema)
    operation.register_fake(
        lambda *args: fake(StepInputs(*args[:_NUMBER_OF_INPUTS]), LayerSpec.parse(args[_NUMBER_OF_INPUTS]))
    )

    def call(inputs: StepInputs, store: PagedStore, backend: str):
        return operation(*inputs, store.key, backend, *_flat(store.state))

    return call


def _output(inputs: StepInputs, spec: LayerSpec) -> torch.Tensor:
    q, k, v = inputs.queries, inputs.k, inputs.v
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, spec.attention_kind.widths(k.shape[-1], v.shape[-1])[1])


def _attend_whole(operations: Operations, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    return _with_all_queries(operations.attend, operations, inputs, store)


def _step_whole(operations: Operations, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    return _with_all_queries(operations.step, operations, inputs, store)


def _with_all_queries(work: Callable, operations: Operations, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """The output of `attend` or `step`. A backend that needs a query per token gets zeros for missing queries."""
    if operations.allows_fewer_queries or (before := inputs.tokens_before) == 0:
        return work(inputs, store).contiguous()
    filled = inputs._replace(q=torch.nn.functional.pad(inputs.queries, (0, 0, before, 0)))
    return work(filled, store)[:, before:].contiguous()


def _append_whole(operations: Operations, inputs: StepInputs, store: PagedStore) -> None:
    operations.append(inputs, store)


_attend = _operation("attend", "Tensor", False, _attend_whole, _output)
_step = _operation("step", "Tensor", True, _step_whole, _output)
_append = _operation("append", "()", True, _append_whole, lambda inputs, spec: None)


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


def attend(inputs: StepInputs, store: PagedStore, backend: str) -> torch.Tensor:
    """`Operations.attend` on the backend with this name."""
    if _watched(inputs.k):
        return _attend(inputs, store, backend)
    return _attend_whole(operations_of(backend, store.spec.attention_kind.name), inputs, store)


def step(inputs: StepInputs, store: PagedStore, backend: str) -> torch.Tensor:
    """`Operations.step` on the backend with this name. Compilation can neither reorder nor separate attending and
    storing."""
    if _watched(inputs.k):
        return _step(inputs, store, backend)
    return _step_whole(operations_of(backend, store.spec.attention_kind.name), inputs, store)


def append(inputs: StepInputs, store: PagedStore, backend: str) -> None:
    """`Operations.append` on the backend with this name. After an `attend` of the same layer, use `step` instead:
    inductor moves a separate append before the attend, and must then copy the whole pool."""
    if _watched(inputs.k):
        return _append(inputs, store, backend)
    return operations_of(backend, store.spec.attention_kind.name).append(inputs, store)


def expect_steps(inputs: StepInputs, store: PagedStore, backend: str, masked: bool) -> None:
    """`Operations.expect_steps` on the backend with this name."""
    operations_of(backend, store.spec.attention_kind.name).expect_steps(inputs, store, masked)


def read(store: PagedStore, max_length: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`Operations.read` on the backend with this name."""
    return operations_of(backend, store.spec.attention_kind.name).read(store, max_length)
