"""What empty rows cost the decode kernel: `python -m hf_lowbit_kv.eval.benchmarks.bench_empty_rows`.

The decode kernel counts what a row costs by itself, beside its bytes (`ROW_COST` in `plan.cuh`, `12 * UNIT_COST`).
Otherwise one team would get most of the empty rows behind the rows of a pool. Here this factor is replaced in copies of
the package. The kernels of all copies are checked, then timed in the same process, on the same layers and in the same
rounds.

- `us`: attention of one layer, by factor. Another kernel runs before each call, as in a model (`time_behind`).
- `relerr`: the largest relative error of all factors, compared with float32 attention over the same packed bytes.
- `rows`, `empty`: rows with tokens, and rows without.

If an output is wrong, or a step does not store what it should, this is reported and the batch is not timed.
"""

from __future__ import annotations

import gc
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.backends.operations import storage_spec
from hf_lowbit_kv.eval.benchmarks.decode_cell import WrongResultError
from hf_lowbit_kv.eval.benchmarks.decode_shapes import SHAPES, Shape
from hf_lowbit_kv.eval.benchmarks.kernels_ahead import wanted_by
from hf_lowbit_kv.eval.benchmarks.other_tree import FOLDERS, OtherTree
from hf_lowbit_kv.eval.benchmarks.packed_layer import PackedCase, attend_error, build, rewind
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, time_behind
from hf_lowbit_kv.eval.provenance import (
    RESULTS,
    append_record,
    device_name,
    provenance,
    results_path,
    run_command,
    wide_console,
)
from hf_lowbit_kv.presets import get_preset

FACTORS = (0, 6, 12)
FACTOR = re.compile(r"(ROW_COST = )\d+( \* UNIT_COST)")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
#: threads that compile
COMPILERS = 16
console = wide_console()


class Batch(NamedTuple):
    """Rows of a decode step."""

    name: str
    preset: str
    lengths: list[int]
    """tokens of each row; rows of 0 take no part"""


def spread(rows: int, mean: int) -> list[int]:
    """Lengths of rows, evenly spread from 0.3 to 1.7 of the mean, in a fixed random order."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    return [round(mean * (0.3 + 1.4 * place / max(rows - 1, 1))) for place in order]


def batches(scale: int = 1) -> list[Batch]:
    """Rows of a pool of 128 slots, and ragged shapes of `bench_decode`. scale: lengths are divided by it."""
    mean = 4700 // scale
    pool = [
        Batch("75 of different lengths, 53 empty", "kivi-4-sink", [*spread(75, mean), *[0] * 53]),
        Batch("75 of different lengths", "kivi-4-sink", spread(75, mean)),
        Batch("75 of one length", "kivi-4-sink", [mean] * 75),
        Batch("9 of different lengths, 119 empty", "kivi-4-sink", [*spread(9, mean), *[0] * 119]),
    ]
    ragged = [SHAPES["ragged_b8_4k_32k"], SHAPES["ragged_b64_512_8k"]]
    return pool + [Batch(shape.name, "kivi-2", [length // scale for length in shape.lengths()]) for shape in ragged]


def fill(batch: Batch, backend: str, dtype: torch.dtype, device: torch.device) -> PackedCase:
    """A layer with these rows. Rows that are shorter than the longest one see only the beginning of their pages."""
    spec = storage_spec(get_preset(batch.preset).spec(), backend)
    longest = max(*batch.lengths, spec.sink + spec.tail_size + 1)
    shape = Shape(batch.name, len(batch.lengths), HEADS, KV_HEADS, longest)
    case = build(shape, spec, HEAD_DIM, 1, dtype, device)
    for row, length in enumerate(batch.lengths):
        case.state.length[row] = length
        case.state.paged[row] = spec.paged_after(length - spec.sink)
    case.mask = torch.tensor(batch.lengths, device=device)[:, None] > 0
    return case


def check(case: PackedCase, backend: str) -> float:
    """The relative error of attention.

    Raises:
        WrongResultError: it is above its bound; or a step with storing has another output, or stores other tokens than
            one in each row that takes part.
    """
    relerr, bound = attend_error(case, backend)
    if not relerr <= bound:  # NaN fails too
        raise WrongResultError(f"relative error {relerr:.2g} is above its bound {bound:.2g}")
    counters = case.state.length.clone(), case.state.paged.clone()
    expected = case.attend_at(0, counters, backend).float()
    error = float((case.step(0, backend).float() - expected).norm() / expected.norm())
    stored = case.state.length - counters[0]
    rewind(case, counters)
    if not error <= 2 * torch.finfo(case.q.dtype).eps:
        raise WrongResultError(f"a step that stores differs from attention alone by {error:.2g}")
    assert case.mask is not None
    if not torch.equal(stored, case.mask.int().expand_as(stored)):
        raise WrongResultError(f"a step stored {stored[:, 0].tolist()} tokens")
    return relerr


@contextmanager
def trees_with(factors: Sequence[int]) -> Iterator[dict[int, OtherTree]]:
    """Copies of this package whose kernels count a row with another factor."""
    root, trees = RESULTS.parents[1], {}
    with tempfile.TemporaryDirectory() as folder:
        for factor in factors:
            copy = Path(folder, str(factor))
            for name in FOLDERS:
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            plan = copy / "triton_kernels" / "cuda" / "plan.cuh"
            text, replaced = FACTOR.subn(rf"\g<1>{factor}\2", plan.read_text())
            if replaced != 1:
                raise RuntimeError(f"plan.cuh has {replaced} lines like 'ROW_COST = 12 * UNIT_COST', not one")
            plan.write_text(text)
            trees[factor] = OtherTree(str(copy))
        yield trees


def compile_all(case: PackedCase, trees: dict[int, OtherTree], device: torch.device) -> None:
    """Compile the kernels of a batch in threads."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        for tree in trees.values():
            compiler = tree.module("triton_kernels.cuda.nvrtc")
            for wanted in wanted_by(case, tree, "cuda"):
                pool.submit(compiler.binary, wanted.file, wanted.defines, compiler._arch(device))


