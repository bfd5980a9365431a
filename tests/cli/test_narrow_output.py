"""What commands print where standard output is narrow, a pipe, or ASCII."""

import io
import json
import os
import subprocess
import sys

import pytest

from hf_lowbit_kv.cli.shared_options import print_json, print_table


@pytest.mark.parametrize("columns", [None, "40"])
def test_tables_are_not_cut(run, model_folder, monkeypatch, columns):
    """Neither in a pipe, which counts as 80 columns, nor in a narrow terminal."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    numbers = {f"column {i}": 1000.5 + i for i in range(12)}
    print_table("title", [{"preset": "kivi-2-hadamard-sink"} | numbers])
    out = run("fits", "--context", "64k")[1] + run("presets")[1]
    assert all(f"{number:.4g}" in out for number in numbers.values())
    assert "…" not in out
    assert {"kivi-2-hadamard-sink", "longest", "int4-channel"} <= set(out.split())


def test_an_ascii_stdout():
    """Characters that it lacks become "?"."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "30"}
    for command in (["presets"], ["doctor", "--device", "cpu"]):
        done = subprocess.run(
            [sys.executable, "-m", "hf_lowbit_kv", *command],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 5


def test_json_on_an_ascii_stdout(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="replace"))
    print_json({"text": "caf\u00e9"})
    assert json.loads(written.getvalue()) == {"text": "caf\u00e9"}
