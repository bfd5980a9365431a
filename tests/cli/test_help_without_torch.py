"""The console script answers help and wrong options without torch and transformers; a command that runs has the whole
package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import typer

from hf_lowbit_kv import cli

ROOT = Path(__file__).resolve().parents[2]
#: runs the script with each list of arguments, and notes its exit code, its output, and which slow packages are loaded then
RUN = """
import contextlib, io, json, sys
import hf_lowbit_kv_command

seen = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["hf-lowbit-kv", *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            hf_lowbit_kv_command.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    seen.append((code, out.getvalue(), sorted({"torch", "transformers", "triton", "numpy"} & sys.modules.keys())))
"""


def run(commands: list[list[str]], afterwards: str = "") -> list:
    """`[code, output, loaded packages]` for each command, in one process; and what this code appends to `seen`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{RUN}\n{afterwards}\nprint(json.dumps(seen))", json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_help_and_wrong_options_need_no_torch():
    top = typer.main.get_command(cli.app).commands
    commands = [[name] for name in top if name != "eval"] + [["eval", name] for name in top["eval"].commands]
    helps = [["--help"], ["eval", "--help"], *([*command, "--help"] for command in commands)]
    wrong = [[*command, "--model"] for command in commands]  # without its value
    wrong += [["nothing"], ["eval", "nothing"], ["--nothing"], ["fits", "--context", "1k", "--rows", "0"]]
    seen = run(helps + wrong)
    assert [code for code, *_ in seen] == [0] * len(helps) + [2] * len(wrong)
    assert [loaded for *_, loaded in seen] == [[]] * len(seen)


def test_a_command_that_runs_has_the_whole_package(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import hf_lowbit_kv as lb\nlb.register_preset('own', 'int2-channel', 'int2-token')\n")
    afterwards = """
import hf_lowbit_kv
from transformers import AttentionInterface
seen.append(["lowbit_kv" in AttentionInterface(), [n for n in hf_lowbit_kv.__all__ if not hasattr(hf_lowbit_kv, n)]])
seen.append(type(hf_lowbit_kv.doctor).__name__)
"""
    (code, out, loaded), (registered, missing), kind = run([["presets", "--json", "--import", str(own)]], afterwards)
    assert code == 0
    assert {"kivi-2", "own"} <= {row["preset"] for row in json.loads(out)}
    assert "torch" in loaded
    assert registered
    assert missing == []
    assert kind == "function", "a module of that name would hide it"
