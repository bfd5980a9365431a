"""Every listed preset on a model whose key biases are those of a real family: the error of q.k beside int4 per channel.

In float32, and near position 0, most of these errors do not appear.
"""

from __future__ import annotations

import functools

import pytest
import torch
from biased_model import VOCAB, biased_model, score_error
from number_text import Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.key_biases import needs_small_biases
from hf_lowbit_kv.presets import PAPER_PRESETS

pytestmark = pytest.mark.filterwarnings("ignore:Qwen2ForCausalLM has key biases")
STARTS = (0, 4096, 30000)
DTYPES = [torch.bfloat16, torch.float16]
#: key format -> the largest error, in errors of int4 per channel; a step of 2^bits - 1 levels gives 0.06, 0.24, 0.48, 1, 5
BOUNDS = {
    **{"dense": 1e-6, "int8-channel": 0.07, "fp8-centered": 0.33, "int6-channel": 0.28, "int5-channel": 0.55},
    **{"int4-channel": 1.08, "int2-channel": 5.9, "boosted2-r0.125": 5.4, "boosted2-r0.25": 4.8},
    **{"static-65444333": 1.6, "static-64332222": 3.1, "static-44422000": 6.8},
}
LISTED = [name for name in lb.preset_names() if lb.get_preset(name).reading != "latent"]
SPOILED = [name for name in LISTED if needs_small_biases(lb.get_preset(name).spec())]
CALIBRATED = [name for name in LISTED if lb.get_preset(name).spec().parameters(64, 64, 1)]
BOUNDED = [name for name in LISTED if name not in (*SPOILED, *CALIBRATED)]

model_of = functools.cache(biased_model)


@functools.cache
def int4(dtype: torch.dtype, start: int) -> float:
    return score_error(model_of(dtype), "kivi-4", start)


def test_which_presets_are_bounded():
    """Those of codebooks warn; all others are."""
    assert {name.partition("-")[0] for name in SPOILED} == {"vecinfer", "million"}
    assert {name.partition("-")[0] for name in set(CALIBRATED) - set(SPOILED)} == {"eigen"}
    assert {lb.get_preset(name).key_format for name in set(LISTED) - set(SPOILED)} == set(BOUNDS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", BOUNDED)
def test_listed_presets_survive(preset, dtype):
    bound = BOUNDS[lb.get_preset(preset).key_format]
    for start in STARTS:
        assert score_error(model_of(dtype), preset, start) <= bound * int4(dtype, start), f"from {start}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", [name for name in PAPER_PRESETS if name.startswith(("kv", "bitdecoding-kt"))])
def test_a_range_per_token_does_not(preset, dtype):
    """8 bits per token are worse than 4 per channel."""
    for start in STARTS:
        assert score_error(model_of(dtype), preset, start) > 9 * int4(dtype, start), f"from {start}"
    without = biased_model(dtype, norm=0.0)
    assert score_error(without, preset, 0) < 2.5 * score_error(without, "kivi-4", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_fp8_does_not(dtype):
    formats = {"key_format": "fp8", "value_format": "fp8"}
    for start in STARTS:
        assert score_error(model_of(dtype), "fp8", start, **formats) > 9 * score_error(model_of(dtype), "fp8", start)


@functools.cache
def calibration_of(dtype: torch.dtype) -> lb.Calibration:
    gen = torch.Generator().manual_seed(1)
    text = " ".join(map(str, torch.randint(3, VOCAB, (9000,), generator=gen).tolist()))
    presets = [name for name in CALIBRATED if name not in SPOILED]
    return lb.calibrate(model_of(dtype), Numbers(), [text], presets, samples=4, length=2048, progress=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", [name for name in CALIBRATED if name not in SPOILED])
def test_calibrated_presets_survive(preset, dtype):
    bound = BOUNDS[lb.get_preset(preset).key_format]
    for start in STARTS:
        found = score_error(model_of(dtype), preset, start, calibration=calibration_of(dtype))
        assert found <= bound * int4(dtype, start), f"from {start}"
