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
    **{"static-65444333": 1.6, "static-64332222": 3.1, "static-54222100": 6.8},
}
LISTED = [name for name in lb.preset_names() if lb.get_preset(name).reading != "latent"]
CALIBRATED = [name for name in LISTED if lb.get_preset(name).spec().parameters(64, 64, 1)]
BOUNDED = [name for name in LISTED if name not in CALIBRATED]

model_of = functools.cache(biased_model)


@functools.cache
def int4(dtype: torch.dtype, start: int) -> float:
    return score_error(model_of(dtype), "kivi-4", start)


def test_which_presets_are_bounded():
    """All listed ones: those that large key biases spoil are listed nowhere, and warn."""
    assert {lb.get_preset(name).key_format for name in LISTED} == set(BOUNDS)
    assert not any(needs_small_biases(lb.get_preset(name).spec()) for name in LISTED)
    safe = {name for name in PAPER_PRESETS if not needs_small_biases(lb.get_preset(name).spec())}
    assert safe == {"bitdecoding-kc-4", "bitdecoding-kc-2"}


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
def calibration_of(model, *presets: str) -> lb.Calibration:
    gen = torch.Generator().manual_seed(1)
    text = " ".join(map(str, torch.randint(3, VOCAB, (9000,), generator=gen).tolist()))
    return lb.calibrate(model, Numbers(), [text], presets, samples=4, length=2048, progress=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", CALIBRATED)
def test_calibrated_presets_survive(preset, dtype):
    bound, model = BOUNDS[lb.get_preset(preset).key_format], model_of(dtype)
    for start in STARTS:
        found = score_error(model, preset, start, calibration=calibration_of(model, *CALIBRATED))
        assert found <= bound * int4(dtype, start), f"from {start}"


def test_codebooks_do_not():
    """With 4 bits they have several times the error of 4 bits per channel; without biases they have the same."""
    without, biased = biased_model(torch.bfloat16, norm=0.0), model_of(torch.bfloat16)
    assert codebook_error(without, 0) < 1.2
    assert min(codebook_error(biased, start) for start in STARTS) > 5


def codebook_error(model, start: int) -> float:
    """The error of `vecinfer-4` in errors of int4 per channel."""
    calibration = calibration_of(model, "vecinfer-4")
    return score_error(model, "vecinfer-4", start, calibration=calibration) / score_error(model, "kivi-4", start)
