"""All measurements of speed and memory, one after the other: `python -m hf_lowbit_kv.eval.benchmarks.bench_all`
(`make bench`).

`bench_plan.PLAN` lists the measurements, the most important first. Each measurement runs in its own process, alone on
the GPU, and appends its records to `eval/results/`. Before the first one, kernels are compiled in parallel, for
measurements that have a short run. Measurements that cannot run here are skipped, and the table at the end says why.
The exit status is 1 if any failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.eval.benchmarks.bench_plan import PACKAGES, PLAN, Entry
from hf_lowbit_kv.eval.provenance import RESULTS, run_command, wide_console

#: lines of the log that are shown if a benchmark failed
LOG_LINES = 15
#: most processes that compile at the same time, because each holds a benchmark's tensors on the GPU
MOST_JOBS = 8
console = wide_console()


@dataclass(frozen=True)
class Outcome:
    """Result of a measurement. `status` is that of the process, or `None` if it did not run; then `note` says why."""

    entry: Entry
    seconds: float = 0.0
    status: int | None = None
    records: int = 0
    note: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.status)


def chosen(plan: Sequence[Entry], only: str | None) -> list[Entry]:
    """Entries of the plan, in its order, whose name or kind is in `only` (separated by commas). `None` means all
    entries.

    Raises:
        ValueError: no entry has such a name or kind.
    """
    if only is None:
        return list(plan)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    allowed = dict.fromkeys([entry.kind for entry in plan] + [entry.name for entry in plan])
    if unknown := [name for name in wanted if name not in allowed]:
        raise ValueError(f"only={unknown[0]!r} is not known; allowed: {', '.join(allowed)}")
    return [entry for entry in plan if {entry.name, entry.kind} & set(wanted)]


def why_skipped(entry: Entry, memory: float, minutes_left: float | None) -> str | None:
    """The reason why a measurement cannot run, or `None`. memory: GB of the GPU. minutes_left: `None` if there is no
    limit."""
    if missing := [name for name in entry.needs if importlib.util.find_spec(name) is None]:
        return f"not installed: {PACKAGES[missing[0]]}"
    if memory < entry.memory:
        return f"needs {entry.memory} GB of GPU memory, and there are {memory:.0f}"
    if minutes_left is not None and entry.minutes > minutes_left:
        return f"{entry.minutes:g} minutes are expected, and {max(minutes_left, 0):.1f} of --minutes are left"
    return None


def count_records(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.jsonl"))


def _start(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Start a process as the leader of a new process group. Its output goes to `log`."""
    with log.open("w", encoding="utf-8") as file:
        print("$", *command, file=file, flush=True)
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _stop(process: subprocess.Popen) -> int:
    """End a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def run_logged(command: Sequence[str], log: Path, timeout: float | None) -> tuple[int, str]:
    """Exit status of a process, and a note if it was stopped. After a timeout (seconds) or Ctrl-C, all processes that
    it started are ended too."""
    process = _start(command, log)
    try:
        return process.wait(timeout), ""
    except subprocess.TimeoutExpired:
        return _stop(process), "stopped: --minutes are over"
    except BaseException:
        _stop(process)
        raise


def compile_ahead(entries: Sequence[Entry], jobs: int, logs: Path, timeout: float | None = None) -> float:
    """Compile the kernels of these measurements, `jobs` measurements at a time. Returns the seconds that this took.
    Records of these runs are thrown away. Errors are ignored here, because the measurement itself will show them."""
    begin, waiting, running = time.perf_counter(), list(entries), list[subprocess.Popen]()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while (waiting or running) and (timeout is None or time.perf_counter() - begin < timeout):
                running = [process for process in running if process.poll() is None]
                while waiting and len(running) < jobs:
                    entry = waiting.pop(0)
                    more = "--rounds", "1", "--out", f"{scratch}/{entry.name}.jsonl"
                    running.append(_start([sys.executable, *entry.command, *more], logs / f"{entry.name}.compile.log"))
                time.sleep(0.1)
        finally:
            for process in running:
                _stop(process)
    return time.perf_counter() - begin


def run_plan(
    entries: Sequence[Entry],
    logs: Path,
    memory: float,
    minutes: float | None = None,
    commit: str | None = None,
    began: float | None = None,
    results: Path = RESULTS,
) -> list[Outcome]:
    """Run measurements in their order.

    Args:
        memory: GB of the GPU.
        minutes: limit for all measurements, counted from `began` (`time.perf_counter`).
        commit: the commit to record.
        results: the folder whose records are counted.
    """
    began = time.perf_counter() if began is None else began
    outcomes = []
    for number, entry in enumerate(entries, 1):
        begin = time.perf_counter()
        left = None if minutes is None else minutes - (begin - began) / 60
        if (reason := why_skipped(entry, memory, left)) is not None:
            console.print(f"[{number}/{len(entries)}] {entry.name}: skipped, {reason}", markup=False)
            outcomes.append(Outcome(entry, note=reason))
            continue
        console.print(f"[{number}/{len(entries)}] {entry.name}: {entry.minutes:g} minutes expected", markup=False)
        before, log = count_records(results), logs / f"{entry.name}.log"
        command = [sys.executable, *entry.command, *(["--commit", commit] if commit else [])]
        status, note = run_logged(command, log, None if left is None else left * 60)
        seconds, added = time.perf_counter() - begin, count_records(results) - before
        outcomes.append(Outcome(entry, seconds, status, added, note))
        if status:
            console.print(f"{entry.name} failed with status {status} {note}; the end of {log}:", markup=False)
            console.print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]), markup=False)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """A table with one row for each measurement."""
    out = Table("measurement", "seconds", "exit status", "records added", "note")
    for each in outcomes:
        ran = each.status is not None
        numbers = (f"{each.seconds:.0f}", str(each.status), str(each.records)) if ran else ("-", "skipped", "0")
        out.add_row(each.entry.name, *numbers, each.note or each.entry.why)
    return out


def show(entries: Sequence[Entry]) -> None:
    """Print the plan."""
    out = Table("measurement", "kind", "minutes", "GB", "for", "command", title="python -m ...")
    for entry in entries:
        size = f"{entry.minutes:g}", str(entry.memory)
        out.add_row(entry.name, entry.kind, *size, entry.why, f"{entry.module} {entry.arguments}")
    console.print(out)


def main(
    minutes: Annotated[float | None, typer.Option(help="Start nothing that would take longer; stop then.")] = None,
    only: Annotated[str | None, typer.Option(help="Names or kinds, separated by commas; see --list.")] = None,
    list_plan: Annotated[bool, typer.Option("--list", help="Only show what would be run.")] = False,
    logs: Annotated[Path, typer.Option(help="Folder for the output of each.")] = Path("bench-logs"),
    jobs: Annotated[int | None, typer.Option(min=0, help="Processes that compile beforehand [half the cores].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
) -> None:
    """Run the benchmarks behind README and docs."""
    try:
        entries = chosen(PLAN, only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if list_plan:
        show(entries)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("a GPU is needed, and PyTorch finds none; --list shows what would be run")
    began, memory = time.perf_counter(), torch.cuda.mem_get_info()[1] / 1e9
    logs.mkdir(parents=True, exist_ok=True)
    jobs = min(MOST_JOBS, (os.cpu_count() or 2) // 2) if jobs is None else jobs
    warm = [entry for entry in entries if entry.warms and why_skipped(entry, memory, minutes) is None]
    if jobs and warm:
        jobs = max(min(jobs, int(memory) // max(entry.memory for entry in warm)), 1)
        console.print(f"compiling the kernels of {len(warm)} measurements, {jobs} at a time")
        seconds = compile_ahead(warm, jobs, logs, None if minutes is None else minutes * 60)
        console.print(f"compiled in {seconds:.0f} s")
    outcomes = run_plan(entries, logs, memory, minutes, commit, began)
    console.print(table(outcomes))
    if any(each.failed for each in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
