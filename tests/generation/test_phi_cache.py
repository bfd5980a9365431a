"""Phi's models drop a cache whose text grows beyond `original_max_position_embeddings`. `lb.generate` and `lb.enable` keep it.
Every step gives what the whole text gives that is read without a cache."""

import inspect
import warnings

import pytest
import torch
from cases import tiny_models
from chat_cases import tokenizer_of, words
from fake_graph import READS, FakeGraph
from length_rope_cases import LIMIT, PHI, error, ids_of, left_padding, phi_models
from marked import slow_case
from transformers import DynamicCache, modeling_rope_utils

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument, cache_in
from hf_lowbit_kv.generation import prefill, recording

pytestmark = pytest.mark.host
GREEDY = {"do_sample": False, "pad_token_id": 0}
OUTPUTS = {"return_dict_in_generate": True, "output_logits": True}


def options_of(tokens):
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, **GREEDY, **OUTPUTS}


OPTIONS = options_of(12)
SMALL = {"page_size": 32, "residual": 32}


@pytest.fixture(scope="module", params=PHI)
def models(request):
    return phi_models(request.param)


@pytest.fixture(scope="module")
def phi3():
    return phi_models("phi3")


def passes_of(model, seen):
    """Adds the number of tokens of each pass to `seen`."""
    return model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )


@pytest.mark.parametrize(
    ("entry", "tokens"),
    [
        *(("generate", tokens) for tokens in (60, LIMIT - 5, LIMIT, LIMIT + 1, 150)),
        *(("enable", LIMIT - 5), slow_case("enable", LIMIT), slow_case("enable", 150)),
    ],
)
def test_every_step_is_that_of_the_whole_text(models, tokens, entry):
    ours, theirs = models
    prompt = left_padding(ids_of(tokens), [0])
    truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
    seen = []
    hook = passes_of(ours, seen)
    if entry == "generate":
        out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, **OPTIONS)
    else:
        with lb.enable(ours, "dense", **SMALL):
            out = ours.generate(**prompt, **OPTIONS)
    hook.remove()
    assert error(out, truth) < 2e-3
    cache = cache_in(out)
    assert isinstance(cache, lb.LowBitCache)
    assert int(cache.get_seq_length()) == tokens + 11
    steps = [1] * 11
    if tokens <= LIMIT < tokens + 11:
        steps[LIMIT - tokens] = LIMIT + 1  # reads the whole text
    assert seen == [tokens, *steps]


@pytest.mark.parametrize("padding", [(7, 9), (3, 0)])
def test_padded_rows_change_with_the_longest_row(models, padding):
    """The text is read again when the longest row passes the limit: not when the columns do, and once."""
    ours, theirs = models
    columns = LIMIT + min(padding) - 4
    prompt = left_padding(ids_of(columns, 2), padding)
    truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
    seen = []
    hook = passes_of(ours, seen)
    out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, **OPTIONS)
    hook.remove()
    assert error(out, truth) < 2e-3
    assert seen == [columns, 1, 1, 1, 1, columns + 5, 1, 1, 1, 1, 1, 1]


def test_packed_text_that_passes_the_limit_equals_a_fresh_read(phi3):
    ours, _ = phi3
    prompt = left_padding(ids_of(LIMIT - 3), [0])
    out = lb.generate(ours, **prompt, preset="kivi-2", cache_options=SMALL, **OPTIONS)
    begin = left_padding(out.sequences[:, : LIMIT + 1].clone(), [0])
    fresh = lb.generate(ours, **begin, preset="kivi-2", cache_options=SMALL, **options_of(8))
    assert torch.equal(out.sequences, fresh.sequences)
    assert torch.equal(torch.cat(out.logits[-8:]), torch.cat(fresh.logits))


@pytest.mark.parametrize("step", ["recorded", "eager"])
def test_recorded_steps_do_not_pass_the_limit_with_old_keys(phi3, monkeypatch, step):
    """The step at the limit reads the whole text; steps of the next call are recorded in both parts."""
    ours, theirs = phi3
    graphs = []
    switches_in_place = "copy_" in inspect.getsource(modeling_rope_utils.dynamic_rope_update)

    def make():
        graphs.append(
            FakeGraph(() if switches_in_place else READS)
        )  # the oldest transformers reads a value from the device
        return graphs[-1]

    monkeypatch.setattr(recording, "graphs_for", lambda device: make)
    prompt = left_padding(ids_of(LIMIT - 6), [0])
    options = options_of(16)
    truth = theirs.generate(**prompt, use_cache=False, **options)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*cannot be recorded.*")
            out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, step=step, **options)
        assert error(out, truth) < 2e-3
    assert (sum(graph.replays for graph in graphs) > 20) == (step == "recorded" and switches_in_place)
    lb.release(ours)


@pytest.mark.parametrize("entry", ["generate", "enable"])
def test_a_further_turn_that_passes_the_limit_is_read_whole(phi3, entry):
    ours, theirs = phi3
    cache = None
    text = ids_of(50)
    for turn in range(2):
        prompt = left_padding(text, [0])
        truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
        if entry == "generate":
            options = (
                {"preset": "dense", "cache_options": SMALL, "max_cache_len": 512} if cache is None else {"cache": cache}
            )
            out = lb.generate(ours, **prompt, **options, **OPTIONS)
        else:
            with lb.enable(ours, "dense", **SMALL):
                out = ours.generate(**prompt, **({} if cache is None else as_argument(cache)), **OPTIONS)
        assert error(out, truth) < 2e-3, turn
        cache = cache_in(out)
        assert isinstance(cache, lb.LowBitCache)
        text = torch.cat([out.sequences, ids_of(60, seed=2)], 1)


