"""Evaluation shared by several processes: the figures are those of one process, and one process writes them."""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command_line import call
from machines import commands, run_at_once
from ranks import run_ranks

from hf_lowbit_kv import cli
from hf_lowbit_kv.eval.data_parallel import ONE_PROCESS, Processes, process_count


@pytest.mark.parametrize(("items", "count"), [(0, 2), (1, 3), (5, 1), (14, 2), (14, 4)])
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


@pytest.mark.slow
def test_perplexity_of_two_processes(model_folder, tmp_path, capsys):
    command = options_of(model_folder, tmp_path)
    assert run_ranks(_rank, 2, command, str(tmp_path)) == [0, 0]
    same_figures(json.loads((tmp_path / "0.json").read_text()), json.loads(call(capsys, *command)[1]))
    assert (tmp_path / "1.json").read_text() == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
    ],
)
def test_processes_without_ranks_are_refused(monkeypatch, capsys, variables):
    for name in variables:
        monkeypatch.setenv(name, variables[name])
    code, _, err = call(capsys, "eval", "perplexity", "--preset", "kivi-2")
    assert code == 1
    assert "each would do all the work. Start them with `accelerate launch --multi_gpu" in " ".join(err.split())


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, {"PMI_SIZE": "1"}]
)
def test_more_ranks_than_a_launcher_announces(monkeypatch, variables):
    """`srun` starts `torchrun` once on each machine, and that starts a rank for each GPU."""
    for name in variables:
        monkeypatch.setenv(name, variables[name])
    assert process_count() == int(variables.get("WORLD_SIZE", 1))


@pytest.mark.slow
def test_perplexity_on_two_machines(model_folder, tmp_path, capsys):
    """One window on one machine and two on the other."""
    options = options_of(model_folder, tmp_path)
    first, second = run_at_once([[*line, *options[2:]] for line in commands("perplexity")], tmp_path)
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), (
        first.stderr[-2000:] + second.stderr[-2000:]
    )
    same_figures(json.loads(first.stdout), json.loads(call(capsys, *options)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["1", "2"])
def test_accelerate_without_ranks_is_refused(tmp_path, machines):
    """With `--cpu`, accelerate starts one process on each machine, which knows of no other one."""
    launch = ["accelerate.commands.launch", "--cpu", "--num_machines", machines, "--num_processes", "2"]
    launch += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "29500"]
    command = [sys.executable, "-m", *launch, "-m", "hf_lowbit_kv", "eval", "perplexity", "--preset", "kivi-2"]
    (done,) = run_at_once([command], tmp_path)
    assert done.returncode != 0
    assert "MASTER_ADDR=127.0.0.1: a launcher was asked for several processes" in " ".join(done.stderr.split())


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
