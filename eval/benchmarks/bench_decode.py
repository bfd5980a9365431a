"""Decode attention over packed history against 16-bit attention: `python -m hf_lowbit_kv.eval.benchmarks.bench_decode`.

Presets are checked before they are timed. If a preset's output or packed bytes are wrong, this is reported and the
preset is not timed. Peers and packed steps are timed in the same rounds. Use their ratio: absolute times drift between
machines and days.

- `ms`: attention of one step over all stored tokens, including the transform of its queries and keys.
- `append_ms`: storing one token in every row, without attention but with packing, as a mean over the steps that fill a
  page.
- `step_ms`: a decode step as in a model, attention and storing, as a mean over the same steps. `step_append_ms`: the
  part for storing. It is `step_ms` less the attention of the same steps over the tokens stored then, timed in the
  same rounds.
- `behind_ms`, `step_behind_ms`: `ms` and `step_ms` when another kernel runs before each call, as in a model
  (`time_cold`). Then neither data nor instructions are in a cache of the GPU.
- `ratio`, `step_ratio`, `behind_ratio`, `step_behind_ratio`: time of the fastest peer divided by ours. A peer only
  attends. Its inputs rotate as ours do. For the `behind` ratios, another kernel also runs before the peer.
  `step_behind_ratio` is closest to what a model gains.
- `byte_limit_ratio`: `ratio` of a step that only reads its packed bytes, at the bandwidth measured in the same run.
  For ragged batches the peer is the preset `dense`, because PyTorch's attention needs rows of one length.
- `against`: with `--against`, a commit or a folder with another state of this project's packages. Its kernels are
  checked and timed in the same process, on the same layers and in the same rounds: `against_ms`,
  `against_step_behind_ms`, ...
- `relerr`: relative error, compared with float32 attention over the same packed bytes.
- `per_head`: `true`: each KV head has its own calibrated parameters; `false`: the heads of a layer share them; `null`:
  as `calibrate` makes them.
- `fixed_order`: present, and true, if pages were read in a fixed order (`HF_LOWBIT_KV_DETERMINISTIC=1`, backend
  `cuda`).
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from hf_lowbit_kv.backends.choice import LayerSetup, choose_backend, storage_spec
from hf_lowbit_kv.eval.benchmarks import packed_layer
from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree, compile_kernels, tiny_case
from hf_lowbit_kv.eval.benchmarks.packed_layer import (
    USUAL,
    PackedCase,
    Shape,
    WrongResultError,
    append_fault,
    attend_error,
    build,
    check_error,
    rewind,
    step_fault,
)
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Dtype, Out, PresetNames, Record, Rounds, Run
from hf_lowbit_kv.eval.benchmarks.timing import (
    PEERS,
    Candidate,
    Inputs,
    read_bandwidth,
    sets_needed,
    time_cold,
    time_interleaved,
    usable_peers,
)
from hf_lowbit_kv.eval.provenance import device_name, run_command
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels.determinism import fixed_order

PRESETS = (
    *("dense", "int8", "int6", "int5", "fp8", "kv8", "kivi-4", "bitdecoding-kc-4", "bitdecoding-kt-4", "kv4"),
    *("k4v2", "kivi-2", "bitdecoding-kc-2"),
)
#: a peer is left out if it takes more than this many times as long as the fastest peer
SLOW_PEER = 1.5
#: names of the two trees in timings
OURS, AGAINST = "ours", "against"


def check(case: PackedCase, backend: str, whose: str = "") -> float:
    """The relative error of the output. Raises `WrongResultError` if a check fails."""
    relerr, bound = attend_error(case, backend)
    check_error(relerr, bound, whose)
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
    """Check, then time one preset on one shape. The module's docstring explains the figures.

    Args:
        peers: calls on rotating inputs, by name.
        bandwidth: read bandwidth, bytes per second.
        against: another tree, whose kernels are checked and timed on the same layers in the same rounds.

    Returns:
        A record without provenance.

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
    cold = time_cold(firsts, device, rounds)
    times = time_interleaved(candidates, device, rounds)
    attend_only = {name: times.pop(name) for name in trees}
    attend_cold = {name: cold.pop(name) for name in trees}
    peer = min(times, key=times.__getitem__) if times else None
    peer_ms, cold_peer_ms = (times[peer], min(cold.values())) if peer else (None, None)
    append_ms = time_append(cases[0], backend, graph, device, rounds)
    steps, attention_ms, steps_cold = time_steps(trees, backend, graph, device, rounds)
    ms, step_ms, nbytes = attend_only[OURS], steps[OURS], cases[0].nbytes

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
        "step_ms": step_ms,
        "step_ratio": against_peer(step_ms, peer_ms),
        "step_append_ms": step_ms - attention_ms,
        "step_append_share": step_ms / attention_ms - 1,
        "behind_ms": attend_cold[OURS],
        "behind_peer_ms": cold_peer_ms,
        "behind_ratio": against_peer(attend_cold[OURS], cold_peer_ms),
        "step_behind_ms": steps_cold[OURS],
        "step_behind_ratio": against_peer(steps_cold[OURS], cold_peer_ms),
        "transform": str(spec.key_transform),
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
            "against_ms": attend_only[AGAINST],
            "against_behind_ms": attend_cold[AGAINST],
            "against_step_ms": steps[AGAINST],
            "against_step_behind_ms": steps_cold[AGAINST],
        }
    if backend == "cuda" and fixed_order():
        record["fixed_order"] = True
    if spec.parameters(head_dim, head_dim_v, shape.kv_heads):
        record["per_head"] = per_head
    return record


