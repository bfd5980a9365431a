"""Decode attention over packed history against 16-bit attention: `python -m hf_lowbit_kv.eval.benchmarks.bench_decode`.

It checks before it times: a preset whose output or packed bytes are wrong is reported and never timed. Peers and packed
steps are timed in the same rounds, so their ratio is meant; absolute times drift between machines and days.

- `ms`: one step's attention over everything stored, the transform of its queries and keys included; `transform_ms`: what of
  it that transform costs (the same step timed without it, in the same rounds).
- `append_ms`: storing one token in every row by itself, packing included, averaged over the steps in which a page fills.
  `pack_ms`: what of it packing costs (steps that pack nothing, timed in the same rounds).
- `step_ms`: a decode step as a model takes it, attention and storing, averaged over the same steps. `step_append_ms`: what
  of it storing costs: without the attention alone of the same steps (over what is stored at each), timed in the same rounds.
- `behind_ms`, `step_behind_ms`: `ms` and `step_ms` where each stands behind another kernel, as in a model (`time_behind`):
  nothing is in a cache, instructions neither. `behind_ratio`: `ratio` so.
- `ratio`: fastest peer's time / ours. `byte_limit_ratio`: what it would be if the step read its packed bytes at the
  bandwidth measured in the same run, and did nothing else.
- `relerr`: relative error against float32 attention over the same packed bytes.
- `per_head`: whose calibrated parameters are: `true`: each KV head has its own; `false`: a layer's heads share them; `null`: as
  `calibrate` makes them.
- `fixed_order`: there, and true, where pages were taken in a fixed order (`HF_LOWBIT_KV_DETERMINISTIC=1`) (backend `cuda`).
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from hf_lowbit_kv.backends.operations import choose_backend, storage_spec
from hf_lowbit_kv.eval.benchmarks.packed_layer import (
    SHAPES,
    Case,
    Shape,
    append_fault,
    attend_error,
    build,
    rewind,
    step_fault,
)
from hf_lowbit_kv.eval.benchmarks.peers import LOW_BIT_PEERS, Inputs, usable_peers
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, read_bandwidth, sets_needed, time_behind, time_interleaved
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.machine.determinism import fixed_order
from hf_lowbit_kv.presets import get_preset

PRESETS = (
    "dense",
    "kv8",
    "kivi-4",
    "bitdecoding-kc-4",
    "bitdecoding-kt-4",
    "kv4",
    "k4v2",
    "kivi-2",
    "bitdecoding-kc-2",
)
console = wide_console()


class WrongResultError(RuntimeError):
    """A check failed, so nothing was timed."""


def measure(
    shape: Shape,
    preset: str,
    backend: str,
    peers: dict[str, Any],
    bandwidth: float,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int = 128,
    query_length: int = 1,
    rounds: int = 20,
    per_head: bool | None = None,
) -> dict[str, Any]:
    """Check, then time one preset on one shape.

    Args:
        peers: calls to time along, by name. bandwidth: bytes a second that can be read.

    Returns:
        A record without provenance, see the module's description.

    Raises:
        WrongResultError: the output or the packed bytes are wrong.
    """
    spec = get_preset(preset).spec()
    geometry = (shape, storage_spec(spec, backend), head_dim, query_length, dtype, device, per_head)
    cases = [build(*geometry)]
    cases += [build(*geometry) for _ in range(sets_needed(cases[0].nbytes, device) - 1)]
    relerr, bound = attend_error(cases[0], backend)
    if not relerr <= bound:  # NaN is not
        raise WrongResultError(f"relative error {relerr:.2g} is above its bound {bound:.2g}")
    if fault := append_fault(cases[0], backend):
        raise WrongResultError(f"append: {fault}")
    if fault := step_fault(cases[0], backend):
        raise WrongResultError(f"step: {fault}")

    calls = [lambda case=case: case.attend(backend) for case in cases]
    graph = backend != "torch"  # the reference reads lengths back, which a graph cannot record
    candidates = [Candidate("ours", calls, graph), *(Candidate(name, [call]) for name, call in peers.items())]
    behind = time_behind([Candidate("ours", calls[:1], graph), *candidates[1:]], device, rounds)
    behind_ms = behind.pop("ours")
    if not spec.untransformed:
        calls = [lambda case=case: case.attend(backend) for case in [case.without_transform() for case in cases]]
        candidates.append(Candidate("bare", calls, graph))
    times = time_interleaved(candidates, device, rounds)
    ms, bare_ms = times.pop("ours"), times.pop("bare", None)
    peer = min(times, key=times.__getitem__) if times else None
    peer_ms = times[peer] if peer else None
    append_ms, pack_ms = time_append(cases[0], backend, graph, device, rounds)
    step_ms, alone_ms, step_behind_ms = time_step(cases, backend, graph, device, rounds)
    nbytes = cases[0].nbytes
    fixed = {"fixed_order": True} if backend == "cuda" and fixed_order() else {}
    return (
        fixed
        | {
            "shape": shape.name,
            "preset": preset,
            "keys": spec.key_format.name,
            "values": spec.value_format.name,
            "backend": backend,
            "ms": ms,
            "peer": peer,
            "peer_ms": peer_ms,
            "ratio": peer_ms / ms if peer_ms else None,
            "byte_limit_ratio": peer_ms * 1e-3 * bandwidth / nbytes if peer_ms else None,
            "relerr": relerr,
            "append_ms": append_ms,
            "append_share": append_ms / ms,
            "pack_ms": pack_ms,
            "pack_share": None if pack_ms is None else pack_ms / ms,
            "step_ms": step_ms,
            "step_append_ms": step_ms - alone_ms,
            "step_append_share": step_ms / alone_ms - 1,
            "behind_ms": behind_ms,
            "behind_ratio": min(behind.values()) / behind_ms if behind else None,
            "step_behind_ms": step_behind_ms,
            "transform": str(spec.key_transform),
            "transform_ms": None if bare_ms is None else ms - bare_ms,
            "transform_share": None if bare_ms is None else ms / bare_ms - 1,
            "bytes": nbytes,
            "bandwidth": bandwidth,
            "peers_ms": times,
            "dtype": str(dtype).removeprefix("torch."),
            "head_dim": head_dim,
            "query_length": query_length,
        }
        | ({"per_head": per_head} if spec.parameters(head_dim, head_dim, shape.kv_heads) else {})
    )


def time_append(case: Case, backend: str, graph: bool, device: torch.device, rounds: int) -> tuple[float, float | None]:
    """Milliseconds to store one token in every row, averaged over as many steps as a page has tokens; and what of them packing
    costs, or `None` where tokens go straight into pages."""
    counters = case.state.length.clone(), case.state.paged.clone()
    steps = [lambda token=token: case.append(token, backend) for token in range(case.spec.page_size)]
    candidates = [Candidate("all", steps, graph, before=lambda: rewind(case, counters))]
    if not case.spec.direct:
        packed = case.state.paged.clone()
        for step in steps:  # up to the first that packs; as many as a page has tokens, less one, pack nothing then
            step()
            if not torch.equal(case.state.paged, packed):
                break
        behind = case.state.length.clone(), case.state.paged.clone()
        candidates.append(Candidate("quiet", steps[1:], graph, before=lambda: rewind(case, behind)))
    found = time_interleaved(candidates, device, rounds)
    return found["all"], None if case.spec.direct else found["all"] - found["quiet"]


def time_step(
    cases: list[Case], backend: str, graph: bool, device: torch.device, rounds: int
) -> tuple[float, float, float]:
    """Milliseconds of a decode step that stores its token, averaged over as many as a page has tokens; of their attention
    alone; and of the step behind another kernel."""
    along = cases[0].counters_along()
    steps = [lambda case=case, token=token: case.step(token, backend) for token in range(len(along)) for case in cases]
    alone = [
        lambda case=case, token=token, at=at: case.attend_at(token, at, backend)
        for token, at in enumerate(along)
        for case in cases
    ]

    def before():
        for case in cases:
            rewind(case, along[0])

    candidates = [Candidate("step", steps, graph, before), Candidate("alone", alone, graph, before)]
    first = Candidate("step", steps[:: len(cases)], graph, before)
    found, behind = time_interleaved(candidates, device, rounds), time_behind([first], device, rounds)
    before()
    return found["step"], found["alone"], behind["step"]


def measure_low_bit(
    shape: Shape, inputs: Inputs, peers: dict[str, Any], rounds: int = 5
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Records of other low-bit caches on this shape, and why the others do not run. Neither their bytes nor what they should
    answer is known here: a relative error above 1 against float32 attention over what was given in counts as wrong."""
    calls, reasons = usable_peers(inputs, 1.0, LOW_BIT_PEERS)
    if not calls:
        return [], reasons
    device = inputs.q.device
    candidates = [Candidate(name, [call]) for name, call in peers.items()]
    candidates += [Candidate(name, [call], graph=False) for name, call in calls.items()]
    times = time_interleaved(candidates, device, rounds)
    peers_ms = {name: times[name] for name in peers}
    peer = min(peers_ms, key=peers_ms.__getitem__) if peers else None
    common = {
        "shape": shape.name,
        "peer": peer,
        "peer_ms": peers_ms[peer] if peer else None,
        "peers_ms": peers_ms,
        "dtype": str(inputs.q.dtype).removeprefix("torch."),
        "head_dim": inputs.q.shape[-1],
        "query_length": inputs.q.shape[2],
    }
    return [
        common
        | {
            "preset": name,
            "backend": "other",
            "ms": times[name],
            "ratio": peers_ms[peer] / times[name] if peer else None,
        }
        for name in calls
    ], reasons


