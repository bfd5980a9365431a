"""What `transformers_release` says of the installed transformers is what it does."""

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import GREEDY

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.transformers_release import GENERATE_KEEPS_MASKS

pytestmark = pytest.mark.host


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("entry", ["model.generate", "lb.generate"])
def test_the_steps_get_the_masks_that_are_expected(entry, padded, monkeypatch):
    """The mask that transformers passes to a step, that of the step itself, and the one that kernels are compiled for ahead."""
    expected, of_calls, of_steps, step_itself = [], [], [], ops.step

    def step(chunk, layer, backend):
        if chunk.tokens == 1:
            of_steps.append(chunk.mask is not None)
        return step_itself(chunk, layer, backend)

    monkeypatch.setattr(ops, "expect_steps", lambda chunk, store, backend, masked: expected.append(masked))
    monkeypatch.setattr(ops, "step", step)
    model = tiny_models("llama")[0]
    model.register_forward_pre_hook(
        lambda module, args, kwargs: of_calls.append(kwargs.get("attention_mask") is not None), with_kwargs=True
    )
    ids, mask = left_padded(2, 40)
    mask = mask if padded else torch.ones_like(ids)
    if entry == "lb.generate":
        lb.generate(model, ids, "kivi-2", 3, attention_mask=mask, **GREEDY)
    else:
        cache = as_argument(lb.from_preset("kivi-2", model))
        model.generate(ids, attention_mask=mask, max_new_tokens=3, **cache, **GREEDY)
    assert of_calls[1:] == [padded or GENERATE_KEEPS_MASKS] * 2
    assert set(expected) == set(of_steps) == set(of_calls[1:])
