"""What the choices behind eigen-2 and eigen-3 were measured with (`eval.eigen`), and the tables of it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from cases import tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv import gradients
from hf_lowbit_kv.calibrators_static import RIDGE
from hf_lowbit_kv.eval import eigen, eigen_layers, eigen_tables

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
    return row._asdict() | {
        "context": 4096,
        "date": "2026",
        "device": "cpu",
        "bits": 2.09,
        "kl": kl,
        "top1": 0.5,
        "by_text": by_text,
    }


def test_rows_without_parameters_need_no_calibration(model):
    rows = [eigen.Row("a", **eigen.KIVI_2)]
    assert rows[0].spec == lb.get_preset("kivi-2-sink").spec()
    assert eigen.calibrated(rows, model, letters, eigen.Readings()) is None


def test_rows_of_the_presets_are_the_presets():
    for row, name in zip(eigen.ROWS, ("eigen-2", "eigen-3"), strict=False):
        assert row.group == "presets"
        assert row.spec == lb.get_preset(name).spec()


def test_tables_compare_with_the_preset_of_the_same_values(tmp_path, monkeypatch):
    two, three = eigen.ROWS[:2]
    others = [row for row in eigen.ROWS if row.group == "gradients"]
    found = [record(two, 0.02, jargon=0.03), record(three, 0.01, jargon=0.02)]
    found += [record(row, 0.0125 if row.values == eigen.VALUES_3 else 0.025) for row in others]
    found.append(found[0] | {"kl": 0.01, "context": 512})  # of another setting
    path = tmp_path / "eigen.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in found), encoding="utf-8")
    monkeypatch.setattr(eigen, "OUT", path)
    assert eigen_tables.render("own-sides") == "(no record)\n"
    lines = eigen_tables.render("own-gradients").splitlines()
    assert lines[0] == "| gradients | bits | essays: KL | to the preset | top-1 |"
    assert lines[2:] == [
        "| `eigen-2`, of queries far behind | 2.09 | 0.0200 |  | 0.500 |",
        "| `eigen-2`, none | 2.09 | 0.0250 | +25 % | 0.500 |",
        "| `eigen-2`, of all queries | 2.09 | 0.0250 | +25 % | 0.500 |",
        "| `eigen-2`, of all queries, residual 32 | 2.09 | 0.0250 | +25 % | 0.500 |",
        "| `eigen-3`, of queries far behind | 2.09 | 0.0100 |  | 0.500 |",
        "| `eigen-3`, none | 2.09 | 0.0125 | +25 % | 0.500 |",
    ]


def test_bits_are_shared_out_at_least_cost():
    """Against all choices of four layers."""
    bits, mean = [1.0, 2.0, 3.0], 2.0
    costs = {n: [size, size / 4, size / 16] for n, size in enumerate((1.0, 3.0, 0.01, 5.0))}
    found = eigen_layers.share_out(costs, bits, mean)
    assert sum(bits[i] for i in found.values()) <= mean * len(costs)
    allowed = [x for x in itertools.product(range(3), repeat=4) if sum(bits[i] for i in x) <= mean * 4]
    least = min(sum(costs[n][i] for n, i in enumerate(x)) for x in allowed)
    assert sum(costs[n][i] for n, i in found.items()) == pytest.approx(least)


def test_predicted_cost_is_that_of_the_errors_that_are_left():
    """Against noise of known size in the channels of the transform."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 500, 16, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, 16)
    g = torch.randn(2, 500, 16, generator=generator, dtype=torch.float64) * torch.linspace(3, 1, 16)
    weights, covariance = g.mT @ g, x.mT @ x
    (cost,) = eigen_layers.losses(weights, covariance, ["40"])
    weights = weights + RIDGE * weights.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(16)
    expected = 0.0
    for w, c in zip(weights, covariance, strict=True):
        root = torch.linalg.cholesky(w)
        values, vectors = torch.linalg.eigh(root.T @ c @ root)
        left = torch.tensor([1.0] * 8 + [0.01154] * 8, dtype=torch.float64)  # ascending: the larger half has 4 bits
        error = torch.linalg.inv(root.T) @ vectors @ torch.diag(left * values) @ vectors.T @ torch.linalg.inv(root)
        expected += float((w * error).sum())  # trace of W times the covariance of errors
    assert cost == pytest.approx(expected)
