"""Decoding steps recorded in CUDA graphs, without a compiler: the eager step of a preallocated cache, replayed.

A step of one token launches the same kernels at the same addresses as the step before, so it is recorded once and
replayed. transformers calls a `RecordedStep` for each token of a `generate` call. A `Recorder` keeps the recordings of
one cache. The first steps of each kind run eagerly. They load kernels, and show what a step changes in Python. The next
step is recorded. Nothing here refers to the cache or the model, so both can be freed.

Kernels of this package compute pieces of the model while a step is recorded (`fusing`). Layers that the user has
compiled are recorded compiled (`compiled_layers`).

A recording is valid while everything in Python that decides which kernels run on which addresses is unchanged: see
`fingerprint`, `memory` and `switches`.
"""

from __future__ import annotations

import copy
import enum
import os
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig
from transformers.cache_utils import StaticSlidingWindowLayer

from ..cache.low_bit_layer import LowBitLayer
from ..cache.token_counts import Padding
from ..machine.cache_argument import cache_in
from ..storage.paged_store import LayerStore
from .compiled_layers import compilations, recorded_as_compiled, why_not_recorded_compiled
from .fusing import Fusion, Substitute, why_nothing_fused
from .overriding import STATE
from .sync_watch import watch

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
#: attributes of a model that do not affect its forward pass
_IGNORED = {"generation_config", "_modules", "_compiled_call", "_last_compile_config", "_lowbit_enabled", STATE}
_IGNORED |= {"generate", "_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call"}
_IGNORED |= {"generate_batch", "init_continuous_batching", "_cached_continuous_batching_manager"}
#: how deep attributes of other objects than modules and tensors are followed (quantization states, hooks)
_DEPTH = 2


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """For each module name: addresses of parameters and buffers, hooks, the training flag, and every plain attribute
    (active or merged adapters, scaling, implementations of attention and experts)."""
    seen: set[int] = set()
    return {name: (id(module), _attributes(module, _DEPTH, seen)) for name, module in model.named_modules()}


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Name of a module whose fingerprint changed, or `None`."""
    if old == new:
        return None
    return next((name or "the model" for name in [*old, *new] if old.get(name) != new.get(name)), None)


def _attributes(thing: Any, depth: int, seen: set[int]) -> tuple:
    attributes = dict(vars(thing))  # as it is now: calls of other threads put overrides on and take them off
    # nor do pieces count that another thread has fused for a moment
    kept = {name: x for name, x in attributes.items() if name not in _IGNORED and not isinstance(x, Substitute)}
    return tuple((name, _described(value, depth, seen)) for name, value in kept.items())


def _described(value: Any, depth: int, seen: set[int]) -> Any:
    """`value` in a form that can be compared: plain values unchanged, tensors by address, functions by identity."""
    if isinstance(value, _PLAIN):
        return value
    # most attributes of a module are empty containers, such as its hooks, and a model has thousands of modules
    if type(value) in _CONTAINERS and not value:
        return ()
    if isinstance(value, torch.Tensor):
        extra = _attributes(value, depth - 1, seen) if depth > 0 and getattr(value, "__dict__", None) else ()
        return addresses([value]), value.requires_grad, extra
    if isinstance(value, torch.nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _described(item, depth, seen)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_described(item, depth, seen) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, types.MethodType):
        return id(value.__func__), id(value.__self__)
    if callable(value):
        return id(value)
    if id(value) in seen or depth == 0 or not hasattr(value, "__dict__"):
        return type(value).__name__
    seen.add(id(value))  # a configuration hangs on every module
    return type(value).__name__, _attributes(value, depth - 1, seen)


def addresses(tensors: Any) -> tuple:
    """Addresses and shapes of tensors. A tensor subclass that holds other tensors has their addresses."""
    places: list[Any] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            places.append(addresses(getattr(tensor, name) for name in names))
        elif tensor.device.type == "meta":
            places.append("meta")
        else:
            places.append((tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device))
    return tuple(places)


def memory(cache: Any) -> tuple:
    """Addresses of a cache's tensors."""
    return tuple(addresses(_tensors(vars(layer), _DEPTH + 1)) for layer in cache.layers)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, LayerStore):
        yield from value.state.tensors()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth)
    elif depth > 0 and hasattr(value, "__dict__") and not isinstance(value, (Padding, PreTrainedConfig, type)):
        yield from _tensors(vars(value), depth - 1)


