"""What a calibration is said to take, against what it takes."""

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


def test_memory_counts_pages_and_a_backward_pass(model):
    """Pages: of 16384 tokens a head, keys and values in float32, as `fit` of `static` wants them."""
    plan = plan_for(model, "eigen-2")
    pages = calibration_cost._kept(plan, 1 << 20, torch.float32)
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    assert pages == 16384 * heads * 2 * head_dim * 4 * model.config.num_hidden_layers
    assert cost(model, ["eigen-2"]).nbytes > pages > 0
    assert cost(model, ["vecinfer-2"]).nbytes == calibration_cost._kept(
        plan_for(model, "vecinfer-2"), 64 * 512, torch.float32
    )


def test_longer_windows_take_longer():
    slower = calibration_cost._slower
    assert slower(linear=1.0, attention=0.0, length=4096, probe=256) == 1
    assert slower(linear=0.0, attention=1.0, length=4096, probe=256) == 16
