"""`lb.enable`: every `generate` call of a model, and pipelines, decode with a low-bit cache."""

import contextlib
import copy

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

pytestmark = pytest.mark.host


@pytest.fixture
def model():
    """A model that its user loaded as always."""
    model = tiny_models("llama")[1]
    yield model
    lb.release(model)


def written(model, **options):
    ids, mask = left_padded(2, 200)
    torch.manual_seed(1)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY | options)


def cache_of(model, **options):
    return written(model, return_dict_in_generate=True, **options).past_key_values


def expected(preset="kivi-2", **options):
    ours = tiny_models("llama")[0]
    return written(ours, past_key_values=lb.from_preset(preset, ours), **options)


def test_every_call_gets_a_cache_of_the_preset(model):
    plain = written(model)
    lb.enable(model, "kivi-2", sink=16)
    cache = cache_of(model)
    assert isinstance(cache, lb.LowBitCache)
    assert (cache.preset, cache.spec.sink, cache.packed_layers[0].backend_shown != "") == ("kivi-2", 16, True)
    assert cache_of(model) is not cache
    lb.disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert type(cache_of(model)) is DynamicCache
    assert torch.equal(written(model), plain)


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: (ids, None),
        lambda ids: {"sequences": ids},
        torch.Tensor.tolist,
        lambda ids: ids[:, -1:],
        torch.Tensor.float,
    ],
    ids=["tuple", "dict", "list", "new ids only", "another tensor"],
)
def test_the_result_of_a_custom_loop_is_passed_on(model, form):
    """A store gets nothing that may be another text, and a further turn can use the cache."""

    def loop(model, input_ids, past_key_values=None, cache=None, **_):
        cache = cache if past_key_values is None else past_key_values
        model(input_ids, use_cache=True, **as_argument(cache))
        caches.append(cache)
        return form(result)

    caches, store = [], lb.PrefixStore()
    ids, result = torch.randint(3, 160, (1, 200)), torch.randint(3, 160, (1, 201))
    with lb.enable(model, "kivi-2", prefixes=store):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, custom_generate=loop)
        assert str(out) == str(form(result))
        assert len(store) == 0
        longer = torch.cat([ids, ids[:, -3:]], dim=1)
        options = {"attention_mask": torch.ones_like(longer), "max_new_tokens": 2, "past_key_values": caches[0]}
        assert model.generate(longer, **options, **GREEDY).shape == (1, 205)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_tokens_of_a_cache_given(model, options):
    results = []
    for run in (expected, lambda **options: written(model, **options)):
        with lb.enable(model, "kivi-2"):
            results.append(run(**options))
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_steps_are_recorded(model, graphs, options):
    want = expected(**options)
    with lb.enable(model, "kivi-2", fuse=False):
        for _ in range(2):  # an unused cache serves the next call, with its recordings
            assert torch.equal(written(model, **options), want)
        assert [graph.replays for graph in graphs] == [21]
        written(model, num_beams=3)
        assert len(graphs) == 1


def test_prompt_lookup_gets_a_growing_cache(model, graphs):
    ids = left_padded(1, 40)[0].repeat(1, 5)
    with lb.enable(model, "dense"):
        got = model.generate(ids, max_new_tokens=12, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(got, model.generate(ids, max_new_tokens=12, **GREEDY))
    assert not graphs


def test_prompt_lookup_after_stored_tokens_raises(model):
    """transformers stores the whole text again, after what is stored."""
    ids = left_padded(1, 40)[0].repeat(1, 5)
    cache = lb.from_preset("dense", model)
    with lb.enable(model, "dense"):
        text = model.generate(ids, max_new_tokens=12, **as_argument(cache), **GREEDY)
        with pytest.raises(ValueError, match=r"holds 211 tokens.*assisted decoding needs an empty cache"):
            model.generate(text, max_new_tokens=12, prompt_lookup_num_tokens=3, **as_argument(cache), **GREEDY)
        got = model.generate(text, max_new_tokens=12, **as_argument(cache), **GREEDY)
        assert torch.equal(got, model.generate(text, max_new_tokens=12, **GREEDY))


@pytest.mark.parametrize("packed", [False, True])
def test_an_assistant_calls_with_its_cache_again_and_again(model, packed):
    """Its cache is cropped between calls, and each call's text begins with what is left."""
    ids = left_padded(1, 60)[0].repeat(1, 3)
    assistant = tiny_models("llama", num_hidden_layers=1)[0]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, **GREEDY}
    with lb.enable(model, "dense"), lb.enable(assistant, "dense") if packed else contextlib.nullcontext():
        got = model.generate(ids, assistant_model=assistant, **options)
        assert torch.equal(got, model.generate(ids, **options))


def test_what_the_caller_asks_for_wins(model):
    with lb.enable(model, "kivi-2"):
        theirs = DynamicCache(config=model.config)
        assert cache_of(model, past_key_values=theirs) is theirs
        assert type(cache_of(model, cache_implementation="dynamic")) is DynamicCache
        assert cache_of(model, use_cache=False) is None