def time_append(case: PackedCase, backend: str, graph: bool, device: torch.device, rounds: int) -> float:
    """Milliseconds to store one token in every row, as a mean over as many steps as a page has tokens."""
    counters = case.state.length.clone(), case.state.paged.clone()
    steps = [partial(case.append, token, backend) for token in range(case.spec.page_size)]
    append = Candidate("append", steps, graph, before=lambda: rewind(case, counters))
    times = time_interleaved([append], device, rounds)
    rewind(case, counters)
    return times["append"]


def time_steps(
    trees: Mapping[str, Sequence[PackedCase]], backend: str, graph: bool, device: torch.device, rounds: int
) -> tuple[dict[str, float], float, dict[str, float]]:
    """Times of decode steps that store their token, in milliseconds, as means over as many steps as a page has tokens.

    Returns:
        Steps, for each tree; only the attention of these steps, for the first tree; and steps after another kernel, for
        each tree.
    """
    cases = next(iter(trees.values()))
    along = cases[0].counters_along()

    def before() -> None:  # all trees use the same layers
        for case in cases:
            rewind(case, along[0])

    def steps(of_tree: Sequence[PackedCase]) -> list[Callable[[], Any]]:
        return [partial(case.step, token, backend) for token in range(len(along)) for case in of_tree]

    attend_only = [partial(case.attend_at, token, at, backend) for token, at in enumerate(along) for case in cases]
    candidates = [Candidate(name, steps(of_tree), graph, before) for name, of_tree in trees.items()]
    times = time_interleaved([*candidates, Candidate("attend", attend_only, graph, before)], device, rounds)
    firsts = [Candidate(each.name, each.calls[:: len(cases)], graph, before) for each in candidates]
    cold = time_cold(firsts, device, rounds)
    before()
    return times, times.pop("attend"), cold


# ---- all cells --------------------------------------------------------------------------------------------------------


def fast_peers(
    shape: Shape, backend: str, head_dim: int, query_length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Sequence[Callable[[], Any]]]:
    """Calls of 16-bit attention on rotating inputs, by name. Peers that are far slower than the fastest are left out,
    and printed."""
    if shape.ragged:
        spec = storage_spec(get_preset("dense").spec(), backend)
        cases = build_sets(shape, spec, head_dim, query_length, dtype, device, None)
        return {"dense": [partial(case.attend, backend) for case in cases]}
    draw = partial(Inputs.random, *shape[1:5], head_dim, query_length, dtype, device, shape.head_dim_v)
    inputs = [draw()]
    nbytes = inputs[0].k.nbytes + inputs[0].v.nbytes
    inputs += [draw() for _ in range(sets_needed(nbytes, device) - 1)]
    calls, reasons = usable_peers(inputs[0])
    candidates: dict[str, Sequence[Callable[[], Any]]] = {}
    candidates |= {name: [call, *(PEERS[name](each) for each in inputs[1:])] for name, call in calls.items()}
    if len(candidates) > 1 and device.type == "cuda":
        times = time_interleaved([Candidate(name, rotated) for name, rotated in candidates.items()], device, 5)
        least = min(times.values())
        for name in [name for name, ms in times.items() if ms > SLOW_PEER * least]:
            del candidates[name]
            reasons[name] = f"takes {times[name] / least:.1f} times as long as the fastest"
    for name, reason in reasons.items():
        print(f"{shape.name}: no {name}: {reason}")
    return candidates


