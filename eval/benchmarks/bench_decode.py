"""Decode attention over packed history against 16-bit attention: `python -m hf_lowbit_kv.eval.benchmarks.bench_decode`.

Presets are checked before they are timed. If a preset's output or packed bytes are wrong, this is reported and the
preset is not timed. Peers and packed steps are timed in the same rounds. Use their ratio: absolute times drift between
machines and days.

- `ms`: attention of one step over all stored tokens, including the transform of its queries and keys. `transform_ms`:
  the part for the transform (`ms` less the same step without the transform, timed in the same rounds).
- `append_ms`: storing one token in every row, without attention but with packing, as a mean over the steps that fill a
  page. `pack_ms`: the part for packing (`append_ms` less steps that pack nothing, timed in the same rounds).
- `step_ms`: a decode step as in a model, attention and storing, as a mean over the same steps. `step_append_ms`: the
  part for storing. It is `step_ms` less the attention of the same steps over the tokens stored then, timed in the
  same rounds.
- `behind_ms`, `step_behind_ms`: `ms` and `step_ms` when another kernel runs before each call, as in a model
  (`time_behind`). Then neither data nor instructions are in a cache of the GPU.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import track
from rich.table import Table

from hf_lowbit_kv.backends.operations import Served, choose_backend, storage_spec
from hf_lowbit_kv.eval.benchmarks.decode_cell import WrongResultError, build_sets, measure
from hf_lowbit_kv.eval.benchmarks.decode_shapes import USUAL, Shape, matrix
from hf_lowbit_kv.eval.benchmarks.kernels_ahead import Compilers, tiny
from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree
from hf_lowbit_kv.eval.benchmarks.peers import LOW_BIT_PEERS, PEERS, Inputs, usable_peers
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, read_bandwidth, sets_needed, time_interleaved
from hf_lowbit_kv.eval.provenance import (
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.presets import get_preset

PRESETS = (
    "dense",
    "int8",
    "int6",
    "int5",
    "fp8",
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


#: a peer is left out if it takes more than this many times as long as the fastest peer
SLOW_PEER = 1.5


class Cell(NamedTuple):
    """A measurement. backend: `None` is the default for device, dtype and formats."""

    shape: str
    preset: str
    backend: str | None = None


def measure_low_bit(
    shape: Shape, inputs: Inputs, peers: dict[str, Any], rounds: int = 5
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Records of other low-bit caches on this shape, and the reasons why some do not run. Their bytes and exact outputs
    are not known here. A relative error above 1, compared with float32 attention over the original inputs, counts as
    wrong."""
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
        console.print(f"{shape.name}: no {name}: {reason}", markup=False)
    return candidates


