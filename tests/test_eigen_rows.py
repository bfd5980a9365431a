"""What the choices behind eigen-2 and eigen-3 were measured with (`eval.eigen`), and the tables of it."""

from __future__ import annotations

import json

import pytest
import torch
from cases import tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv import gradients
from hf_lowbit_kv.eval import eigen, eigen_tables

TEXT = "".join(chr(97 + (i * i) % 23) for i in range(3000))


def letters(text, **options):
    class Encoded:
        input_ids = torch.tensor([[1 + ord(letter) % 150 for letter in text]])

    return Encoded


@pytest.fixture
def model():
    return tiny_models("llama")[0]


def test_what_is_read_once_calibrates_as_reading_again(model, monkeypatch):
    monkeypatch.setattr(eigen, "sources", lambda names: [TEXT])
    passes = []
    model.register_forward_pre_hook(lambda *inputs: passes.append(None))
    readings = eigen.Readings()

    def calibrated(**changes):
        rows = [eigen.Row("a", windows=2, length=256, gradient_windows=1, **changes)]
        passes.clear()
        found = eigen.calibrated(rows, model, letters, readings)
        return found.tensors, len(passes)

    first, read = calibrated()
    assert read == 2 + 1024 // 128  # windows, and the chunks of one window for gradients
    again, read = calibrated()
    assert read == 0
    plain, read = calibrated(gradients="none")
    assert read == 0
    near, read = calibrated(gradients="all")
    assert read == 1024 // 128
    monkeypatch.setattr(gradients, "SAMPLES", dict.fromkeys(gradients.SAMPLES, 1))
    options = {"samples": 2, "length": 256}
    alone = lb.calibrate(model, letters, [TEXT], "eigen-2", **options).tensors
    without = lb.calibrate(model, letters, [TEXT], "eigen-2", gradients=False, **options).tensors
    monkeypatch.setattr(gradients, "DISTANCE", 0)
    of_all = lb.calibrate(model, letters, [TEXT], "eigen-2", **options).tensors
    for got, expected in ((first, alone), (again, alone), (plain, without), (near, of_all)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(not torch.equal(near[name], alone[name]) for name in alone)


def test_rows_with_another_window_are_calibrated_as_the_presets_are(model, monkeypatch):
    monkeypatch.setattr(eigen, "sources", lambda names: [TEXT])
    rows = [eigen.Row("a", sink=sink, windows=2, length=256, gradients="none") for sink in (0, 32)]
    one, other = (eigen.calibrated([row], model, letters, eigen.Readings()).tensors for row in rows)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_row_can_be_stored_and_is_measured_once():
    assert len(set(eigen.ROWS)) == len(eigen.ROWS)
    for row in eigen.ROWS:
        row.spec.validate(64, 64)
        assert row.measured_on[:2] == eigen.ESSAYS  # what `kl` of a record is the mean of


def record(row, kl, **texts):
    by_text = {text: {"kl": value, "top1": 0.5} for text, value in texts.items()}
    return row._asdict() | {"context": 4096, "bits": 2.09, "kl": kl, "top1": 0.5, "by_text": by_text}


def test_tables_compare_with_the_preset_of_the_same_values(tmp_path, monkeypatch):
    two, three = eigen.ROWS[:2]
    others = [row for row in eigen.ROWS if row.group == "gradients"]
    found = [record(two, 0.02, jargon=0.03), record(three, 0.01, jargon=0.02)]
    found += [record(row, 0.0125 if row.values == eigen.VALUES_3 else 0.025) for row in others]
    found.append(found[0] | {"kl": 0.01, "context": 512})  # of another setting
    path = tmp_path / "eigen.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in found), encoding="utf-8")
    monkeypatch.setattr(eigen, "OUT", path)
    lines = eigen_tables.render("own-gradients").splitlines()
    assert lines[0] == "| gradients | bits | essays: KL | to the preset | top-1 |"
    assert lines[2:] == [
        "| `eigen-2`, of queries far behind | 2.09 | 0.0200 |  | 0.500 |",
        "| `eigen-2`, none | 2.09 | 0.0250 | +25 % | 0.500 |",
        "| `eigen-2`, of all queries | 2.09 | 0.0250 | +25 % | 0.500 |",
        "| `eigen-3`, of queries far behind | 2.09 | 0.0100 |  | 0.500 |",
        "| `eigen-3`, none | 2.09 | 0.0125 | +25 % | 0.500 |",
    ]
