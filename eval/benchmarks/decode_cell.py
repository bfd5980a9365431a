"""One cell of `bench_decode`: a preset on a shape is checked, then timed. `bench_decode` explains the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hf_lowbit_kv.backends.operations import storage_spec
from hf_lowbit_kv.eval.benchmarks.decode_shapes import Shape
from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree
from hf_lowbit_kv.eval.benchmarks.packed_layer import PackedCase, append_fault, attend_error, build, rewind, step_fault
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, sets_needed, time_behind, time_interleaved
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels.determinism import fixed_order

#: names of the two trees in timings
OURS, AGAINST = "ours", "against"


class WrongResultError(RuntimeError):
    """A check failed, so nothing was timed."""


def check(case: PackedCase, backend: str, whose: str = "") -> float:
    """The relative error of the output. Raises `WrongResultError` if a check fails."""
    relerr, bound = attend_error(case, backend)
    if not relerr <= bound:  # NaN fails too
        raise WrongResultError(f"{whose}relative error {relerr:.2g} is above its bound {bound:.2g}")
    if fault := append_fault(case, backend):
        raise WrongResultError(f"{whose}append: {fault}")
    if fault := step_fault(case, backend):
        raise WrongResultError(f"{whose}step: {fault}")
    return relerr


def build_sets(shape: Shape, spec: Any, *geometry: Any) -> list[PackedCase]:
    """Enough cases to rotate among, so that the GPU's cache holds none of them. geometry: the next arguments of
    `build`."""
    cases = [build(shape, spec, *geometry)]
    count = sets_needed(cases[0].nbytes, torch.device(cases[0].q.device))
    return cases + [build(shape, spec, *geometry) for _ in range(count - 1)]


def measure(
    shape: Shape,
    preset: str,
    backend: str,
    peers: Mapping[str, Sequence[Callable[[], Any]]],
    bandwidth: float,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int = 128,
    query_length: int = 1,
    rounds: int = 20,
    per_head: bool | None = None,
    against: OtherTree | None = None,
) -> dict[str, Any]:
    """Check, then time one preset on one shape.

    Args:
        peers: calls on rotating inputs, by name.
        bandwidth: read bandwidth, bytes per second.
        against: another tree, whose kernels are checked and timed on the same layers in the same rounds.

    Returns:
        A record without provenance, see `bench_decode`.

    Raises:
        WrongResultError: the output or the packed bytes are wrong.
    """
    spec, (head_dim, head_dim_v) = get_preset(preset).spec(), shape.widths(head_dim)
    cases = build_sets(shape, storage_spec(spec, backend), head_dim, query_length, dtype, device, per_head)
    relerr = check(cases[0], backend)
    trees = {OURS: cases}
    if against is not None:
        trees[AGAINST] = [case.of(against) for case in cases]
        check(trees[AGAINST][0], backend, f"{against.name}: ")

    graph = backend != "torch"  # the reference copies lengths to the CPU, which a graph cannot record
    candidates = [
        Candidate(name, [lambda case=case: case.attend(backend) for case in of_tree], graph)
        for name, of_tree in trees.items()
    ]
    candidates += [Candidate(name, calls) for name, calls in peers.items()]
    firsts = [Candidate(each.name, each.calls[:1], each.graph) for each in candidates]
    behind = time_behind(firsts, device, rounds)
    if not spec.untransformed:
        calls = [lambda case=case: case.attend(backend) for case in [case.without_transform() for case in cases]]
        candidates.append(Candidate("bare", calls, graph))
    times = time_interleaved(candidates, device, rounds)
    bare_ms = times.pop("bare", None)
    alone = {name: times.pop(name) for name in trees}
    alone_behind = {name: behind.pop(name) for name in trees}
    peer = min(times, key=times.__getitem__) if times else None
    peer_ms, behind_peer_ms = (times[peer], min(behind.values())) if peer else (None, None)
    append_ms, pack_ms = time_append(cases[0], backend, graph, device, rounds)
    steps, attention_ms, steps_behind = time_steps(trees, backend, graph, device, rounds)
    ms, step_ms, nbytes = alone[OURS], steps[OURS], cases[0].nbytes

    def against_peer(our_ms: float, peer_ms: float | None) -> float | None:
        return None if peer_ms is None else peer_ms / our_ms

    record = {
        "shape": shape.name,
        "preset": preset,
        "keys": spec.key_format.name,
        "values": spec.value_format.name,
        "backend": backend,
        "ms": ms,
        "peer": peer,
        "peer_ms": peer_ms,
        "ratio": against_peer(ms, peer_ms),
        "byte_limit_ratio": None if peer_ms is None else peer_ms * 1e-3 * bandwidth / nbytes,
        "relerr": relerr,
        "append_ms": append_ms,
        "append_share": append_ms / ms,
        "pack_ms": pack_ms,
        "pack_share": None if pack_ms is None else pack_ms / ms,
        "step_ms": step_ms,
        "step_ratio": against_peer(step_ms, peer_ms),
        "step_append_ms": step_ms - attention_ms,
        "step_append_share": step_ms / attention_ms - 1,
        "behind_ms": alone_behind[OURS],
        "behind_peer_ms": behind_peer_ms,
        "behind_ratio": against_peer(alone_behind[OURS], behind_peer_ms),
        "step_behind_ms": steps_behind[OURS],
        "step_behind_ratio": against_peer(steps_behind[OURS], behind_peer_ms),
        "transform": str(spec.key_transform),
        "transform_ms": None if bare_ms is None else ms - bare_ms,
        "transform_share": None if bare_ms is None else ms / bare_ms - 1,
        "bytes": nbytes,
        "bandwidth": bandwidth,
        "peers_ms": times,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        **({"head_dim_v": head_dim_v} if head_dim_v != head_dim else {}),
        "query_length": query_length,
    }
    if against is not None:
        record |= {
            "against": against.name,
            "against_ms": alone[AGAINST],
            "against_behind_ms": alone_behind[AGAINST],
            "against_step_ms": steps[AGAINST],
            "against_step_behind_ms": steps_behind[AGAINST],
        }
    if backend == "cuda" and fixed_order():
        record["fixed_order"] = True
    if spec.parameters(head_dim, head_dim_v, shape.kv_heads):
        record["per_head"] = per_head
    return record


def time_append(
    case: PackedCase, backend: str, graph: bool, device: torch.device, rounds: int
) -> tuple[float, float | None]:
    """Milliseconds to store one token in every row, as a mean over as many steps as a page has tokens. The second
    number is the part for packing, or `None` if tokens go directly into pages."""
    counters = case.state.length.clone(), case.state.paged.clone()
    steps = [lambda token=token: case.append(token, backend) for token in range(case.spec.page_size)]
    candidates = [Candidate("all", steps, graph, before=lambda: rewind(case, counters))]
    if not case.spec.direct:
        packed = case.state.paged.clone()
        for step in steps:  # stop after the first step that packs: then the next `page_size - 1` steps pack nothing
            step()
            if not torch.equal(case.state.paged, packed):
                break
        behind = case.state.length.clone(), case.state.paged.clone()
        candidates.append(Candidate("quiet", steps[1:], graph, before=lambda: rewind(case, behind)))
    times = time_interleaved(candidates, device, rounds)
    rewind(case, counters)
    return times["all"], None if case.spec.direct else times["all"] - times["quiet"]


def time_steps(
    trees: Mapping[str, Sequence[PackedCase]], backend: str, graph: bool, device: torch.device, rounds: int
) -> tuple[dict[str, float], float, dict[str, float]]:
    """Times of decode steps that store their token, in milliseconds, as means over as many steps as a page has tokens.

    Returns:
        Steps, for each tree; the attention of these steps alone, for the first tree; and steps after another kernel, for
        each tree.
    """
    cases = next(iter(trees.values()))
    along = cases[0].counters_along()

    def before() -> None:  # all trees use the same layers
        for case in cases:
            rewind(case, along[0])

    def steps(of_tree: Sequence[PackedCase]) -> list[Callable[[], Any]]:
        return [partial(case.step, token, backend) for token in range(len(along)) for case in of_tree]

    alone = [partial(case.attend_at, token, at, backend) for token, at in enumerate(along) for case in cases]
    candidates = [Candidate(name, steps(of_tree), graph, before) for name, of_tree in trees.items()]
    times = time_interleaved([*candidates, Candidate("alone", alone, graph, before)], device, rounds)
    firsts = [Candidate(each.name, each.calls[:: len(cases)], graph, before) for each in candidates]
    behind = time_behind(firsts, device, rounds)
    before()
    return times, times.pop("alone"), behind