def runs(
    shapes: list[str], presets: list[str], backends: list[str | None], low_bit: bool = False, **options
) -> Iterator[tuple[Any, ...]]:
    """`(what, record, None)` of each measurement, or `(what, None, fault)`. Peers are set up once a shape.

    backends: None is the default for device, dtype and formats."""
    dtype, device = options["dtype"], options["device"]
    bandwidth = read_bandwidth(device)
    console.print(f"{device_name(device)}: {bandwidth / 1e12:.3g} TB/s")
    for shape in (Shape.parse(name) for name in shapes):
        inputs = Inputs.random(*shape[1:], options["head_dim"], options["query_length"], dtype, device)
        peers, reasons = usable_peers(inputs)
        for name, reason in reasons.items():
            console.print(f"{shape.name}: no {name}: {reason}", markup=False)
        if low_bit:
            others, reasons = measure_low_bit(shape, inputs, peers)
            for name, reason in reasons.items():
                console.print(f"{shape.name}: no {name}: {reason}", markup=False)
            for other in others:
                yield f"{shape.name} {other['preset']}", other, None
        for preset in presets:
            for asked in backends:
                backend = choose_backend(asked, device, options["dtype"], get_preset(preset).spec())
                what = f"{shape.name} {preset} {backend}"
                record = fault = None
                try:
                    record = measure(shape, preset, backend, peers, bandwidth, **options)
                except WrongResultError as error:
                    fault = str(error)
                except Exception as error:  # what fails here must not cost the measurements that follow
                    traceback.print_exc()
                    fault = f"{type(error).__name__}: {error}"
                yield what, record, fault  # outside the handlers: an exception would keep the case's gigabytes alive
                gc.collect()
        del inputs, peers


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Name, or BATCHxHEADSxKVHEADSxTOKENS; repeatable.")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Preset; repeatable.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="torch, triton, cuda; repeatable [default: by device].")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32.")] = "float16",
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    query_length: Annotated[int, typer.Option(help="Query tokens.")] = 1,
    rounds: Annotated[int, typer.Option(help="Samples of which the median is taken.")] = 20,
    per_head: Annotated[
        bool | None,
        typer.Option(
            "--per-head/--per-layer", help="Whose calibrated parameters are [default: as `calibrate` makes them]."
        ),
    ] = None,
    low_bit: Annotated[bool, typer.Option(help="Time other low-bit caches too, where they are installed.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/decode-<device>.jsonl].")] = None,
) -> None:
    """Check and time packed decode attention, and append a JSON line for each measurement."""
    torch.manual_seed(torch.seed())  # fresh data every time
    where = torch.device(device)
    shapes, presets = shape or list(SHAPES), preset or list(PRESETS)
    asked: list[str | None] = [*backend] if backend else [None]
    for name in presets:
        get_preset(name)
    for kind in asked:
        choose_backend(kind, where)  # raises for what does not exist
    out = out or results_path("decode", device_name(where))
    records: list[dict[str, Any]] = []
    wrong: list[str] = []
    options = {"head_dim": head_dim, "query_length": query_length, "rounds": rounds, "per_head": per_head}
    found = runs(shapes, presets, asked, low_bit, dtype=getattr(torch, dtype), device=where, **options)
    total = len(shapes) * len(presets) * len(asked)
    for what, record, fault in track(found, "measuring", total=total, console=console, transient=True):
        if fault:
            wrong.append(f"{what}: {fault}")
            continue
        record |= {"gpu": device_name(where)} | provenance(commit)
        records.append(record)
        append_record(out, record)
    console.print(table(records))
    for fault in wrong:
        console.print(f"FAILED, not recorded: {fault}", markup=False)
    if wrong:
        raise typer.Exit(1)


