"""The announced cost of a calibration, compared with the real cost."""

from __future__ import annotations

import time

import pytest
import torch
from cases import tiny_models
from number_text import Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration import calibration_cost
from hf_lowbit_kv.calibration.calibrate import plan_for
from hf_lowbit_kv.calibration.calibration_cost import cost
from hf_lowbit_kv.calibration.calibration_plan import KeptPages

TEXT = " ".join(str(i * i % 101 + i % 7) for i in range(40000))


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama", max_position_embeddings=1024)[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["eigen-2", "vecinfer-2"])
def test_the_estimate_is_near(preset, model, monkeypatch):
    """Within a factor of four: times of a tiny model are mostly overhead, and other work shares the machine."""
    monkeypatch.setattr(calibration_cost, "TRIED", 2)
    estimate = cost(model, [preset])
    began = time.process_time()
    lb.calibrate(model, Numbers(), [TEXT], preset, progress=False)
    took = time.process_time() - began
    assert estimate.seconds / 4 < took < estimate.seconds * 4


@pytest.mark.parametrize(("preset", "windows", "length"), [("vecinfer-2", 6, 512), ("eigen-2", 2, 1024)])
def test_memory_counts_the_pages_that_are_kept(preset, windows, length, model):
    plan = plan_for(model, preset)
    kept = KeptPages(plan, plan.choose(windows, length, 0))
    for window in range(windows):
        for layer, (heads, *dims) in plan.sizes.items():
            kept.see(window, layer, tuple(torch.randn(1, heads, length, dim) for dim in dims), {})
    pages = [page for pages in kept._pages.values() for page in pages]
    assert calibration_cost._kept(plan, windows, length, torch.float32) == sum(page.nbytes for page in pages)


def test_memory_counts_a_backward_pass(model):
    pages = calibration_cost._kept(plan_for(model, "eigen-2"), 32, 1024, torch.float32)
    logits = 1024 * model.config.vocab_size * 4
    assert cost(model, ["eigen-2"]).nbytes > pages + logits
    pages = calibration_cost._kept(plan_for(model, "vecinfer-2"), 64, 512, torch.float32)
    assert cost(model, ["vecinfer-2"]).nbytes == pages  # no gradients


def test_longer_windows_take_longer():
    slower = calibration_cost._slower
    assert slower(linear=1.0, attention=0.0, length=4096, probe=256) == 1
    assert slower(linear=0.0, attention=1.0, length=4096, probe=256) == 16
