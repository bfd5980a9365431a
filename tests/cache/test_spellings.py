"""Arguments as transformers spells them: `residual_length` and `nbits`."""

from __future__ import annotations

import pytest
from cases import tiny_models

import hf_lowbit_kv as lb


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def _kv8(model, **options):
    return lb.from_preset("kv8", model, **options)


@pytest.mark.parametrize(
    "make", [lb.LowBitCache, lb.KIVICache, lb.KittyCache, lb.IntCache, _kv8], ids=lambda f: f.__name__
)
def test_residual_length(make, model):
    assert make(model).spec.residual == 128
    assert make(model, residual_length=64).spec == make(model, residual=64).spec
    assert make(model, residual_length=0).spec.residual == 0
    with pytest.raises(ValueError, match="residual=0 and residual_length=64 are both given"):
        make(model, residual=0, residual_length=64)
    with pytest.raises(ValueError, match="residual=-1 is not allowed"):
        make(model, residual_length=-1)


@pytest.mark.parametrize(
    ("make", "default"), [(lb.KIVICache, 4), (lb.IntCache, 8), (_kv8, 8)], ids=["kivi", "int", "kv8"]
)
def test_nbits(make, default, model):
    bits = lambda cache: (cache.spec.key_format.bits, cache.spec.value_format.bits)  # noqa: E731
    assert bits(make(model)) == (default, default)
    assert bits(make(model, nbits=2)) == (2, 2)
    with pytest.raises(ValueError, match="nbits=2 are both given"):
        make(model, **{"bits_k" if make is _kv8 else "bits": 4}, nbits=2)


def test_a_format_without_bits(model):
    with pytest.raises(ValueError, match="is not allowed: key_format 'dense'"):
        lb.from_preset("dense", model, nbits=2)