def switches() -> tuple:
    """Settings of torch and of this package, of the process or thread, that decide which kernels run."""
    return (
        torch.is_autocast_enabled(),
        torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        *(os.environ.get(name) for name in sorted(os.environ) if name.startswith("HF_LOWBIT_KV_")),
    )


#: number of kinds of step kept for a cache: with and without padding, with other outputs, before and after windows are
#: full
KEPT_RECORDINGS = 8
#: a kind of step may take this many eager steps until one of them changes nothing in Python and does not wait for the
#: device
WARM_UPS = 3
#: stands for the cache among a step's inputs and outputs
_CACHE = object()
_capturing = threading.Lock()
#: the user's layers may compile during this many eager steps
COMPILING_STEPS = 16


class Graph(Protocol):
    """Records the device's work of a call, and repeats it."""

    def capture(self, call: Callable[[], Any]) -> Any:
        """Record what `call` launches, without running it on the device. Returns the result of `call`."""
        ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes CUDA graphs that share the memory of their intermediate results."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = None

    def __call__(self) -> CudaGraph:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self)


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, family: CudaGraphs):
        self._graph, self._family = torch.cuda.CUDAGraph(), family
        self._stream = torch.cuda.Stream(family.device)
        self.replay = self._graph.replay

    def capture(self, call: Callable[[], Any]) -> Any:
        stream = torch.cuda.current_stream(self._stream.device)
        # cuBLAS keeps a workspace for each stream: the graph's own must come from its pool, and must not stay with cuBLAS
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with (
                torch.cuda.device(self._stream.device),
                torch.cuda.graph(
                    self._graph, pool=self._family.pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                return call()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails does not leave its own
            self._family.pool = None  # and torch takes it for one that is still recording
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def graphs_for(device: torch.device) -> Callable[[], Graph] | None:
    """The maker of graphs on this device; `None` if it has none."""
    return CudaGraphs(device) if device.type == "cuda" else None


#: by the first packed layer of a cache, which copies of the cache object share
_recorders: weakref.WeakKeyDictionary[LowBitLayer, Recorder] = weakref.WeakKeyDictionary()


def recorded_step(cache: Any, device: torch.device, fuse: bool = True) -> RecordedStep | None:
    """The callable in place of the model, for one call of `generate` with this cache; `None` without graphs.

    Args:
        fuse: whether kernels compute pieces of the model.
    """
    first = cache.packed_layers[0]
    recorder = _recorders.get(first)
    if recorder is None:
        if (make_graph := graphs_for(device)) is None:
            return None
        recorder = _recorders[first] = Recorder(make_graph)
    return RecordedStep(recorder, fuse)


def forget(cache: Any) -> None:
    """Free a cache's recordings and the memory they hold."""
    _recorders.pop(cache.packed_layers[0], None)


class RecordedStep:
    """The model, for one call of `generate`: replays steps of one token, and runs everything else as the model does."""

    def __init__(self, recorder: Recorder, fuse: bool = True):
        self._recorder, self._fuse, self._checked = recorder, fuse, False

    def __call__(self, model: Any, **inputs: Any) -> Any:
        cache: Any = cache_in(inputs)
        ids = inputs.get("input_ids")
        one_token = isinstance(ids, torch.Tensor) and ids.shape[1] == 1 and inputs.get("inputs_embeds") is None
        if not one_token or torch.is_grad_enabled() or not cache.packed_layers[0].is_initialized:
            return model(**inputs)
        if not self._checked:
            self._recorder.check(model, cache, self._fuse)
            self._checked = True
        outputs = self._recorder.step(model, inputs)
        cache.decoding_steps = self._recorder.report
        return outputs


class _Recording(NamedTuple):
    graph: Graph
    inputs: list[torch.Tensor]
    """tensors that the graph reads; a replay fills them first"""
    outputs: list[Any]
    """leaves of what the model returned"""
    tree: Any
    counts: dict[tuple[int, str], int]


class Recorder:
    """Recordings of one cache's steps of one token.

    Args:
        make_graph: makes a `Graph`.
    """

    def __init__(self, make_graph: Callable[[], Graph]):
        self._make_graph = make_graph
        self._seen: tuple | None = None  # what the recordings depend on
        self._fusion = Fusion()
        self._forget()

    def _forget(self) -> None:
        self._recordings: OrderedDict[Any, _Recording] = OrderedDict()
        self._warm: dict[Any, dict[tuple[int, str], int]] = {}  # kinds of step that ran eagerly, and what they counted
        self._tries: dict[Any, int] = {}
        self._compiling: dict[Any, int] = {}
        self._why_not: str | None = None
        self._report: str | None = None

    @property
    def count(self) -> int:
        """Recordings that are kept."""
        return len(self._recordings)

    @property
    def report(self) -> str:
        """How steps run, for `summary()`. The text is made once: a large model has hundreds of pieces, and every step
        asks."""
        if self._report is None:
            self._report = f"eager: {self._why_not}" if self._why_not else f"recorded; fused: {self._fusion.report()}"
        return self._report

    def check(self, model: Any, cache: Any, fuse: bool = True) -> None:
        """Forget recordings if model, cache or torch have changed since they were made."""
        state = (fingerprint(model), memory(cache), switches(), fuse)
        if state != self._seen:
            self._forget()
            self._seen = state
            self._fusion = Fusion(why_nothing_fused(model) if fuse else "fuse=False")
            if (reason := why_not_recorded(model)) is not None:
                self._refuse(model, reason)

    def step(self, model: Any, inputs: dict[str, Any]) -> Any:
        """`model(**inputs)`, a step of one token."""
        if self._why_not is not None:
            return model(**inputs)
        cache = cache_in(inputs)
        leaves, tree = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kind = (*(_kind(leaf, cache) for leaf in leaves), repr(tree), *_windows_full(cache), model.training)
        if (recording := self._recordings.get(kind)) is None:
            self._report = None  # pieces may be found not to hold
            if kind not in self._warm:
                return self._warm_up(kind, model, inputs)
            try:
                recording = self._record(kind, model, cache, leaves, tree)
            except Exception as error:
                reason = f"recording it failed: {_root(error)}"
                if self._fusion.any:
                    self._fusion.give_up(reason)
                else:
                    self._refuse(model, reason)
                return model(**inputs)
            self._recordings[kind] = recording
            if len(self._recordings) > KEPT_RECORDINGS:
                self._recordings.popitem(last=False)
        return _replay(recording, cache, tensors)

    def _warm_up(self, kind: Any, model: Any, inputs: dict[str, Any]) -> Any:
        """Run the step eagerly. It shows what the step counts in Python, whether it can be recorded, and which pieces
        kernels can compute. First comes the model's own step with kernels beside it, then the step with these pieces
        fused."""
        cache, fusion = cache_in(inputs), self._fusion
        observed = not fusion.settled
        before, compiled = _python_state(cache), compilations()
        pieces = fusion.observing(model) if observed else fusion.in_force(model)
        with recorded_as_compiled(model), pieces, watch(model.device) as waits:
            outputs = model(**inputs)
        assert self._seen is not None
        old, now = self._seen[0], fingerprint(model)
        self._seen = now, *self._seen[1:]
        counts, reason = _counted(before, _python_state(cache))
        if compilations() != compiled:
            self._compiling[kind] = self._compiling.get(kind, 0) + 1
            if self._compiling[kind] >= COMPILING_STEPS:
                self._refuse(model, "its compiled layers are compiled again in every step")
            return outputs
        if waits:
            reason = f"it asks the device at {waits[0]}"
        elif reason is None and (module := first_difference(old, now)) is not None:
            reason = f"{module} changes its attributes in every step"
        if reason is None:
            if not (observed and fusion.any):
                self._warm[kind] = counts
            return outputs
        if not observed and fusion.any:
            fusion.give_up(reason)
            return outputs
        self._tries[kind] = self._tries.get(kind, 0) + 1
        if self._tries[kind] >= WARM_UPS:  # what happened in the first steps alone was loading
            self._refuse(model, reason)
        return outputs

    def _record(self, kind: Any, model: Any, cache: Any, leaves: list[Any], tree: Any) -> _Recording:
        arguments = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        graph, state = self._make_graph(), _saved(cache)
        try:
            with _capturing, recorded_as_compiled(model, capturing=True), self._fusion.in_force(model):
                outputs = graph.capture(lambda: model(**pytree.tree_unflatten(arguments, tree)))
        finally:
            _restore(cache, state)  # the replay that follows counts
        results, out_tree = pytree.tree_flatten(outputs)
        results = [_CACHE if leaf is cache else leaf for leaf in results]
        inputs = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        return _Recording(graph, inputs, results, out_tree, self._warm[kind])

    def _refuse(self, model: Any, reason: str) -> None:
        self._forget()
        self._why_not = reason
        _tell(model, reason)


def _replay(recording: _Recording, cache: Any, tensors: list[torch.Tensor]) -> Any:
    cache.packed_layers[0].get_mask_sizes(1)  # raises where there is no room
    for recorded, tensor in zip(recording.inputs, tensors, strict=True):
        recorded.copy_(tensor, non_blocking=True)
    recording.graph.replay()
    for (index, name), count in recording.counts.items():
        setattr(cache.layers[index], name, getattr(cache.layers[index], name) + count)
    for layer in cache.packed_layers:
        layer.advance()
    cache._ledger = None  # passes were not counted
    leaves = [
        cache if leaf is _CACHE else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in recording.outputs
    ]
    return pytree.tree_unflatten(leaves, recording.tree)


# ---- what can be recorded ---------------------------------------------------------------------------------------------


def why_not_recorded(model: Any) -> str | None:
    """Why the steps of this model cannot be recorded, as far as known without running one, or `None`."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if "meta" in devices or (len(devices) > 1 and "cpu" in devices):
        return "some of its weights are offloaded"
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(sorted(devices))})"
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "its weights are spread over several processes (tensor parallelism)"
    return why_not_recorded_compiled(model)


_told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _tell(model: Any, reason: str) -> None:
    """Warn once why the steps of this model run eagerly."""
    told = _told.setdefault(model, set())
    if reason not in told:
        told.add(reason)
        warnings.warn(
            f"the decoding step of {type(model).__name__} cannot be recorded: {reason}. It runs eagerly, which is slower; "
            "step='eager' asks for that, step='compiled' compiles it where transformers can",
            stacklevel=2,
        )


def _root(error: BaseException) -> str:
    """The first error, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _kind(leaf: Any, cache: Any) -> Any:
    """The properties of one of a step's inputs on which a recording depends."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return "cache" if leaf is cache else repr(leaf)


def _windows_full(cache: Any) -> Iterator[bool]:
    """For each of transformers' sliding layers, whether its window is full: it then does other work."""
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            yield layer.cumulative_length_int >= layer.max_cache_len


def _python_state(cache: Any) -> dict[tuple[int, str], Any]:
    """The Python state of transformers' own layers: plain values, and addresses of tensors."""
    state: dict[tuple[int, str], Any] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LowBitLayer):
            continue
        for name, value in vars(layer).items():
            tensors = [x for x in value.values() if x is not None] if isinstance(value, dict) else [value]
            if tensors and all(isinstance(x, torch.Tensor) for x in tensors):
                state[index, name] = addresses(tensors)
            else:
                state[index, name] = dict(value) if isinstance(value, dict) else value
    return state


def _counted(before: dict, after: dict) -> tuple[dict[tuple[int, str], int], str | None]:
    """By how much numbers have grown, and which other values have changed. A replay cannot change those other values."""
    counts: dict[tuple[int, str], int] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if type(old) is not int or type(new) is not int:
            return {}, f"layer {key[0]} of the cache changes its {key[1]!r} in every step"
        counts[key] = new - old
    return counts, None


# ---- the state of a cache in Python -----------------------------------------------------------------------------------


def _saved(cache: Any) -> tuple[list[dict[str, Any]], Any]:
    return [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers], copy.deepcopy(
        cache._ledger
    )


def _copied(value: Any) -> Any:
    """Containers that a step may change in place are copied, tensors never are."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) or hasattr(type(value), "__copy__") else value


def _restore(cache: Any, state: tuple[list[dict[str, Any]], Any]) -> None:
    layers, cache._ledger = state
    for layer, attributes in zip(cache.layers, layers, strict=True):
        vars(layer).clear()
        vars(layer).update(attributes)