def test_beams_pass_the_limit(phi3):
    ours, theirs = phi3
    prompt = left_padding(ids_of(LIMIT - 5), [0])
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": 3, "pad_token_id": 0}
    truth = theirs.generate(**prompt, use_cache=False, **options)
    with lb.enable(ours, "dense", **SMALL):
        assert torch.equal(ours.generate(**prompt, **options), truth)


@pytest.mark.parametrize("part", ["chunks", "embeddings", "newest"])
def test_a_text_that_the_call_does_not_have_whole_goes_on_as_in_transformers(phi3, part):
    """Phi's own method does not see that such a text is long, and keeps the cache. That is announced once."""
    ours, theirs = phi3
    cache, prompt = DynamicCache(config=theirs.config), left_padding(ids_of(80 if part == "newest" else 130), [0])
    if part == "newest":
        theirs.generate(**prompt, **as_argument(cache), **OPTIONS)
    calls = {
        "chunks": {**prompt, "prefill_chunk_size": 64},
        "embeddings": {"inputs_embeds": theirs.get_input_embeddings()(prompt["input_ids"][:, : LIMIT - 4]).detach()},
        "newest": {"input_ids": ids_of(30, seed=7), "attention_mask": torch.ones(1, 121, dtype=torch.long)},
    }
    truth = theirs.generate(**calls[part], **as_argument(cache), **OPTIONS)
    with lb.enable(ours, "dense", **SMALL):
        mine = (
            cache_in(ours.generate(**prompt, **OPTIONS)) if part == "newest" else lb.from_preset("dense", ours, **SMALL)
        )
        with pytest.warns(UserWarning, match=f"change beyond {LIMIT} tokens.*the answer differs") as caught:
            out = ours.generate(**calls[part], **as_argument(mine), **OPTIONS)
    assert len(caught) == 1
    assert error(out, truth) < 2e-3


def test_a_model_without_longrope_keeps_its_cache():
    ours, theirs = tiny_models("phi3", original_max_position_embeddings=LIMIT)
    prompt = left_padding(ids_of(LIMIT - 5), [0])
    truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
    seen = []
    hook = passes_of(ours, seen)
    out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, **OPTIONS)
    hook.remove()
    assert error(out, truth) < 2e-3
    assert seen == [LIMIT - 5, *[1] * 11]


def test_a_cache_for_plain_generate_warns_with_the_limit(models):
    ours, _ = models
    for model_or_config in (ours, ours.config):
        for make in (lambda of: lb.from_preset("kivi-2", of), lb.KIVICache, lb.LowBitCache):
            with pytest.warns(UserWarning, match=rf"drops every cache .* beyond {LIMIT} tokens .*lb\.generate"):
                make(model_or_config)


def test_caches_of_calls_do_not_warn(phi3):
    ours, _ = phi3
    lb.generate(ours, ids_of(8), preset="kivi-2", max_new_tokens=2, pad_token_id=0)
    with lb.enable(ours, "kivi-2"):
        lb.from_preset("kivi-2", ours)
        ours.generate(ids_of(8), max_new_tokens=2, pad_token_id=0)
    plain, _ = tiny_models("phi3", original_max_position_embeddings=4096, max_position_embeddings=4096)
    lb.from_preset("kivi-2", plain)
    lb.from_preset("kivi-2", tiny_models("llama")[0])


@pytest.mark.parametrize("size", [None, 64])
def test_chunks_of_a_prompt(phi3, monkeypatch, size):
    """The last chunk continues after a cache that ends below the limit, which Phi would drop. Chunks of the user's size equal a
    text read whole too: Phi would read it whole."""
    ours, theirs = phi3
    monkeypatch.setattr(prefill, "memory_of", lambda model: object())
    monkeypatch.setattr(prefill.ChunkedPrefill, "largest_chunk", lambda *args, **kwargs: 64)
    prompt = left_padding(ids_of(120), [0])
    truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
    seen = []
    hook = ours.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or [kwargs["input_ids"]])[0].shape[1]), with_kwargs=True
    )
    out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, prefill_chunk_size=size, **OPTIONS)
    hook.remove()
    assert error(out, truth) < 2e-3
    assert seen == [64, 56, *[1] * 11]


@pytest.mark.parametrize(("first", "then", "cached"), [(150, 150, 149), (60, 150, 0), (150, 60, 0), (150, -150, 64)])
def test_prefixes(phi3, first, then, cached):
    """The last text has another end than the stored one."""
    ours, theirs = phi3
    text, store = ids_of(150), lb.PrefixStore("100MB")
    lb.generate(
        ours,
        **left_padding(text[:, :first].clone(), [0]),
        preset="dense",
        cache_options=SMALL,
        prefixes=store,
        **OPTIONS,
    )
    ids = text[:, :then].clone() if then > 0 else torch.cat([text[:, :110], ids_of(40, seed=8)], 1)
    prompt = left_padding(ids, [0])
    truth = theirs.generate(**prompt, use_cache=False, **OPTIONS)
    out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL, prefixes=store, **OPTIONS)
    assert error(out, truth) < 2e-3
    assert cache_in(out).cached_tokens == cached


def test_chat_reads_the_conversation_whole_where_it_passes_the_limit(phi3):
    ours, theirs = phi3
    tokenizer = tokenizer_of()
    chat = lb.Chat(ours, tokenizer, "dense", max_length=400, max_new_tokens=6, cache_options=SMALL, **GREEDY)
    for turn, count in enumerate((40, 30, 20, 40)):
        messages = [*chat.messages, {"role": "user", "content": words(count, turn)}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = left_padding(ids["input_ids"].clone(), [0])
        truth = theirs.generate(**prompt, use_cache=False, max_new_tokens=6, **GREEDY)
        answer = chat.send(messages[-1]["content"])
        assert answer == tokenizer.decode(truth[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True), turn