def table(records: list[dict[str, Any]]) -> Table:
    """The records in short."""
    out = Table(
        "shape",
        "preset",
        "backend",
        "ms",
        "peer",
        "ratio",
        "limit",
        "TB/s",
        "relerr",
        "behind",
        "step behind",
        "append",
        "pack",
        "in step",
        "transform",
    )
    for r in records:
        if r["backend"] == "other":
            ratio = f"{r['ratio']:.3f}" if r["peer"] else "-"
            out.add_row(r["shape"], r["preset"], "-", f"{r['ms']:.4f}", r["peer"] or "-", ratio)
            continue
        against = (r["peer"], f"{r['ratio']:.2f}", f"{r['byte_limit_ratio']:.2f}") if r["peer"] else ("-", "-", "-")
        speed = f"{r['bytes'] / r['ms'] / 1e9:.2f}"
        names = (r["shape"], r["preset"], r["backend"], f"{r['ms']:.4f}")
        behind = (f"{r['behind_ms']:.4f}", f"{r['step_behind_ms']:.4f}")
        shares = ("append_share", "pack_share", "step_append_share", "transform_share")
        parts = ("-" if r[name] is None else f"{r[name]:.1%}" for name in shares)
        out.add_row(*names, *against, speed, f"{r['relerr']:.1e}", *behind, *parts)
    return out


if __name__ == "__main__":
    run_command(main)
