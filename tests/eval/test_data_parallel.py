"""Evaluation shared by several processes: the figures are those of one process, and one process writes them."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command_line import call
from ranks import run_ranks

from hf_lowbit_kv import cli
from hf_lowbit_kv.eval.data_parallel import ONE_PROCESS, Processes


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 5, 14])
def test_each_item_is_worked_on_once(count, items):
    parts = [Processes(rank, count).part(range(items)) for rank in range(count)]
    assert sorted(item for part in parts for item in part) == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_keeps_the_order():
    assert ONE_PROCESS.gather(ONE_PROCESS.part("abc")) == list("abc")


@pytest.mark.parametrize("command", [["demo"], ["presets"], ["eval", "needle"]])
def test_commands_that_cannot_be_shared_say_so(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call(capsys, *command)
    assert code == 1
    assert f"`{' '.join(command)}` runs in one process" in " ".join(err.split())


@pytest.mark.parametrize("device", ["cuda:1", "auto"])
def test_a_gpu_for_all_is_refused(monkeypatch, capsys, device):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, _, err = call(capsys, "eval", "perplexity", "--preset", "kivi-2", "--device", device)
    assert "each process uses its own GPU" in " ".join(err.split())


def options_of(model_folder: Path, folder: Path) -> list[str]:
    """The command for three windows of two texts: of two processes, one gets two windows and the other one."""
    texts = []
    for number, tokens in enumerate((700, 320)):
        path = folder / f"{number}.txt"
        path.write_text(" ".join(str((i * i + number) % 101) for i in range(tokens)), encoding="utf-8")
        texts += ["--text", str(path)]
    window = ["--context", "300", "--from", "150", "--windows", "0"]
    return ["eval", "perplexity", "--model", str(model_folder), "--preset", "dense,kivi-2", "--json", *texts, *window]


def _rank(rank: int, command: list[str], folder: str) -> None:
    with open(f"{folder}/{rank}.json", "w") as file, redirect_stdout(file):
        cli.main(command)


def same_figures(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for mine, others in zip(ours, theirs, strict=True):
        for name in ("ppl", "ppl_full", "kl", "kl_p99", "top1", "bits_per_value"):
            assert mine[name] == pytest.approx(others[name], rel=1e-6, abs=1e-9)
        assert [(part["from"], part["to"]) for part in mine["by_position"]] == [
            (part["from"], part["to"]) for part in others["by_position"]
        ]


def test_perplexity_of_two_processes(model_folder, tmp_path, capsys):
    command = options_of(model_folder, tmp_path)
    assert run_ranks(_rank, 2, command, str(tmp_path)) == [0, 0]
    same_figures(json.loads((tmp_path / "0.json").read_text()), json.loads(call(capsys, *command)[1]))
    assert (tmp_path / "1.json").read_text() == ""


LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "-m"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_perplexity_under_accelerate(model_folder, tmp_path, count):
    """Four processes are more than there are windows."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for how in (["-m"], [*LAUNCH[:2], "--num_processes", str(count), *LAUNCH[2:]]):
        done = subprocess.run(
            [sys.executable, *how, "hf_lowbit_kv", *options_of(model_folder, tmp_path)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout))  # only one process has written
    same_figures(*found)


def _dying_rank(rank: int, command: list[str]) -> None:
    if rank == 1:  # it measures its part, and exits before it sends the results
        Processes.gather = lambda self, results: os._exit(3)
    cli.main(command)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_evaluation(model_folder, tmp_path, capfd):
    """Without a launcher that would end the others, too."""
    codes = run_ranks(_dying_rank, 2, options_of(model_folder, tmp_path))
    assert codes[1] == 3
    assert codes[0] not in (0, 3)
    assert capfd.readouterr().out == ""
