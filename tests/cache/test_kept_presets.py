"""Forked and restored caches of every preset hold the same bytes, so they give the very logits of the cache they came from."""

from __future__ import annotations

import pytest
import torch
from cases import every_preset, left_padded, random_parameters, tiny_models
from marked import slow_case
from mla_cases import tiny_models as mla_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

#: presets whose formats and windows differ most; the others run in `make test-all`
FAST = ("dense", "kivi-4-sink", "kitty", "eigen-2", "vecinfer-4", "kv8")
LATENT = tuple(name for name in every_preset() if lb.get_preset(name).reading == "latent")
SEPARATE = tuple(name for name in every_preset() if name not in LATENT)


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


@pytest.fixture(scope="module")
def latent_model():
    return mla_models("deepseek_v2")[0]


def read(model, cache, ids):
    with torch.no_grad():
        return model(ids, **as_argument(cache)).logits[:, -1]


def go_on_alike(model, folder, make):
    """Forks and restored caches, growing and preallocated: a text that fills pages, and a step after it."""
    prompt, text = left_padded(1, 400)[0], left_padded(1, 200, seed=1)[0]
    for length in (None, 800):
        cache = make(length)
        read(model, cache, prompt)
        cache.save_pretrained(folder)
        others = [*cache.fork(2), lb.LowBitCache.from_pretrained(folder, model, max_cache_len=length)]
        for ids in (text, torch.tensor([[7]])):
            want = read(model, cache, ids)
            for other in others:
                assert torch.equal(read(model, other, ids), want)
    return cache


@pytest.mark.parametrize("preset", [name if name in FAST else slow_case(name) for name in SEPARATE])
def test_presets(model, preset, tmp_path):
    spec = lb.get_preset(preset).spec()
    given = {"parameters": random_parameters(model, spec)} if spec.parameters(64, 64, 2) else {}
    cache = go_on_alike(model, tmp_path, lambda length: lb.from_preset(preset, model, max_cache_len=length, **given))
    assert preset == "dense" or cache.nbytes.codes > 0, "nothing was packed"


@pytest.mark.parametrize("preset", LATENT)
def test_latents(latent_model, preset, tmp_path):
    go_on_alike(latent_model, tmp_path, lambda length: lb.from_preset(preset, latent_model, max_cache_len=length))
