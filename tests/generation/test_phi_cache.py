"""Phi's models drop a cache whose text grows beyond `original_max_position_embeddings`. `lb.generate` and `lb.enable` keep it.
Every step gives what the whole text gives that is read without a cache."""

import contextlib
import warnings

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from chat_cases import tokenizer_of
from fake_graph import READS, FakeGraph
from generation_cases import GREEDY
from length_rope_cases import LIMIT, PHI, SWITCHES_IN_PLACE, check_chat, error, ids_of, left_padding, phi_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument, cache_in
from hf_lowbit_kv.generation import prefill, recording

pytestmark = pytest.mark.host
OUTPUTS = {"return_dict_in_generate": True, "output_logits": True}


def options_of(tokens):
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, **GREEDY, **OUTPUTS}


OPTIONS = options_of(12)


@pytest.fixture(scope="module", params=PHI)
def models(request):
    return phi_models(request.param)


@pytest.fixture(scope="module")
def phi3():
    return phi_models("phi3")


@contextlib.contextmanager
def passes_of(model):
    """The number of tokens of each pass within the context."""
    seen = []
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])):
        yield seen


def dense(model, prompt, **options):
    options = {"preset": "dense", "cache_options": SMALL_PAGES, **OPTIONS, **options}
    return lb.generate(model, **prompt, **options)


def whole(model, prompt, **options):
    """What transformers writes that reads the whole text in every step."""
    return model.generate(**prompt, use_cache=False, **OPTIONS | options)


@pytest.mark.parametrize(
    ("entry", "tokens"),
    [
        *(("generate", tokens) for tokens in (LIMIT - 5, LIMIT, LIMIT + 1)),
        *(pytest.param("generate", tokens, marks=pytest.mark.slow) for tokens in (60, 150)),
        *(
            ("enable", LIMIT - 5),
            pytest.param("enable", LIMIT, marks=pytest.mark.slow),
            pytest.param("enable", 150, marks=pytest.mark.slow),
        ),
    ],
)
def test_every_step_is_that_of_the_whole_text(models, tokens, entry):
    ours, theirs = models
    prompt = left_padding(ids_of(tokens))
    truth = whole(theirs, prompt)
    with passes_of(ours) as seen:
        if entry == "generate":
            out = dense(ours, prompt)
        else:
            with lb.enable(ours, "dense", **SMALL_PAGES):
                out = ours.generate(**prompt, **OPTIONS)
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
    truth = whole(theirs, prompt)
    with passes_of(ours) as seen:
        out = dense(ours, prompt)
    assert error(out, truth) < 2e-3
    assert seen == [columns, 1, 1, 1, 1, columns + 5, 1, 1, 1, 1, 1, 1]


def test_packed_text_that_passes_the_limit_equals_a_fresh_read(phi3):
    ours, _ = phi3
    prompt = left_padding(ids_of(LIMIT - 3))
    out = lb.generate(ours, **prompt, preset="kivi-2", cache_options=SMALL_PAGES, **OPTIONS)
    begin = left_padding(out.sequences[:, : LIMIT + 1].clone())
    fresh = lb.generate(ours, **begin, preset="kivi-2", cache_options=SMALL_PAGES, **options_of(8))
    assert torch.equal(out.sequences, fresh.sequences)
    assert torch.equal(torch.cat(out.logits[-8:]), torch.cat(fresh.logits))


@pytest.mark.parametrize("step", ["recorded", "eager"])
def test_recorded_steps_do_not_pass_the_limit_with_old_keys(phi3, monkeypatch, step):
    """The step at the limit reads the whole text; steps of the next call are recorded in both parts."""
    ours, theirs = phi3
    graphs = []

    def make():
        graphs.append(FakeGraph(() if SWITCHES_IN_PLACE else READS))
        return graphs[-1]

    monkeypatch.setattr(recording, "graphs_for", lambda device: make)
    prompt = left_padding(ids_of(LIMIT - 6))
    options = options_of(16)
    truth = whole(theirs, prompt, **options)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*cannot be recorded.*")
            out = dense(ours, prompt, step=step, **options)
        assert error(out, truth) < 2e-3
    assert (sum(graph.replays for graph in graphs) > 20) == (step == "recorded" and SWITCHES_IN_PLACE)
    lb.release(ours)