def measure_all(cells: Iterable[tuple[str, str, str | None]], run: Run, **options: Any) -> None:
    """Measure each cell (shape, preset, and backend or `None`: the default one) and add its record, or its failure, to `run`.
    Peers are set up once for each shape, so cells of one shape should follow each other. options: arguments of `measure`."""
    dtype, device, head_dim = options["dtype"], options["device"], options["head_dim"]
    work = []
    for name, preset, wanted in cells:
        shape = Shape.parse(name)
        setup = LayerSetup(device, dtype, get_preset(preset).spec(), shape.widths(head_dim))
        work.append((shape, preset, choose_backend(wanted, setup)))
    bandwidth = read_bandwidth(device)
    print(f"{device_name(device)}: {bandwidth / 1e12:.3g} TB/s")
    if device.type == "cuda":
        sizes = head_dim, options["query_length"], dtype, device, options["per_head"]
        layers = [partial(tiny_case, shape, preset, "cuda", *sizes) for shape, preset, used in work if used == "cuda"]
        compile_kernels(layers, "cuda", os.cpu_count() or 1, options["against"])
    peers: dict[str, Any] = {}
    last = None
    for shape, preset, backend in track(work, "measuring", console=run.console, transient=True):
        if shape != last:
            peers.clear()
            gc.collect()
            peers |= fast_peers(shape, backend, shape.head_dim or head_dim, options["query_length"], dtype, device)
            last = shape
        timed = partial(measure, shape, preset, backend, peers, bandwidth, **options)
        if (record := run.attempt(f"{shape.name} {preset} {backend}", timed)) is not None:
            run.add(record)
        gc.collect()


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Name, or BATCHxHEADSxKVHEADSxTOKENS; repeatable.")] = None,
    preset: PresetNames = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="torch, triton, cuda; repeatable [default: by device].")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Eight presets on six shapes, two presets on all others; not with --shape.")
    ] = False,
    dtype: Dtype = "float16",
    head_dim: Annotated[int, typer.Option(help="Head size, where the shape does not say.")] = 128,
    query_length: Annotated[int, typer.Option(help="Query tokens.")] = 1,
    rounds: Rounds = 20,
    per_head: Annotated[
        bool | None,
        typer.Option(
            "--per-head/--per-layer", help="Whose calibrated parameters are [default: as `calibrate` makes them]."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Commit, or folder with another state of the packages: timed beside this one.")
    ] = None,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Check and time packed decode attention, and append a JSON line for each measurement."""
    torch.manual_seed(torch.seed())  # fresh data every time
    run = Run("decode", device, commit, out)
    if matrix and (shape or backend):
        raise typer.BadParameter("it has shapes of its own, and each preset's default backend", param_hint="--matrix")
    cells: Iterable[tuple[str, str, str | None]]
    if matrix:
        cells = [(name, each, None) for name, each in packed_layer.matrix() if preset is None or each in preset]
    else:
        backends: list[str | None] = [*backend] if backend else [None]
        cells = itertools.product(shape or [each.name for each in USUAL], preset or PRESETS, backends)
    other = None if against is None else OtherTree(against)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": run.device, "head_dim": head_dim}
    options |= {"query_length": query_length, "rounds": rounds, "per_head": per_head, "against": other}
    measure_all(cells, run, **options)
    if other is not None:
        run.console.print(comparison(run.records))
    times = "ms:.4f", "peer", "ratio:.2f", "byte_limit_ratio:.2f", "relerr:.1e", "step_ms:.4f", "behind_ms:.4f"
    shares = "append_share:.1%", "step_append_share:.1%"
    run.end("shape", "preset", "backend", *times, "step_behind_ms:.4f", "step_behind_ratio:.2f", *shares)


def comparison(records: list[Record]) -> Table:
    """The other tree's milliseconds, ours, and how much less ours are: for attention and steps, hot and after another
    kernel."""
    kinds = "ms", "behind_ms", "step_ms", "step_behind_ms"
    out = Table("shape", "preset", *(name.removesuffix("_ms").replace("_", " ") for name in kinds))
    for r in (r for r in records if "against" in r):
        pairs = ((r[f"against_{kind}"], r[kind]) for kind in kinds)
        out.add_row(r["shape"], r["preset"], *(f"{old:.4f} {new:.4f} {new / old - 1:+.1%}" for old, new in pairs))
    return out


if __name__ == "__main__":
    run_command(main)
