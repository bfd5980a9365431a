"""What `transformers_release` says of the installed transformers is what it does."""

from __future__ import annotations

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import GREEDY

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import low_bit_layer
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.transformers_release import GENERATE_KEEPS_MASKS

pytestmark = pytest.mark.host


@pytest.mark.parametrize("padded", [False, True])
def test_the_steps_get_the_masks_that_are_expected(monkeypatch, padded):
    """The mask that `generate` hands to a step, and the one that kernels are compiled for ahead of it."""
    model = tiny_models("llama")[0]
    expected = []
    monkeypatch.setattr(
        low_bit_layer.ops, "expect_steps", lambda chunk, store, backend, masked: expected.append(masked)
    )
    masks = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    ids, mask = left_padded(2, 40)
    mask = mask if padded else torch.ones_like(ids)
    cache = lb.from_preset("kivi-2", model)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, **as_argument(cache), **GREEDY)
    steps = [mask is not None for mask in masks[1:]]
    assert steps == [padded or GENERATE_KEEPS_MASKS] * 2
    assert set(expected) == set(steps)
