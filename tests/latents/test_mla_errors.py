"""MLA models: bad input, and caches used with another model than theirs."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from mla_cases import DENSE_MLP, GREEDY, SMALL_PAGES, attentions, prompt, replaced, tiny_models

import hf_lowbit_kv as lb

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def models():
    return tiny_models("deepseek_v3", **DENSE_MLP)


def test_a_model_without_latents_is_told_which_caches_fit():
    from cases import tiny_models as others

    llama = others("llama")[0]
    for make in (lb.MLAFP8Cache, lambda model: lb.from_preset("snapmla", model)):
        with pytest.raises(
            ValueError, match=r"'llama' has no multi-head latent attention.*from_preset\('fp8', model\)"
        ):
            make(llama)


def test_bad_input(models):
    ours = models[0]
    with pytest.raises(ValueError, match=r"'deepseek_v3' caches a latent.*make the cache from the model itself"):
        lb.MLAFP8Cache(ours.config)
    with pytest.raises(ValueError, match=r"'deepseek_v3' caches a latent.*MLAFP8Cache"):
        lb.from_preset("fp8", ours)
    with pytest.raises(
        ValueError, match=r"format='int2-channel' does not store the latent of MLA models; allowed: 'dense'"
    ):
        lb.from_preset("kivi-2", ours)
    with pytest.raises(ValueError, match=r"transform='hadamard' is not allowed where a layer caches a latent"):
        lb.from_preset("snapmla", ours, transform="hadamard")
    odd = tiny_models("deepseek_v3", kv_lora_rank=96)[0]
    with pytest.raises(ValueError, match=r"kv_lora_rank=96 .* must be a multiple of 64"):
        lb.MLAFP8Cache(odd)


@pytest.mark.parametrize("at_work", [False, True], ids=["growing", "preallocated"])
def test_a_copy_of_the_model_is_not_served(at_work):
    """Its queries would be multiplied with the weights of the other copy, and nothing would show it."""
    ours, _ = tiny_models("deepseek_v3", **DENSE_MLP)
    first = lb.from_preset("mla", ours, **SMALL_PAGES, max_cache_len=64 if at_work else None)
    ours.generate(**prompt(), max_new_tokens=3, past_key_values=first, **GREEDY)
    twin = copy.deepcopy(ours)
    assert bool(replaced(twin)) == at_work
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    with pytest.raises(
        (ValueError, AttributeError), match="made from another copy of this model, and would multiply with"
    ):
        twin(**prompt(), past_key_values=cache)


def test_an_older_transformers_is_named(models, monkeypatch):
    monkeypatch.delattr(type(attentions(models[0])[0]), "expand_kv")
    with pytest.raises(ValueError, match=r"no method 'expand_kv': it needs a version of transformers \(5.17"):
        lb.MLAFP8Cache(models[0])


def test_a_cache_outlives_no_model():
    ours, _ = tiny_models("deepseek_v3", **DENSE_MLP)
    cache = lb.from_preset("mla", ours)
    with pytest.raises(TypeError, match="belongs to the model in this process"):
        pickle.dumps(cache.layers[0].model_side)
    twin = copy.deepcopy(cache)
    inputs = prompt()
    assert torch.equal(
        *(ours.generate(**inputs, max_new_tokens=4, past_key_values=each, **GREEDY) for each in (cache, twin))
    )
    del ours
    gc.collect()
    with pytest.raises(RuntimeError, match="the model that this cache was made for is gone"):
        _ = cache.layers[0].model_side.module