def measure(
    batch: Batch,
    trees: dict[int, OtherTree],
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    """A record without provenance. `rounds=0`: nothing is timed.

    Raises:
        WrongResultError: see `check`.
    """
    case = fill(batch, backend, dtype, device)
    if backend == "cuda":
        compile_all(case, trees, device)
    cases = {factor: case.of(tree) for factor, tree in trees.items()}
    relerr = max(check(each, backend) for each in cases.values())
    record = {
        "batch": batch.name,
        "preset": batch.preset,
        "rows": sum(length > 0 for length in batch.lengths),
        "empty": batch.lengths.count(0),
        "tokens": sum(batch.lengths),
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "relerr": relerr,
    }
    if rounds:
        graph = backend != "torch"
        candidates = [
            Candidate(str(factor), [lambda each=each: each.attend(backend)], graph) for factor, each in cases.items()
        ]
        record["us"] = {factor: 1e3 * ms for factor, ms in time_behind(candidates, device, rounds).items()}
    return record


def main(
    factor: Annotated[
        list[int] | None, typer.Option(min=0, help="Factor of a row's cost; repeatable [default: 0, 6, 12].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Samples of which the median is taken; 0: only checks.")] = 20,
    scale: Annotated[int, typer.Option(min=1, help="Rows are shorter by this factor, for a dry run.")] = 1,
    backend: Annotated[str, typer.Option(help="cuda, or torch for a dry run.")] = "cuda",
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines [default: eval/results/empty-rows-<device>.jsonl].")
    ] = None,
) -> None:
    """Check and time batches with empty rows, and append a JSON line for each."""
    torch.manual_seed(torch.seed())  # fresh data every time
    where, wrong = torch.device(device), []
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    out = out or results_path("empty-rows", device_name(where))
    factors = factor or list(FACTORS)
    shown = Table("batch", "preset", *(f"{each}, us" for each in factors), "relerr")
    with trees_with(factors) as trees:
        for batch in batches(scale):
            try:
                record = measure(batch, trees, backend, dtype, where, rounds)
            except WrongResultError as error:
                wrong.append(f"{batch.name}: {error}")
                continue
            finally:
                gc.collect()
            times = [f"{record['us'][str(each)]:.1f}" if rounds else "" for each in factors]
            shown.add_row(batch.name, batch.preset, *times, f"{record['relerr']:.1g}")
            if rounds:
                append_record(out, record | {"gpu": device_name(where)} | provenance(commit))
    console.print(shown)
    for fault in wrong:
        console.print(f"FAILED, not recorded: {fault}", markup=False)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
