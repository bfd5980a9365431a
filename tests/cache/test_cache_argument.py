"""transformers renames the argument that carries a cache: users may write either name, the package writes the current one."""

import inspect

import pytest
import torch
from cases import left_padded
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY
from transformers import LlamaForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import cache_argument

pytestmark = [pytest.mark.host, pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")]


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
    def tokenizer(text, **options):
        return type("Ids", (), {"input_ids": torch.tensor([[ord(letter) % 150 + 3 for letter in text]])})

    text = "".join(chr(32 + (i * i * 7 + i * 13) % 90) for i in range(2000))
    assert lb.calibrate(model, tokenizer, [text], "eigen-2", samples=2, length=256, gradients=True, attention=False)


def test_a_further_turn_under_either_name(model):
    ids = left_padded(1, 200)[0]
    options = {"max_new_tokens": 8, **GREEDY}
    expected = lb.generate(model, ids, "dense", **options | {"max_new_tokens": 16})
    for name in cache_argument.NAMES:
        first = lb.generate(model, ids, "dense", max_cache_len=256, return_dict_in_generate=True, **options)
        cache = first[cache_argument.NAME]
        assert torch.equal(lb.generate(model, first.sequences, "dense", **options, **{name: cache}), expected)
    with pytest.raises(ValueError, match="cache and past_key_values are both given"):
        lb.generate(model, ids, "dense", **options, past_key_values=cache, cache=cache)
