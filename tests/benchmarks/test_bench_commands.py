"""`bench.sh`: scripts understand its commands, and a measurement that fails does not stop the others. No GPU is needed."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from bench_runs import records_of

from hf_lowbit_kv.eval import benchmarks
from hf_lowbit_kv.eval.benchmarks import bench_calibrate
from hf_lowbit_kv.eval.benchmarks.contenders import Wanted
from hf_lowbit_kv.eval.benchmarks.packed_layer import Shape
from hf_lowbit_kv.presets import get_preset

FOLDER = Path(benchmarks.__file__).parent


def run_script(folder, interpreter: str):
    """`bench.sh`, with the lines of a shell script as its Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(["sh", FOLDER / "bench.sh"], env=environment, capture_output=True, text=True, check=False)


def test_every_command_is_understood(tmp_path, monkeypatch):
    done = run_script(tmp_path, 'echo "RUN $@"')
    assert done.returncode == 0, done.stderr
    commands = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("RUN -m ")]
    assert len(commands) > 20
    understood = []
    monkeypatch.setattr(typer.core.TyperCommand, "invoke", lambda self, context: understood.append(context.params))
    for module, *arguments in commands:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(FOLDER / f"{module.rpartition('.')[2]}.py"), run_name="__main__")
        assert not stop.value.code, f"{module} does not understand {arguments}"
    assert len(understood) == len(commands)
    for options in understood:
        presets = options.get("preset") or ()
        for preset in [presets] if isinstance(presets, str) else presets:
            get_preset(preset)
        for contender in options.get("contender") or ():
            Wanted.parse(contender)
        for shape in options.get("shape") or () if "matrix" in options else ():
            Shape.parse(shape)


def test_a_failure_is_shown_and_the_others_run(tmp_path):
    done = run_script(tmp_path, 'echo "RUN $@"; case "$2" in *bench_start) exit 3;; esac')
    assert done.returncode == 3
    assert done.stdout.count("FAILED with status 3: bench_start") == 2
    assert "RUN -m hf_lowbit_kv.eval.benchmarks.bench_memory batch" in done.stdout


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("vecinfer-2", {"reading", "fitting"}),
        ("eigen-2", {"reading", "gradients", "fitting"}),
    ],
)
@pytest.mark.filterwarnings("ignore:tokens are not weighted:UserWarning")  # windows are short here
def test_calibration_is_timed(preset, parts, tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--samples", 16, "--length", 256, "--preset", preset, "--commit", "abc"]
    (record,) = records_of(bench_calibrate.main, tmp_path / "out.jsonl", *arguments)
    assert record["preset"] == preset
    assert (record["samples"], record["length"], record["commit"]) == (16, 256, "abc")
    assert record["parts"].keys() == parts
    assert 0 < sum(record["parts"].values()) <= record["seconds"]
