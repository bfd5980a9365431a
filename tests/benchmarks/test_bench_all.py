"""`bench_all`: what its plan names exists, and how it chooses, budgets and fails. Nothing here needs a GPU."""

from __future__ import annotations

import importlib
import json
import signal

import pytest
import typer
from click.testing import CliRunner

from hf_lowbit_kv.eval.benchmarks import bench_all
from hf_lowbit_kv.eval.benchmarks.bench_all import Outcome, chosen, run_plan, why_skipped
from hf_lowbit_kv.eval.benchmarks.bench_generate import Wanted
from hf_lowbit_kv.eval.benchmarks.bench_plan import PACKAGES, PLAN, Entry
from hf_lowbit_kv.eval.benchmarks.decode_shapes import Shape
from hf_lowbit_kv.presets import get_preset


def command_of(main):
    app = typer.Typer(add_completion=False)
    app.command()(main)
    return typer.main.get_command(app)


@pytest.mark.parametrize("entry", PLAN, ids=lambda entry: entry.name)
def test_every_command_of_the_plan_is_understood(entry):
    script = importlib.import_module(entry.module)
    more = ["--rounds", "1", "--out", "x.jsonl"] if entry.warms else []
    arguments = [*entry.arguments.split(), *more, "--commit", "abc"]  # `run_plan` may add the last two
    given = command_of(script.main).make_context(entry.script, arguments).params
    presets = given.get("preset") or ()
    for preset in [presets] if isinstance(presets, str) else presets:
        get_preset(preset)
    for contender in given.get("contender") or ():
        Wanted.parse(contender)
    if entry.script == "bench_decode":
        assert given["shape"] or given["cells"]
        for shape in given["shape"] or ():
            Shape.parse(shape)
    assert entry.why
    assert set(entry.needs) <= PACKAGES.keys()


def test_names_are_unique():
    names = [entry.name for entry in PLAN]
    assert len(set(names)) == len(names)


def test_choice():
    assert chosen(PLAN, None) == list(PLAN)
    assert {entry.script for entry in chosen(PLAN, "start, mla")} == {"bench_start", "bench_mla"}
    assert [entry.name for entry in chosen(PLAN, "weights,decode-own")] == ["decode-own", "weights"]  # the plan's order
    with pytest.raises(ValueError, match=r"only='decoding' is not known; allowed: decode, .*, generate-1M"):
        chosen(PLAN, "decode,decoding")


def test_what_cannot_run_is_skipped(monkeypatch):
    entry = Entry("x", "bench_x", "", 5, "docs", memory=80, needs=("torchao",))
    monkeypatch.setattr(bench_all.importlib.util, "find_spec", lambda name: None)
    assert why_skipped(entry, 140, None) == "not installed: torchao, for 4-bit weights: pip install torchao"
    monkeypatch.setattr(bench_all.importlib.util, "find_spec", lambda name: object())
    assert why_skipped(entry, 24, None) == "needs 80 GB of GPU memory, and there are 24"
    assert why_skipped(entry, 140, 4.9) == "5 minutes are expected, and 4.9 of --minutes are left"
    assert why_skipped(entry, 140, 5.0) is None
    assert why_skipped(entry, 140, None) is None


WRITER = """
import sys, time
from pathlib import Path
print("said", *sys.argv[1:])
open({records!r}, "a").write("{{}}\\n" * {count})
time.sleep({sleep})
sys.exit({status})
"""


def scripted(tmp_path, monkeypatch, **scripts):
    """Entries whose commands are small scripts: name -> (records, seconds, status)."""
    entries = []
    for name, (count, sleep, status) in scripts.items():
        file = tmp_path / f"{name}.py"
        records = str(tmp_path / "results" / "decode-x.jsonl")
        file.write_text(WRITER.format(records=records, count=count, sleep=sleep, status=status))
        entries.append(Entry(name, name, "", 0.05, "docs", memory=1))
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(Entry, "command", property(lambda self: [str(tmp_path / f"{self.name}.py")]))
    return entries


