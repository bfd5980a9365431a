"""A model that its user loaded as always: `lb.generate` selects the attention implementation for its calls, and what it
returns is not slow without a word."""

import threading

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY, growing, ours
from transformers import DynamicCache, StoppingCriteria

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

pytestmark = pytest.mark.host
CHANGED = r"stored under attn_implementation='lowbit_kv', and the model has 'sdpa' now.*slow.*go on with lb\.generate"


@pytest.fixture
def model():
    model = tiny_models("llama")[1]
    yield model
    lb.release(model)


class Watch(StoppingCriteria):
    """Notes the implementation that is selected, and lets `then` happen at the third step."""

    def __init__(self, model, then=lambda: None):
        self.model, self.then, self.seen = model, then, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(self.model.config.get_text_config(decoder=True)._attn_implementation)
        if len(self.seen) == 3:
            self.then()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_generate_selects_it_for_its_call(model, before, monkeypatch):
    graphs = in_place_of_graphs(monkeypatch)
    model.set_attn_implementation(before)
    ids, mask = left_padded(2, 200)
    watch = Watch(model)
    want = growing(tiny_models("llama")[0], ids, mask)
    for _ in range(2):
        assert torch.equal(ours(model, ids, mask, stopping_criteria=[watch]), want)
        assert model.config._attn_implementation == before
    assert set(watch.seen) == {"lowbit_kv"}
    assert [graph.replays for graph in graphs] == [21], "it is recorded once"


def raised(error):
    raise error


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_it_is_put_back_whatever_happens(model, error):
    ids, mask = left_padded(2, 50)
    watch = Watch(model, lambda: raised(error))
    with pytest.raises(type(error)):
        ours(model, ids, mask, stopping_criteria=[watch])
    assert watch.seen == ["lowbit_kv"] * 3
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="preset='kivi-3' is not known"):
        lb.generate(model, ids, "kivi-3", 4)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(ours(model, ids, mask), growing(tiny_models("llama")[0], ids, mask))


def test_one_that_is_selected_already_stays(model):
    ids, mask = left_padded(2, 50)
    with lb.enable(model, "kv8"):
        ours(model, ids, mask)
        assert model.config._attn_implementation == "lowbit_kv"
    assert model.config._attn_implementation == "sdpa"


def test_enable_of_another_thread_waits_for_the_call(model):
    """Each would restore what the other one has selected."""
    enabled, done = [], threading.Event()

    def enable():
        enabled.append(lb.enable(model, "kivi-2"))
        done.set()

    thread = threading.Thread(target=enable)

    def meanwhile():
        thread.start()
        assert not done.wait(0.2)

    ids, mask = left_padded(2, 50)
    ours(model, ids, mask, stopping_criteria=[Watch(model, meanwhile)])
    thread.join(10)
    assert model.config._attn_implementation == "lowbit_kv"
    lb.disable(model)
    assert model.config._attn_implementation == "sdpa"


def composite():
    """Text and images, with tiny random weights."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = tiny_models("llama")[1].config
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    assert isinstance(text, LlamaConfig)
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=150)
    return LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


def test_of_a_composite_model_the_text_alone():
    model, (ids, mask) = composite(), left_padded(2, 100)
    ids = ids % 140
    subs = model.config.sub_configs
    before = {name: getattr(model.config, name)._attn_implementation for name in subs}
    want = model.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    seen = []

    def look():
        seen.append({name: getattr(model.config, name)._attn_implementation for name in subs})

    watch = Watch(model, look)
    got = lb.generate(
        model, {"input_ids": ids, "attention_mask": mask}, "dense", 8, stopping_criteria=[watch], **GREEDY
    )
    assert torch.equal(got, want)
    assert seen == [{"text_config": "lowbit_kv", "vision_config": "eager"}]
    assert before == {name: getattr(model.config, name)._attn_implementation for name in subs}
    assert before["text_config"] == model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_returned_cache_warns_once_under_another_implementation(family):
    """It gives what it holds, unpacked: the tokens are those of transformers' cache."""
    model = tiny_models(family)[1]
    ids, more = left_padded(1, 100)[0].repeat(2, 1), torch.full((2, 7), 9)
    out = lb.generate(model, ids, "dense", 5, max_cache_len=200, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([out.sequences, more], 1)
    theirs = DynamicCache(config=model.config)
    want = model.generate(text, past_key_values=theirs, max_new_tokens=6, **GREEDY)
    with pytest.warns(UserWarning, match=CHANGED) as caught:
        got = model.generate(text, **as_argument(out.past_key_values), max_new_tokens=6, disable_compile=True, **GREEDY)
    assert len(caught) == 1
    assert torch.equal(got, want)
    with pytest.raises(
        ValueError, match="changed to 'lowbit_kv' while the cache holds tokens stored under another one"
    ):
        lb.generate(model, torch.cat([got, more], 1), max_new_tokens=5, past_key_values=out.past_key_values, **GREEDY)
    assert model.config._attn_implementation == "sdpa"
    out.past_key_values.reset()
    with pytest.warns(UserWarning, match="attn_implementation='sdpa', which does not read packed pages") as caught:
        model.generate(ids, **as_argument(out.past_key_values), max_new_tokens=2, disable_compile=True, **GREEDY)
    assert len(caught) == 1


def test_further_turns_need_nothing_either(model):
    ids, more = left_padded(1, 100)[0], torch.full((1, 7), 9)
    first = lb.generate(model, ids, "dense", 5, max_cache_len=200, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([first.sequences, more], 1)
    got = lb.generate(model, text, max_new_tokens=6, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(got, model.generate(text, max_new_tokens=6, **GREEDY))
