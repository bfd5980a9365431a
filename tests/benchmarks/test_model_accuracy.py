"""Benchmarks of any model: KL of presets and of transformers' caches, and tasks, on tiny models."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from cases import tiny_models
from number_text import Numbers
from transformers import DynamicCache
from typer.testing import CliRunner

from hf_lowbit_kv.eval.benchmarks import model_accuracy, model_tasks
from hf_lowbit_kv.eval.benchmarks.model_tasks import Item, number_in, passes, prompts


def test_a_peer_that_is_the_full_precision_cache_loses_nothing():
    """Every position after the start is scored once, whatever ends chunks."""
    model = tiny_models("llama")[0]
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    scores = model_accuracy.score_peer(lambda: DynamicCache(config=model.config), ids, model, 40)
    assert scores["position"].tolist() == list(range(40, 299))
    assert scores.means()["kl"] == pytest.approx(0, abs=1e-6)
    assert scores.means()["top1"] == 1


@pytest.mark.usefixtures("one_thread")
def test_records_of_a_model(tmp_path, monkeypatch):
    model = tiny_models("llama")[0]
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(model_accuracy.AutoTokenizer, "from_pretrained", lambda *_: Numbers())
    text, out = tmp_path / "prose.txt", tmp_path / "records.jsonl"
    text.write_text(" ".join(str(3 + i * i % 80) for i in range(600)), encoding="utf-8")
    app = typer.Typer()
    app.command()(model_accuracy.main)
    arguments = ["--model", tmp_path / "model", "--name", "tiny", "--text", text, "--context", 512, "--out", out]
    arguments += ["--preset", "dense", "--preset", "kivi-2", "--dtype", "float32", "--device", "cpu"]
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0
    dense, low = map(json.loads, out.read_text().splitlines())
    assert (dense["preset"], dense["text"], dense["context"], dense["start"]) == ("dense", "prose", 512, 64)
    assert len(dense["weights"]) == 64
    assert dense["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < low["kl"] <= low["kl_p99"] <= low["kl_p999"]


# ---- tasks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("assert sum([1, 2]) == 3", True),
        ("assert False", False),
        ("def broken(:", False),
        ("while True: pass", False),
        ("x = bytearray(2**33)", False),
        ("with open('file', 'w') as file: file.write('x')", False),
        ("import os; assert 'HOME' not in os.environ", True),
        ("from __future__ import annotations\nassert __name__ == '__main__'", True),
    ],
)
def test_programs_run_with_limits(program, ends, monkeypatch):
    monkeypatch.setattr(model_tasks, "SECONDS", 1)
    assert passes(program) is ends


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        *(("2 + 2 = 4\n#### 4", "4"), ("#### 1,234 and 5", "1234"), ("first 3, then -7.", "-7"), ("none", None)),
        *(("#### 18.00", "18"), ("It costs $18.50", "18.50")),
    ],
)
def test_the_number_of_an_answer(answer, number):
    assert number_in(answer) == number


def test_no_prompt_has_its_own_answer():
    items = [Item(str(i), f"question {i}:", f"question {i}: answer {i};\n", ";", bool) for i in range(40)]
    for index, prompt in enumerate(prompts(items, 4)):
        assert prompt.endswith(f"question {index}:")
        assert f"answer {index};" not in prompt
        assert prompt.count("answer") >= 4
