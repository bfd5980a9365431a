"""Decoding steps recorded in CUDA graphs, without a compiler: the eager step of a preallocated cache, replayed.

A step of one token launches the same kernels at the same addresses as the previous step, so it is captured once and
replayed. transformers calls a `RecordedStep` for each token of a `generate` call. A `Recorder` keeps the recordings of
one cache. The first steps of each kind run eagerly: they load kernels, and show what a step changes in Python. The next
step is captured. A `Recorder` keeps no reference to the cache or the model, so both can be freed.

During capture, kernels of this package compute parts of the model (`fusing`). Layers that the user has compiled are
captured compiled (`compiled_layers`).

Stamps (`process_stamps`) determine how long a recording is valid. A replayed step runs no Python. So the counts that a
step increases are found by comparing the state before and after an eager step (`python_state`, `increments`). Changes made
during capture are undone (`snapshot`, `restore`).
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import StaticSlidingWindowLayer

from ..cache.cache_argument import cache_in
from ..cache.low_bit_layer import LowBitLayer
from ..storage.process_stamps import addresses, cache_stamp, changed_module, model_stamp, settings_stamp
from .compiled_layers import compilations, recorded_as_compiled, why_not_recorded_compiled
from .fusing import Fusion, why_nothing_fused
from .sync_watch import watch
from .tensor_parallel import Ranks, watch_ranks

#: recordings kept per cache: kinds of step differ in padding, in outputs, and in whether sliding windows are full
KEPT_RECORDINGS = 8
#: warm-up steps before a kind of step is declared unrecordable
WARM_UPS = 3
#: placeholder of the cache among a step's inputs and outputs
_CACHE = object()
_capturing = threading.Lock()
#: the user's layers may compile during this many eager steps
COMPILING_STEPS = 16


#: by the first packed layer of a cache, which copies of the cache object share
_recorders: weakref.WeakKeyDictionary[LowBitLayer, Recorder] = weakref.WeakKeyDictionary()


def recorded_step(cache: Any, device: torch.device, fuse: bool = True) -> RecordedStep | None:
    """The callable in place of the model, for one `generate` call with this cache; `None` if the device has no graphs.

    Args:
        fuse: whether fused kernels compute parts of the model.
    """
    first = cache.packed_layers[0]
    recorder = _recorders.get(first)
    if recorder is None:
        if (make_graph := graphs_for(device)) is None:
            return None
        recorder = _recorders[first] = Recorder(make_graph)
    return RecordedStep(recorder, fuse)


def forget_all() -> None:
    """Free the recordings of all caches. NCCL releases a communicator only once no graph contains its collectives:
    otherwise `torch.distributed.destroy_process_group` would not return."""
    for recorder in list(_recorders.values()):
        recorder._forget()


@functools.cache
def _free_at_exit() -> None:
    util.Finalize(None, forget_all, exitpriority=0)


def forget(cache: Any) -> None:
    """Free the recordings of a cache, and their memory."""
    _recorders.pop(cache.packed_layers[0], None)


class RecordedStep:
    """The callable in place of the model, for one `generate` call: replays steps of one token, and calls the model for all
    other passes."""

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
    """A captured step of one kind."""

    graph: CudaGraph
    inputs: list[torch.Tensor]
    """tensors that the graph reads; a replay first copies new values into them"""
    outputs: list[Any]
    """leaves of the model's result"""
    tree: Any
    """structure of the model's result (`pytree`)"""
    counts: dict[tuple[int, str], int]
    """by layer index and attribute, how much a step increases a number of a native layer (`increments`)"""


