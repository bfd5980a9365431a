"""Arguments as transformers spells them: `residual_length` and `nbits`."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest
from cases import tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends.choice import BACKENDS
from hf_lowbit_kv.cache import cache_options
from hf_lowbit_kv.cache.method_caches import KEY_PARAMETERS, VALUE_PARAMETERS
from hf_lowbit_kv.presets import PRESETS, PresetName


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


# ---- what editors see -------------------------------------------------------------------------------------------------


def test_names_that_editors_offer():
    assert list(get_args(PresetName)) == [name for name in PRESETS if name in get_args(PresetName)]
    assert set(get_args(cache_options.BackendName)) == set(BACKENDS)


def test_typed_options_are_those_of_the_signature():
    """`from_preset` takes what `LowBitCache` takes, and the parameters of formats. What a preset decides is not offered."""
    parameters = set(inspect.signature(lb.LowBitCache).parameters) - {"model_or_config", "preset", "reading", "unknown"}
    of_formats = {*KEY_PARAMETERS, *VALUE_PARAMETERS, "nbits"}
    assert cache_options.PresetCacheOptions.__optional_keys__ == parameters | of_formats


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (lb.KIVICache, cache_options.MethodCacheOptions),
        (lb.KittyCache, cache_options.MethodCacheOptions),
        (lb.IntCache, cache_options.IntCacheOptions),
        (lb.VecInferCache, cache_options.VecInferCacheOptions),
        (lb.MLAFP8Cache, cache_options.LatentCacheOptions),
    ],
    ids=lambda x: x.__name__,
)
def test_typed_options_of_methods(cls, options):
    """They are options of `LowBitCache` that the method does not name itself."""
    own = set(inspect.signature(cls).parameters)
    assert options.__optional_keys__ <= set(inspect.signature(lb.LowBitCache).parameters) - own
