"""What a test draws depends on TEST_SEED and its own name: not on earlier tests, nor on who first asks for a shared fixture."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import json, os, random
import numpy as np
import pytest, torch

@pytest.fixture(scope="module")
def shared():
    return float(torch.rand(()))

def note(name, *numbers):
    with open(os.environ["DRAWN"], "a") as file:
        file.write(json.dumps([name, *numbers]) + chr(10))

def test_first(shared):
    note("first", shared, float(torch.rand(())), random.random(), float(np.random.rand()))

def test_second():
    note("second", float(torch.rand(())))

def test_third(shared):
    note("third", shared, float(torch.rand(())))
"""
#: several runs in one process: importing torch takes longer than they do
RUNS = """
import json, os, sys
import pytest

for seed, *names in json.loads(sys.argv[1]):
    os.environ.pop("TEST_SEED", None)
    if seed is not None:
        os.environ["TEST_SEED"] = seed
    with open(os.environ["DRAWN"], "a") as file:
        file.write(json.dumps("run") + chr(10))
    arguments = [f"test_drawing.py::test_{name}" for name in names]
    assert pytest.main(["-q", "-p", "no:cacheprovider", *arguments]) == 0
"""


def drawn(tmp_path: Path, *runs: list) -> list[dict[str, list[float]]]:
    """By test, the numbers that it drew in each run: a seed (or `None`) and names of tests in their order."""
    (tmp_path / "test_drawing.py").write_text(TESTS)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    environment = {
        **os.environ,
        "DRAWN": str(tmp_path / "drawn"),
        "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing them takes longer than the tests
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(runs)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, list[float]]] = []
    for line in (tmp_path / "drawn").read_text().splitlines():
        match json.loads(line):
            case "run":
                found.append({})
            case [name, *numbers]:
                found[-1][name] = numbers
    return found


def test_order_and_company_change_nothing(tmp_path):
    forth, back, single, other, default, zero, fresh, fresher = drawn(
        tmp_path,
        ["5", "first", "second", "third"],
        ["5", "third", "second", "first"],
        ["5", "third"],
        ["6", "first", "second", "third"],
        [None, "first"],
        ["0", "first"],
        ["random", "first"],
        ["random", "first"],
    )
    assert forth == back
    assert single["third"] == forth["third"]
    assert forth["first"][0] == forth["third"][0]  # one fixture
    numbers = [*forth["first"], *forth["second"], *forth["third"][1:]]
    assert len(set(numbers)) == len(numbers)  # tests draw apart from each other
    assert not set(numbers) & {x for each in other.values() for x in each}
    assert default == zero  # the default is fixed
    assert fresh != fresher