class Recorder:
    """Recordings of one cache's steps of one token.

    Args:
        make_graph: makes a `CudaGraph`.
    """

    def __init__(self, make_graph: Callable[[], CudaGraph]):
        self._make_graph = make_graph
        self._seen: tuple | None = None  # stamps on which the recordings depend
        self._fusion = Fusion()
        self._ranks = Ranks()
        self._forget()

    def _forget(self) -> None:
        self._recordings: OrderedDict[Any, _Recording] = OrderedDict()
        # by kind of step (`_kind`): increments of its last eager step, eager steps that could not be captured, and eager steps
        # in which torch compiled something
        self._warm: dict[Any, dict[tuple[int, str], int]] = {}
        self._tries: dict[Any, int] = {}
        self._compiling: dict[Any, int] = {}
        self._why_not: str | None = None
        self._report: str | None = None

    @property
    def count(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    @property
    def report(self) -> str:
        """How steps run, for `summary()`. The text is cached: every step reads it, and a large model has hundreds of parts."""
        if self._report is None:
            self._report = f"eager: {self._why_not}" if self._why_not else f"recorded; fused: {self._fusion.report()}"
        return self._report

    def check(self, model: Any, cache: Any, fuse: bool = True) -> None:
        """Drop recordings if model, cache or settings of torch have changed since, on any rank."""
        state = (model_stamp(model), cache_stamp(cache), settings_stamp(), fuse)
        self._ranks = Ranks.of(model)
        if self._ranks.any(state != self._seen):
            self._forget()
            self._seen = state
            self._fusion = Fusion(why_nothing_fused(model) if fuse else "fuse=False")
            if (reason := self._on_any_rank(why_not_recorded(model))) is not None:
                self._refuse(model, reason)

    def _on_any_rank(self, reason: str | None) -> str | None:
        """The reason of this rank, or else a text if another rank has one."""
        return (reason or "another rank cannot record it") if self._ranks.any(reason is not None) else None

    def step(self, model: Any, inputs: dict[str, Any]) -> Any:
        """`model(**inputs)`, a step of one token."""
        if self._why_not is not None:
            return model(**inputs)
        cache = cache_in(inputs)
        leaves, tree = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kind = (*(_kind(leaf, cache) for leaf in leaves), repr(tree), *windows_full(cache), model.training)
        if (recording := self._recordings.get(kind)) is None:
            self._report = None  # a fused part may be given up
            if kind not in self._warm:
                return self._warm_up(kind, model, inputs)
            recording, reason = self._try_to_record(kind, model, cache, leaves, tree)
            if (reason := self._on_any_rank(reason)) is not None or recording is None:
                if self._ranks.any(self._fusion.any):
                    self._fusion.give_up(str(reason))
                else:
                    self._refuse(model, str(reason))
                return model(**inputs)
            self._recordings[kind] = recording
            if self._ranks.several:
                watch_ranks(self._ranks.group)
                _free_at_exit()
            if len(self._recordings) > KEPT_RECORDINGS:
                self._recordings.popitem(last=False)
        return _replay(recording, cache, tensors)

    def _warm_up(self, kind: Any, model: Any, inputs: dict[str, Any]) -> Any:
        """Run the step eagerly. This shows what the step counts in Python, whether it can be captured, and which parts
        kernels can compute. The first warm-up compares kernels with the model's own step; the next one runs the step with
        these parts fused."""
        cache, fusion = cache_in(inputs), self._fusion
        observed = self._ranks.any(not fusion.settled)
        before, compiled = python_state(cache), compilations()
        pieces = fusion.observing(model) if observed else fusion.in_force(model)
        with recorded_as_compiled(model), pieces, watch(model.device) as waited:
            outputs = model(**inputs)
        assert self._seen is not None
        old, now = self._seen[0], model_stamp(model)
        self._seen = now, *self._seen[1:]
        counts, reason = increments(before, python_state(cache))
        fused = self._ranks.any(fusion.any)
        if self._ranks.any(compilations() != compiled):
            self._compiling[kind] = self._compiling.get(kind, 0) + 1
            if self._compiling[kind] >= COMPILING_STEPS:
                self._refuse(model, "its compiled layers are compiled again in every step")
            return outputs
        if waited():
            reason = "it waits for the device"
        elif reason is None and (module := changed_module(old, now)) is not None:
            reason = f"{module} changes its attributes in every step"
        if (reason := self._on_any_rank(reason)) is None:
            if not (observed and fused):
                self._warm[kind] = counts
            return outputs
        if not observed and fused:
            fusion.give_up(reason)
            return outputs
        self._tries[kind] = self._tries.get(kind, 0) + 1
        if self._tries[kind] >= WARM_UPS:  # earlier tries may only have loaded kernels
            self._refuse(model, reason)
        return outputs

    def _try_to_record(
        self, kind: Any, model: Any, cache: Any, leaves: list[Any], tree: Any
    ) -> tuple[_Recording | None, str | None]:
        """A recording of the step, or the reason why there is none."""
        try:
            return self._record(kind, model, cache, leaves, tree), None
        except Exception as error:
            return None, f"recording it failed: {_first_error(error)}"

    def _record(self, kind: Any, model: Any, cache: Any, leaves: list[Any], tree: Any) -> _Recording:
        arguments = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        graph, state = self._make_graph(), snapshot(cache)
        try:
            with _capturing, recorded_as_compiled(model, capturing=True), self._fusion.in_force(model):
                outputs = graph.capture(lambda: model(**pytree.tree_unflatten(arguments, tree)))
        finally:
            restore(cache, state)  # the replay that follows advances the counts
        results, out_tree = pytree.tree_flatten(outputs)
        results = [_CACHE if leaf is cache else leaf for leaf in results]
        inputs = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        return _Recording(graph, inputs, results, out_tree, self._warm[kind])

    def _refuse(self, model: Any, reason: str) -> None:
        self._forget()
        self._why_not = reason
        _warn_once(model, reason)


def _replay(recording: _Recording, cache: Any, tensors: list[torch.Tensor]) -> Any:
    """Run a recorded step on these inputs, advance the Python counts, and return the model's result in new tensors."""
    cache.packed_layers[0].get_mask_sizes(1)  # raises if there is no room
    for recorded, tensor in zip(recording.inputs, tensors, strict=True):
        recorded.copy_(tensor, non_blocking=True)
    recording.graph.replay()
    for (index, name), count in recording.counts.items():
        setattr(cache.layers[index], name, getattr(cache.layers[index], name) + count)
    for layer in cache.packed_layers:
        layer.advance()
    cache.guard.uncounted()
    leaves = [
        cache if leaf is _CACHE else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in recording.outputs
    ]
    return pytree.tree_unflatten(leaves, recording.tree)


def _kind(leaf: Any, cache: Any) -> Any:
    """The properties of an input of a step on which a recording depends."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return "cache" if leaf is cache else repr(leaf)


def why_not_recorded(model: Any) -> str | None:
    """The reason why steps of this model cannot be captured, if known without running one; otherwise `None`."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if "meta" in devices or (len(devices) > 1 and "cpu" in devices):
        return "some of its weights are offloaded"
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(sorted(devices))})"
    return why_not_recorded_compiled(model)