def print_low_bit(shape: Shape, options: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Like `runs`, for other low-bit caches."""
    inputs = Inputs.random(
        *shape[1:5], options["head_dim"], options["query_length"], options["dtype"], options["device"]
    )
    others, reasons = measure_low_bit(shape, inputs, usable_peers(inputs)[0])
    for name, reason in reasons.items():
        console.print(f"{shape.name}: no {name}: {reason}", markup=False)
    for other in others:
        yield f"{shape.name} {other['preset']}", other, None


def runs(
    cells: Sequence[Cell], low_bit: bool = False, compilers: Compilers | None = None, **options
) -> Iterator[tuple[Any, ...]]:
    """`(title, record, None)` of each measurement, or `(title, None, fault)`. Peers are set up once for each shape, so
    cells of one shape should follow each other. options: arguments of `measure`."""
    dtype, device = options["dtype"], options["device"]
    bandwidth = read_bandwidth(device)
    console.print(f"{device_name(device)}: {bandwidth / 1e12:.3g} TB/s")
    resolved = [
        cell._replace(
            backend=choose_backend(
                cell.backend,
                Served(
                    device, dtype, get_preset(cell.preset).spec(), Shape.parse(cell.shape).widths(options["head_dim"])
                ),
            )
        )
        for cell in cells
    ]
    begun: dict[Cell, list] = {}
    for cell in resolved if compilers else ():
        if cell.backend == "cuda":
            assert compilers is not None
            sizes = options["head_dim"], options["query_length"], dtype, device, options.get("per_head")
            # another tree may not know a format; then the measurement of the cell reports it
            with suppress(Exception):
                begun[cell] = compilers.begin(
                    partial(tiny, Shape.parse(cell.shape), cell.preset, "cuda", *sizes), "cuda", device
                )
    peers: dict[str, Any] = {}
    last = None
    for cell in resolved:
        shape = Shape.parse(cell.shape)
        if shape != last:
            peers.clear()
            gc.collect()
            head_dim = shape.head_dim or options["head_dim"]
            peers |= fast_peers(shape, str(cell.backend), head_dim, options["query_length"], dtype, device)
            if low_bit:
                yield from print_low_bit(shape, options)
            last = shape
        title = f"{shape.name} {cell.preset} {cell.backend}"
        record = fault = None
        Compilers.wait(begun.get(cell, ()))
        try:
            record = measure(shape, cell.preset, cell.backend, peers, bandwidth, **options)
        except WrongResultError as error:
            fault = str(error)
        except Exception as error:  # a failure here must not stop the measurements that follow
            traceback.print_exc()
            fault = f"{type(error).__name__}: {error}"
        yield title, record, fault  # outside the handlers: an exception would keep the case's gigabytes alive
        gc.collect()


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Name, or BATCHxHEADSxKVHEADSxTOKENS; repeatable.")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Preset; repeatable.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="torch, triton, cuda; repeatable [default: by device].")
    ] = None,
    cells: Annotated[
        bool, typer.Option("--matrix", help="Eight presets on six shapes, two presets on all others; not with --shape.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32.")] = "float16",
    head_dim: Annotated[int, typer.Option(help="Head size, where the shape does not say.")] = 128,
    query_length: Annotated[int, typer.Option(help="Query tokens.")] = 1,
    rounds: Annotated[int, typer.Option(help="Samples of which the median is taken.")] = 20,
    per_head: Annotated[
        bool | None,
        typer.Option(
            "--per-head/--per-layer", help="Whose calibrated parameters are [default: as `calibrate` makes them]."
        ),
    ] = None,
    low_bit: Annotated[bool, typer.Option(help="Time other low-bit caches too, where they are installed.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Commit, or folder with another state of the packages: timed beside this one.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile beforehand [default: one a core on a GPU].")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines [default: eval/results/decode-<device>.jsonl].")] = None,
) -> None:
    """Check and time packed decode attention, and append a JSON line for each measurement."""
    torch.manual_seed(torch.seed())  # fresh data every time
    where = torch.device(device)
    if cells and (shape or backend):
        raise typer.BadParameter("it has shapes of its own, and each preset's default backend", param_hint="--matrix")
    for kind in backend or ():
        choose_backend(kind, Served(where))  # raises if the backend does not exist
    for name in preset or ():
        get_preset(name)
    if cells:
        wanted = [Cell(*cell) for cell in matrix() if preset is None or cell[1] in preset]
    else:
        shapes, presets = shape or [each.name for each in USUAL], preset or list(PRESETS)
        wanted = [Cell(*cell) for cell in itertools.product(shapes, presets, [*backend] if backend else [None])]
    for cell in wanted:
        Shape.parse(cell.shape)
    other = None if against is None else OtherTree(against)
    jobs = (os.cpu_count() or 1 if where.type == "cuda" else 0) if jobs is None else jobs
    out = out or results_path("decode", device_name(where))
    records: list[dict[str, Any]] = []
    wrong: list[str] = []
    with ExitStack() as stack:
        compilers = Compilers(jobs, other) if jobs and where.type == "cuda" else None
        if compilers is not None:
            stack.callback(compilers.close)
        measured = runs(
            wanted,
            low_bit,
            compilers,
            dtype=getattr(torch, dtype),
            device=where,
            head_dim=head_dim,
            query_length=query_length,
            rounds=rounds,
            per_head=per_head,
            against=other,
        )
        for title, record, fault in track(measured, "measuring", total=len(wanted), console=console, transient=True):
            if fault:
                wrong.append(f"{title}: {fault}")
                continue
            record |= {"gpu": device_name(where)} | provenance(commit)
            records.append(record)
            append_record(out, record)
    console.print(table(records))
    if other is not None:
        console.print(comparison(records))
    for fault in wrong:
        console.print(f"FAILED, not recorded: {fault}", markup=False)
    if wrong:
        raise typer.Exit(1)


def table(records: list[dict[str, Any]]) -> Table:
    """A short table of the records."""
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
        "step",
        "behind",
        "step behind",
        "ratio",
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
        behind = tuple(f"{r[name]:.4f}" for name in ("step_ms", "behind_ms", "step_behind_ms"))
        behind += (f"{r['step_behind_ratio']:.2f}" if r["peer"] else "-",)
        shares = ("append_share", "pack_share", "step_append_share", "transform_share")
        parts = ("-" if r[name] is None else f"{r[name]:.1%}" for name in shares)
        out.add_row(*names, *against, speed, f"{r['relerr']:.1e}", *behind, *parts)
    return out


def comparison(records: list[dict[str, Any]]) -> Table:
    """The other tree's milliseconds, ours, and how much less ours are: for attention and steps, alone and behind a
    kernel."""
    kinds = "ms", "behind_ms", "step_ms", "step_behind_ms"
    out = Table("shape", "preset", *(name.removesuffix("_ms").replace("_", " ") for name in kinds))
    for r in (r for r in records if "against" in r):
        pairs = ((r[f"against_{kind}"], r[kind]) for kind in kinds)
        out.add_row(r["shape"], r["preset"], *(f"{old:.4f} {new:.4f} {new / old - 1:+.1%}" for old, new in pairs))
    return out


if __name__ == "__main__":
    run_command(main)