@pytest.mark.parametrize("entry", ["generate", "enable"])
def test_a_further_turn_that_passes_the_limit_is_read_whole(phi3, entry):
    ours, theirs = phi3
    cache = None
    text = ids_of(50)
    for turn in range(2):
        prompt = left_padding(text)
        truth = whole(theirs, prompt)
        if entry == "generate" and cache is None:
            out = dense(ours, prompt, max_cache_len=512)
        elif entry == "generate":
            out = lb.generate(ours, **prompt, cache=cache, **OPTIONS)
        else:
            with lb.enable(ours, "dense", **SMALL_PAGES):
                out = ours.generate(**prompt, **({} if cache is None else as_argument(cache)), **OPTIONS)
        assert error(out, truth) < 2e-3, turn
        cache = cache_in(out)
        assert isinstance(cache, lb.LowBitCache)
        text = torch.cat([out.sequences, ids_of(60, seed=2)], 1)


def test_beams_pass_the_limit(phi3):
    ours, theirs = phi3
    prompt = left_padding(ids_of(LIMIT - 5))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": 3, "pad_token_id": 0}
    truth = theirs.generate(**prompt, use_cache=False, **options)
    with lb.enable(ours, "dense", **SMALL_PAGES):
        assert torch.equal(ours.generate(**prompt, **options), truth)


@pytest.mark.parametrize("part", ["chunks", "embeddings", "newest"])
def test_a_text_that_the_call_does_not_have_whole_goes_on_as_in_transformers(phi3, part):
    """Phi's own method does not see that such a text is long, and keeps the cache. That is announced once."""
    ours, theirs = phi3
    cache, prompt = DynamicCache(config=theirs.config), left_padding(ids_of(80 if part == "newest" else 130))
    if part == "newest":
        theirs.generate(**prompt, **as_argument(cache), **OPTIONS)
    calls = {
        "chunks": {**prompt, "prefill_chunk_size": 64},
        "embeddings": {"inputs_embeds": theirs.get_input_embeddings()(prompt["input_ids"][:, : LIMIT - 4]).detach()},
        "newest": {"input_ids": ids_of(30, seed=7), "attention_mask": torch.ones(1, 121, dtype=torch.long)},
    }
    truth = theirs.generate(**calls[part], **as_argument(cache), **OPTIONS)
    with lb.enable(ours, "dense", **SMALL_PAGES):
        mine = (
            cache_in(ours.generate(**prompt, **OPTIONS))
            if part == "newest"
            else lb.from_preset("dense", ours, **SMALL_PAGES)
        )
        with pytest.warns(UserWarning, match=f"change beyond {LIMIT} tokens.*the answer differs") as caught:
            out = ours.generate(**calls[part], **as_argument(mine), **OPTIONS)
    assert len(caught) == 1
    assert error(out, truth) < 2e-3


def test_a_model_without_longrope_keeps_its_cache():
    ours, theirs = tiny_models("phi3", original_max_position_embeddings=LIMIT)
    prompt = left_padding(ids_of(LIMIT - 5))
    truth = whole(theirs, prompt)
    with passes_of(ours) as seen:
        out = dense(ours, prompt)
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
    prompt = left_padding(ids_of(120))
    truth = whole(theirs, prompt)
    with passes_of(ours) as seen:
        out = dense(ours, prompt, prefill_chunk_size=size)
    assert error(out, truth) < 2e-3
    assert seen == [64, 56, *[1] * 11]


@pytest.mark.parametrize(("first", "then", "cached"), [(150, 150, 149), (60, 150, 0), (150, 60, 0), (150, -150, 64)])
def test_prefixes(phi3, first, then, cached):
    """The last text has another end than the stored one."""
    ours, theirs = phi3
    text, store = ids_of(150), lb.PrefixStore("100MB")
    dense(ours, left_padding(text[:, :first].clone()), prefixes=store)
    ids = text[:, :then].clone() if then > 0 else torch.cat([text[:, :110], ids_of(40, seed=8)], 1)
    prompt = left_padding(ids)
    truth = whole(theirs, prompt)
    out = dense(ours, prompt, prefixes=store)
    assert error(out, truth) < 2e-3
    assert cache_in(out).cached_tokens == cached


def test_chat_reads_the_conversation_whole_where_it_passes_the_limit(phi3):
    ours, theirs = phi3
    chat = lb.Chat(ours, tokenizer_of(), "dense", max_length=400, max_new_tokens=6, cache_options=SMALL_PAGES, **GREEDY)
    check_chat(chat, theirs, (40, 30, 20, 40), use_cache=False)