_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _warn_once(model: Any, reason: str) -> None:
    """Warn once why the steps of this model run eagerly."""
    reported = _warned.setdefault(model, set())
    if reason not in reported:
        reported.add(reason)
        warnings.warn(
            f"the decoding step of {type(model).__name__} cannot be recorded: {reason}. It runs eagerly, which is slower",
            stacklevel=2,
        )


def _first_error(error: BaseException) -> str:
    """The error that caused all others of the chain, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# ---- what a step changes in Python: attributes of the layers of a cache ---------------------------------------------


def windows_full(cache: Any) -> Iterator[bool]:
    """For each sliding-window layer, whether its window is full: full windows launch other kernels."""
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            yield layer.cumulative_length_int >= layer.max_cache_len


def python_state(cache: Any) -> dict[tuple[int, str], Any]:
    """The Python state of native layers: plain values, and addresses of tensors."""
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


def increments(before: dict, after: dict) -> tuple[dict[tuple[int, str], int], str | None]:
    """How much each number grew between two states of `python_state`, by layer index and attribute. If another value changed,
    nothing and the reason why a replay cannot repeat the step."""
    counts: dict[tuple[int, str], int] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if type(old) is not int or type(new) is not int:
            return {}, f"layer {key[0]} of the cache changes its {key[1]!r} in every step"
        counts[key] = new - old
    return counts, None


def snapshot(cache: Any) -> tuple[list[dict[str, Any]], Any]:
    """The attributes of each layer and of the pass guard, for `restore`."""
    layers = [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers]
    return layers, {name: _copied(value) for name, value in vars(cache.guard).items()}


def _copied(value: Any) -> Any:
    """A shallow copy of a container, which a step may change in place. Tensors are not copied."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) or hasattr(type(value), "__copy__") else value


def restore(cache: Any, state: tuple[list[dict[str, Any]], Any]) -> None:
    """Undo what Python code has changed in the cache since `snapshot`."""
    layers, guard = state
    vars(cache.guard).update(guard)
    for layer, attributes in zip(cache.layers, layers, strict=True):
        vars(layer).clear()
        vars(layer).update(attributes)


# ---- graphs: they capture the device work of a call, and replay it --------------------------------------------------


class CudaGraphs:
    """Makes CUDA graphs that share a memory pool for intermediate results."""

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
        """Capture what `call` launches, without running it on the device. Returns the result of `call`."""
        stream = torch.cuda.current_stream(self._stream.device)
        # cuBLAS keeps a workspace per stream: the graph's workspace must come from its pool, and must not stay with cuBLAS
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
            torch.cuda.set_stream(stream)  # a failed capture does not restore the stream
            self._family.pool = None  # torch would treat the pool as still capturing
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def graphs_for(device: torch.device) -> Callable[[], CudaGraph] | None:
    """A factory of graphs for this device; `None` if the device has no graphs."""
    return CudaGraphs(device) if device.type == "cuda" else None