def test_outcomes(tmp_path, monkeypatch):
    entries = scripted(tmp_path, monkeypatch, good=(2, 0, 0), bad=(1, 0, 3), more=(1, 0, 0))
    found = run_plan(entries, tmp_path, memory=10, commit="abc", results=tmp_path / "results")
    assert [(x.status, x.records, x.failed) for x in found] == [(0, 2, False), (3, 1, True), (0, 1, False)]
    assert (tmp_path / "good.log").read_text().splitlines()[1:] == ["said --commit abc"]
    assert bench_all.table(found).row_count == 3


def test_a_budget_stops_what_runs_and_skips_what_comes(tmp_path, monkeypatch):
    entries = scripted(tmp_path, monkeypatch, slow=(1, 60, 0), later=(1, 0, 0))
    slow, later = run_plan(entries, tmp_path, memory=10, minutes=0.06, results=tmp_path / "results")
    assert slow.failed
    assert slow.note == "stopped: --minutes are over"
    assert (later.status, later.failed) == (None, False)
    assert "0.05 minutes are expected" in later.note


MEETS = """
import sys, time
from pathlib import Path
print("said", *sys.argv[1:])
Path({own!r}).touch()
end = time.monotonic() + 60
while not Path({other!r}).exists():
    if time.monotonic() > end:
        sys.exit("the other one did not begin")
    time.sleep(0.01)
Path({met!r}).touch()
sys.exit({status})
"""


def test_kernels_are_compiled_beforehand_side_by_side(tmp_path, monkeypatch):
    """Each of two scripts ends well if the other begins meanwhile."""
    entries = scripted(tmp_path, monkeypatch, a=(0, 0, 0), b=(0, 0, 0))
    for name, other, status in (("a", "b", 0), ("b", "a", 1)):
        own, other, met = (str(tmp_path / file) for file in (f"{name}.begun", f"{other}.begun", f"{name}.met"))
        (tmp_path / f"{name}.py").write_text(MEETS.format(own=own, other=other, met=met, status=status))
    bench_all.compile_ahead(entries, 2, tmp_path)
    assert {path.name for path in tmp_path.glob("*.met")} == {"a.met", "b.met"}
    assert "said --rounds 1 --out" in (tmp_path / "b.compile.log").read_text()


def test_what_compiles_too_long_is_stopped(tmp_path, monkeypatch):
    started, start = [], bench_all._start

    def noted(*args):
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(bench_all, "_start", noted)
    bench_all.compile_ahead(scripted(tmp_path, monkeypatch, slow=(0, 60, 0)), 2, tmp_path, timeout=0.5)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(bench_all.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_all.torch.cuda, "mem_get_info", lambda: (0, 80e9))


@pytest.mark.parametrize(("status", "expected"), [(None, 0), (0, 0), (1, 1), (-9, 1)])
def test_exit_status(status, expected, gpu, monkeypatch, tmp_path):
    """Skipped is not failed; killed is."""
    entry = PLAN[0]
    monkeypatch.setattr(bench_all, "run_plan", lambda *args: [Outcome(entry, 1.0, status)])
    arguments = ["--only", entry.name, "--jobs", "0", "--logs", str(tmp_path / "logs")]
    assert CliRunner().invoke(command_of(bench_all.main), arguments).exit_code == expected


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(bench_all.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(command_of(bench_all.main), [])
    assert done.exit_code == 2
    assert "a GPU is needed" in done.output
    listed = CliRunner().invoke(command_of(bench_all.main), ["--list"])
    assert listed.exit_code == 0


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("vecinfer-2", {"reading", "fitting"}),
        ("eigen-2", {"reading", "gradients", "fitting"}),
    ],
)
@pytest.mark.filterwarnings("ignore:tokens are not weighted:UserWarning")  # windows are short here
def test_calibration_is_timed(preset, parts, tmp_path):
    from hf_lowbit_kv.eval.benchmarks import bench_calibrate

    out = tmp_path / "out.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--samples", "16", "--length", "256", "--preset", preset]
    arguments += ["--commit", "abc", "--out", str(out)]
    done = CliRunner().invoke(command_of(bench_calibrate.main), arguments)
    assert done.exit_code == 0, done.output
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["preset"] == preset
    assert (record["samples"], record["length"], record["commit"]) == (16, 256, "abc")
    assert record["parts"].keys() == parts
    assert 0 < sum(record["parts"].values()) <= record["seconds"]
