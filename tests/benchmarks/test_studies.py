"""The command `studies`: its JSON, its options and its errors. What it measures: `tests/eval`, `test_baselines`."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration_files.model_description import describe_model
from hf_lowbit_kv.eval.benchmarks import studies
from hf_lowbit_kv.eval.local_models import load_model

SCORES = {"positions", "ppl", "ppl_full", "kl", "kl_error", "kl_p99", "top1"}
FIELDS = {
    "baselines": {"preset", "bits_of_page", "bits_per_value", "bits_per_value_32k", "kl_p999", "by_position", *SCORES},
    "layers": {"layer", "key_peak", "value_peak", "first_key", "errors"},
    "sweep": {"name", "keys", "values", "transform", "sink", "residual", "bits_per_value", "pareto"}
    | SCORES - {"positions", "kl_error"},
}
GRID = ["--formats", "int2-channel/int2-token,dense/dense", "--transform", "none", "--sink", 0]


@pytest.fixture
def run(capfd, monkeypatch):
    """Calls the command and returns `(exit code, standard output, standard error)`."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            studies.main([str(arg) for arg in args])
        captured = capfd.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def small(model_folder, tmp_path):
    """Options of a small run on a tiny model."""
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(str(3 + i * i % 151) for i in range(900)), encoding="utf-8")
    return ["--model", model_folder, "--device", "cpu", "--text", text, "--context", 600, "--from", 300]


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_text("Some words stand here. Others stand there. " * 400, encoding="utf-8")
    return path


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # of bits that a small text does not need
@pytest.mark.parametrize("name", FIELDS)
def test_one_document_on_standard_output(run, small, sentences, name):
    options = {
        "baselines": ["-b", "oscar-2", "-p", "kv8", "--calibration-text", sentences, "--samples", 2],
        "layers": ["--preset", "dense,kivi-2"],
        "sweep": GRID,
    }[name]
    code, out, err = run(name, *small, *options, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert [set(row) for row in rows] == [FIELDS[name]] * 2
    if name == "layers":
        assert "2/2 layer 1" in err
        assert rows[0]["errors"]["dense"] < 1e-6 < rows[0]["errors"]["kivi-2"]


@pytest.mark.usefixtures("one_thread")
def test_tables_and_the_picture(run, small, tmp_path):
    assert "kivi-2" in run("layers", "--preset", "kivi-2", *small)[1]
    picture = tmp_path / "sweep.svg"
    assert "int2-channel/int2-token r128" in run("sweep", *GRID, *small, "--out", picture)[1]
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_every_command_takes_a_calibration_and_says_which_extra_it_needs(run):
    commands = typer.main.get_command(studies.app).commands
    assert commands.keys() == FIELDS.keys()
    for name, command in commands.items():
        assert {"calibration", "import_"} <= {parameter.name for parameter in command.params}
        assert "pip install 'hf-lowbit-kv[eval]'" in " ".join(run(name, "--help")[1].replace("│", " ").split())


@pytest.mark.usefixtures("one_thread")
def test_a_sweep_takes_a_calibration(run, small, model_folder, tmp_path):
    model, path = load_model(str(model_folder), device="cpu")[0], tmp_path / "x.safetensors"
    factors = {f"layers.{layer}.keys.smooth.factors": torch.full((2, 64), 1.0) for layer in range(2)}
    lb.Calibration(factors, describe_model(model, packed_sizes(model))).save(path)
    arguments = ("sweep", *small, "--formats", "int4-channel/int4-token", "--transform", "smooth", "--json")
    code, out, err = run(*arguments, "--calibration", path)
    assert code == 0, err
    assert [0 < row["kl"] < 0.1 for row in json.loads(out)] == [True, True]
    code, _, err = run(*arguments)
    assert (code, "needs a calibration" in err) == (1, True)
    path.write_bytes(path.read_bytes()[:-8])
    code, _, err = run(*arguments, "--calibration", path)
    assert (code, "x.safetensors' cannot be read" in err) == (1, True)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["layers", "--preset", "kv7"], 1, "did you mean"),
        (["baselines", "-b", ","], 1, "--baseline is empty; allowed: wush-2"),
        (["baselines", "--text", __file__, "--calibration-text", __file__], 1, "is calibrated on and measured"),
        (["sweep", "--formats", "int4-channel"], 1, "give KEYS/VALUES"),
        (["sweep", "--sink", "few"], 1, "--sink 'few' is not allowed; it must be numbers"),
        (["sweep", "--out", "picture.doc"], 1, "it must be a .png or .svg"),
        (["sweep", "--set", "residual=0"], 2, "No such option"),
        (["perplexity"], 2, "No such command"),
    ],
)
def test_errors_are_explained(run, args, code, message):
    got, out, err = run(*args)
    assert (got, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_picture_without_matplotlib_gives_the_line_that_installs_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    code, out, err = run("sweep", "--out", tmp_path / "a.png")
    assert (code, out) == (1, "")
    assert "pip install 'hf-lowbit-kv[eval]'" in " ".join(err.split())


def test_a_cache_folder_that_cannot_be_written(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "file"))
    code, out, err = run("baselines")
    assert (code, out) == (1, "")
    assert re.search(r"file.*' cannot be written: .*HF_LOWBIT_KV_CACHE names another folder", " ".join(err.split()))


def test_several_processes_are_refused(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("sweep")
    assert (code, "`studies sweep` runs in one process" in " ".join(err.split())) == (1, True)
