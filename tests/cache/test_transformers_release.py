"""What differs between releases of transformers: `cache_argument` says of the installed one what it does, and of the two
names of the argument that carries a cache users may write either; the package writes the current one."""

import inspect

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY
from tiny_tokenizers import characters
from transformers import LlamaForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.cache import cache_argument
from hf_lowbit_kv.cache.cache_argument import GENERATE_KEEPS_MASKS, as_argument

pytestmark = [pytest.mark.host, pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")]


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


# ---- the argument that carries a cache ------------------------------------------------------------------------------


def test_the_name_is_the_one_that_models_take():
    assert cache_argument.NAME in inspect.signature(LlamaForCausalLM.forward).parameters


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 64}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_nothing_here_writes_a_name_that_is_deprecated(model, monkeypatch, graphs, options):
    if graphs:
        in_place_of_graphs(monkeypatch)
    ids = left_padded(1, 200)[0]
    torch.manual_seed(1)
    out = lb.generate(model, ids, "kivi-2", max_new_tokens=8, **GREEDY | options)
    torch.manual_seed(1)
    with lb.enable(model, "kivi-2"):
        assert torch.equal(
            model.generate(ids, max_new_tokens=8, **GREEDY | {"do_sample": "do_sample" in options} | options), out
        )


def test_calibrating_with_gradients_too(model):
    text = "".join(chr(32 + (i * i * 7 + i * 13) % 90) for i in range(2000))
    assert lb.calibrate(model, characters, [text], "eigen-2", samples=2, length=256, gradients=True, attention=False)


def test_a_further_turn_under_either_name(model):
    ids = left_padded(1, 200)[0]
    options = {"max_new_tokens": 8, **GREEDY}
    expected = lb.generate(model, ids, "dense", **options | {"max_new_tokens": 16})
    for name in cache_argument.NAMES:
        first = lb.generate(model, ids, "dense", max_cache_len=256, return_dict_in_generate=True, **options)
        cache = first[cache_argument.NAME]
        assert torch.equal(lb.generate(model, first.sequences, "dense", **options, **{name: cache}), expected)
