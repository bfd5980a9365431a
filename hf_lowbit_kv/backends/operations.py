"""The operations that a step consists of, as `torch.library` knows them; `backends` has what runs them.

They take the state tensor by tensor: inductor updates a mutated tensor in place, but clones a mutated list. Preallocated
caches have one block of pages; only growing ones, which are not compiled, have `more` of them. Lists that are only read cost
nothing. Signatures follow `LayerState`: a new field needs no change here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import get_origin, get_type_hints

import torch

from ..storage.paged_store import READ_ONLY, LayerSpec, LayerState
from .choice import BACKENDS
from .choice import check_backend as check_backend
from .choice import choose_backend as choose_backend
from .choice import describe as describe
from .choice import storage_spec as storage_spec
from .choice import warn_of_reference as warn_of_reference
from .choice import why_reference as why_reference


@functools.cache
def _module(backend: str, reading: str = "separate") -> ModuleType:
    return BACKENDS[backend].operations(reading)


def _state_schema(mutated: bool) -> str:
    """The part of a signature that `_flat` fills."""
    found = []
    for name, kind in get_type_hints(LayerState).items():
        tensor = f"Tensor(a_{name}!)" if mutated and name not in READ_ONLY else "Tensor"
        if name == "pool":
            found += [f"{tensor} pool", "Tensor[] more"]
        else:
            found.append(f"Tensor[] {name}" if get_origin(kind) is list else f"{tensor} {name}")
    return ", ".join(found)


def _flat(state: LayerState) -> list:
    return [state.pool[0], state.pool[1:], *state[1:]]


def _state(tensors) -> LayerState:
    """The inverse of `_flat`."""
    block, more, *rest = tensors
    return LayerState([block, *more], *rest)


def _operation(name: str, inputs: str, result: str, mutates: bool, work: Callable, fake: Callable) -> Callable:
    """A `torch.library` operation `(inputs, spec, backend, state) -> result`.

    Args:
        work: called with the backend's module, the inputs, the state and the `LayerSpec`.
        fake: called with the `LayerSpec` and the inputs.
    """
    count = inputs.count(",") + 1
    schema = f"({inputs}, str spec, str backend, {_state_schema(mutates)}) -> {result}"
    written = [field for field in LayerState._fields if field not in READ_ONLY] if mutates else []

    def run(*args):
        spec, backend = LayerSpec.parse(args[count]), args[count + 1]
        return work(_module(backend, spec.reading.name), args[:count], _state(args[count + 2 :]), spec)

    operation = torch.library.custom_op(f"hf_lowbit_kv::{name}", run, mutates_args=written, schema=schema)
    operation.register_fake(lambda *args: fake(LayerSpec.parse(args[count]), *args[:count]))

    def call(*args, state: LayerState, spec: LayerSpec, backend: str):
        return operation(*args, spec.key, backend, *_flat(state))

    return call


_CHUNK = "Tensor q, Tensor k, Tensor v, Tensor? mask, float scaling, float? softcap, Tensor? sinks, SymInt? seen"


def _attend_work(module, inputs, state: LayerState, spec: LayerSpec) -> torch.Tensor:
    return module.attend(*inputs[:4], state, spec, *inputs[4:]).contiguous()


def _step_work(module, inputs, state: LayerState, spec: LayerSpec) -> torch.Tensor:
    if (at_once := getattr(module, "step", None)) is not None:
        return at_once(*inputs[:4], state, spec, *inputs[4:]).contiguous()
    out = _attend_work(module, inputs, state, spec)
    module.append(*inputs[1:4], state, spec)
    return out


def _append_work(module, inputs, state: LayerState, spec: LayerSpec) -> None:
    module.append(*inputs, state, spec)


def _output(spec: LayerSpec, q, k, v, *args) -> torch.Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, spec.reading.widths(k.shape[-1], v.shape[-1])[1])


_attend = _operation("attend", _CHUNK, "Tensor", False, _attend_work, _output)
_step = _operation("step", _CHUNK, "Tensor", True, _step_work, _output)
_append = _operation("append", "Tensor k, Tensor v, Tensor? mask", "()", True, _append_work, lambda *args: None)


def attend(q, k, v, mask, state: LayerState, spec: LayerSpec, scaling, softcap, sinks, backend: str, seen=None):
    """`reference.attend` on the chosen backend, as one operation that compilation can take up."""
    return _attend(q, k, v, mask, scaling, softcap, sinks, seen, state=state, spec=spec, backend=backend)


def step(q, k, v, mask, state: LayerState, spec: LayerSpec, scaling, softcap, sinks, backend: str, seen=None):
    """`attend`, then `append` of the chunk, as one operation: compilation can neither move nor separate the two, and a backend
    may do both at once. The output."""
    return _step(q, k, v, mask, scaling, softcap, sinks, seen, state=state, spec=spec, backend=backend)


def append(k, v, mask, state: LayerState, spec: LayerSpec, backend: str) -> None:
    """`reference.append` on the chosen backend, as one operation that compilation can take up. Behind an `attend` of the same
    state, use `step`: inductor moves a lone append before the attend, where it must copy the whole pool."""
    _append(k, v, mask, state=state, spec=spec, backend=backend)


def expect_steps(q, k, v, state: LayerState, spec: LayerSpec, softcap, sinks, backend: str) -> None:
    """Tell the backend that steps of one token may follow this prompt, so that it can compile their kernel meanwhile."""
    if (expect := getattr(_module(backend, spec.reading.name), "expect_steps", None)) is not None:
        expect(q, k, v, state, spec, softcap, sinks)


def read(state: LayerState, spec: LayerSpec, max_length: int, backend: str):
    """`reference.read` on the chosen backend."""
    return _module(backend, spec.reading.name).read(state, spec, max_length)