@pytest.mark.parametrize("recorded", [False, True])
def test_another_text_than_the_cache_holds_is_refused(model, monkeypatch, recorded):
    """Also one that is longer, which transformers answers as if it began with what is stored."""
    if recorded:
        in_place_of_graphs(monkeypatch)
    ids, mask = left_padded(2, 60)
    other = left_padded(2, 90, seed=1)[0]
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, **GREEDY}

    def goes_on(ids, cache, **more):
        everything = torch.cat([mask, torch.ones(2, ids.shape[1] - 60, dtype=mask.dtype)], 1)
        return model.generate(ids, attention_mask=everything, past_key_values=cache, **options | more)

    with lb.enable(model, "dense"):
        out = model.generate(ids, attention_mask=mask, **options)
        cache = out.past_key_values
        stored = int(cache.get_seq_length())
        with pytest.raises(ValueError, match=r"got a prompt of 60 tokens, but the cache holds 63 already"):
            goes_on(ids, cache)
        with pytest.raises(
            ValueError, match=r"inputs do not begin with the text that past_key_values holds: token 0 of row"
        ):
            goes_on(other, cache)
        assert int(cache.get_seq_length()) == stored
        text = torch.cat([out.sequences, other[:, :5]], 1)
        more = torch.ones(2, text.shape[1], dtype=mask.dtype)
        more[:, :60] = mask
        want = model.generate(text, attention_mask=more, **options).sequences
        assert torch.equal(goes_on(text, cache).sequences, want)
        # what was written then is part of the text too
        changed = torch.cat([want, other[:, :2]], 1)
        changed[1, 69] = 3 + changed[1, 69] % 5
        with pytest.raises(ValueError, match="token 69 of row 1"):
            goes_on(changed, cache)
        cache.crop(-1 * (int(cache.get_seq_length()) - 69))
        goes_on(changed, cache)


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("way", ["generate", "enable"])
def test_the_text_of_an_interrupted_call_is_compared(model, way, embeddings):
    """Its prompt, and the tokens after it, which the caller has not seen. Without them the cache goes on."""
    first, second, other = torch.randint(3, 150, (3, 1, 60))
    cache = lb.from_preset("dense", model, max_cache_len=256)

    class Interrupted:
        def __init__(self):
            self.calls = 0

        def __call__(self, ids, scores):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return scores

    def goes_on(ids, **options):
        prompt = {"inputs_embeds": model.get_input_embeddings()(ids)} if embeddings else {"input_ids": ids}
        options = {**prompt, "past_key_values": cache, "max_new_tokens": 6, **GREEDY, **options}
        return lb.generate(model, **options) if way == "generate" else model.generate(**options)

    with lb.enable(model, "dense") if way == "enable" else contextlib.nullcontext():
        goes_on(first[:, :40])
        cache.crop(40 - int(cache.get_seq_length()))
        with pytest.raises(KeyboardInterrupt):
            goes_on(first, logits_processor=[Interrupted()])
        assert int(cache.get_seq_length()) == 63
        for text in (torch.cat([first[:, :40], other], 1), torch.cat([first, second], 1)):
            with pytest.raises(ValueError, match="inputs do not begin with the text that past_key_values holds"):
                goes_on(text)
        cache.crop(-3)
        want = tiny_models("llama")[1].generate(text, max_new_tokens=6, **GREEDY)[:, 120:]
        assert torch.equal(goes_on(text)[:, -6:], want)


def test_the_new_tokens_alone_with_a_mask_for_all(model):
    """They are not compared. Neither is a text that beams have written."""
    ids, mask = left_padded(2, 60)
    everything = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], 1)
    with lb.enable(model, "dense"):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
        assert int(out.past_key_values.get_seq_length()) == 63
        last = out.sequences[:, -1:]
        new_only = model.generate(
            last, attention_mask=everything, past_key_values=out.past_key_values, max_new_tokens=3, **GREEDY
        )
        whole = model.generate(out.sequences, attention_mask=everything, max_new_tokens=3, **GREEDY)
        assert torch.equal(new_only[:, 1:], whole[:, 64:])
        assert out.past_key_values.text is None
        cache = lb.from_preset("dense", model)
        options = {"past_key_values": cache, "max_new_tokens": 4, **GREEDY}
        model.generate(ids, attention_mask=mask, num_beams=2, num_return_sequences=2, **options)
        assert cache.text is None


def test_nested_blocks_restore_the_outer_one(model):
    with lb.enable(model, "kivi-2"):
        with lb.enable(model, "kv8"):
            assert cache_of(model).preset == "kv8"
        assert cache_of(model).preset == "kivi-2"
        assert model.config._attn_implementation == "lowbit_kv"
    assert model.config._attn_implementation == "sdpa"
    assert type(cache_of(model)) is DynamicCache


def test_of_two_calls_the_later_wins_and_one_disable_undoes_both(model):
    lb.enable(model, "kivi-2")
    lb.enable(model, "kv8")
    assert cache_of(model).preset == "kv8"
    with lb.enable(model, "kivi-4"):
        assert cache_of(model).preset == "kivi-4"
    assert cache_of(model).preset == "kv8"
    lb.disable(model)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not enabled"):
        lb.disable(model)


def test_blocks_left_out_of_order(model):
    outer, inner = lb.enable(model, "kivi-2"), lb.enable(model, "kv8")
    outer.__exit__(None, None, None)
    assert cache_of(model).preset == "kv8"
    inner.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
    with lb.enable(model):
        lb.disable(model)
    assert type(cache_of(model)) is DynamicCache


def test_a_copy_is_enabled_by_itself(model):
    lb.enable(model, "kivi-2")
    copied = copy.deepcopy(model)
    lb.disable(model)
    assert cache_of(copied).preset == "kivi-2"
    assert torch.equal(written(copied), expected())
    lb.disable(copied)
    assert copied.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (["kivi-3"], {}, ValueError, "preset='kivi-3' is not known"),
        (["kivi-2"], {"sink": -1}, ValueError, "sink=-1 is not allowed"),
        (["kivi-2"], {"max_cache_len": 100}, ValueError, "max_cache_len is not allowed"),
    ],
)
def test_what_cannot_be_enabled_changes_nothing(model, arguments, options, error, message):
    before = set(vars(model))
    with pytest.raises(error, match=message):
        lb.enable(model, *arguments, **options)
    assert (model.config._attn_implementation, set(vars(model))) == ("sdpa", before)
