"""Rotary embeddings that change with the length. What this package reads in parts equals the text that is read whole. What the
user reads in parts equals transformers' cache read in the same parts, with a warning."""

import copy
import warnings

import pytest
import torch
from cases import SMALL_PAGES
from chat_cases import tokenizer_of
from fake_graph import READS, FakeGraph, in_place_of_graphs
from generation_cases import GREEDY
from length_rope_cases import (
    LIMIT,
    ROPES,
    SWITCHES_IN_PLACE,
    check_chat,
    error,
    ids_of,
    left_padding,
    longrope,
    rope_models,
)
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument, cache_in
from hf_lowbit_kv.cache.length_rope import LengthRope, length_rope
from hf_lowbit_kv.generation import prefill, recording, whole_prompt

pytestmark = pytest.mark.host
OPTIONS = {**GREEDY, "max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
PARTS = "keep their frequencies, so the answer differs"


@pytest.fixture(params=ROPES)
def models(request):
    return rope_models(request.param)


@pytest.fixture
def llama():
    return rope_models("longrope")


def dense(model, prompt, **options):
    return lb.generate(model, **prompt, preset="dense", cache_options=SMALL_PAGES, **OPTIONS, **options)


# ---- what this package cuts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(0,), (9, 60)])
@pytest.mark.parametrize("entry", ["generate", "enable"])
def test_automatic_chunks(models, entry, padding, monkeypatch):
    ours, theirs = models
    monkeypatch.setattr(prefill, "memory_of", lambda model: object())
    monkeypatch.setattr(prefill.ChunkedPrefill, "largest_chunk", lambda *args, **kwargs: 64)
    prompt = left_padding(ids_of(170, len(padding)), padding)
    truth = theirs.generate(**copy.deepcopy(prompt), **OPTIONS)
    passes = []
    ours.register_forward_pre_hook(
        lambda m, a, kw: passes.append((a or [kw["input_ids"]])[0].shape[1]), with_kwargs=True
    )
    if entry == "generate":
        out = dense(ours, prompt)
    else:
        in_place_of_graphs(monkeypatch)
        with lb.enable(ours, "dense", **SMALL_PAGES), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*cannot be recorded.*")
            out = ours.generate(**prompt, **OPTIONS)
    assert passes[:3] == [64, 64, 42]
    assert error(out, truth) < 2e-3


@pytest.mark.parametrize(
    ("first", "then", "hits"), [(60, 90, 1), (80, 170, 0), (140, 170, 1), (140, 90, 0), (120, 260, 1)]
)
def test_prefix_store(models, first, then, hits):
    """Texts on the same side of the limit share a prefix; with dynamic embeddings only below it."""
    ours, theirs = models
    if length_rope(ours).name == "dynamic" and max(first, then) > LIMIT:
        hits = 0
    text, store = ids_of(300), lb.PrefixStore("100MB")
    dense(ours, left_padding(text[:, :first]), prefixes=store)
    truth = theirs.generate(**left_padding(text[:, :then]), **OPTIONS)
    out = dense(ours, left_padding(text[:, :then]), prefixes=store)
    assert error(out, truth) < 2e-3
    assert store.hits == hits
    assert (cache_in(out).cached_tokens > 0) == bool(hits)


def test_a_text_of_exactly_the_limit_after_a_longer_one(models):
    """With dynamic embeddings it is read with the longer one's."""
    ours, theirs = models
    text, store, one = ids_of(450), lb.PrefixStore("100MB"), OPTIONS | {"max_new_tokens": 1}
    for ids, kept in ((text[:, :350], None), (text[:, 350:], store), (text[:, :20], None), (text[:, 350:435], store)):
        truth = theirs.generate(**left_padding(ids.clone()), **one)
        out = lb.generate(
            ours, **left_padding(ids.clone()), preset="dense", cache_options=SMALL_PAGES, prefixes=kept, **one
        )
        assert error(out, truth) < 2e-3


def test_prefixes_of_padded_rows(llama):
    """The longest row decides for all."""
    ours, theirs = llama
    text, store = ids_of(200), lb.PrefixStore("100MB")
    dense(ours, left_padding(text[:, :150]), prefixes=store)
    for padding in ((0, 70), (75, 80)):
        prompt = left_padding(text[:, :170].repeat(2, 1), padding)
        for row, count in enumerate(padding):
            prompt["input_ids"][row, count:] = text[0, : 170 - count]
        truth = theirs.generate(**copy.deepcopy(prompt), **OPTIONS)
        out = dense(ours, prompt, prefixes=store)
        assert error(out, truth) < 2e-3
        assert (cache_in(out).cached_tokens > 0) == (padding == (0, 70))


def test_prefixes_of_a_model_that_stores_its_ends():
    """The beginning of a text is read and stored first where layers slide."""
    ours, theirs = rope_models("longrope", "gpt_oss")
    text, store = ids_of(400), lb.PrefixStore("100MB")
    other = torch.cat([text[:, :120], ids_of(80, seed=5)], 1)
    for ids in (text[:, :90], other, text[:, :250], other):
        truth = theirs.generate(**left_padding(ids.clone()), **OPTIONS)
        assert error(dense(ours, left_padding(ids.clone()), prefixes=store), truth) < 2e-3
    assert store.hits >= 1


def test_chat(models):
    """A turn that passes the limit, and one after it."""
    ours, theirs = models
    chat = lb.Chat(ours, tokenizer_of(), "dense", max_length=400, max_new_tokens=6, cache_options=SMALL_PAGES, **GREEDY)
    check_chat(chat, theirs, (30, 55, 60, 20))


def test_chat_that_becomes_shorter_again(llama):
    ours, theirs = llama
    chat = lb.Chat(ours, tokenizer_of(), "dense", max_length=400, max_new_tokens=6, cache_options=SMALL_PAGES, **GREEDY)
    check_chat(chat, theirs, (110,))
    del chat.messages[:]
    check_chat(chat, theirs, (30,))


def test_forks(llama):
    ours, theirs = llama
    text = ids_of(60)
    out = dense(ours, left_padding(text), max_cache_len=400)
    short, long = cache_in(out).fork(2)
    for fork, more in ((short, 20), (long, 90)):
        ids = torch.cat([out.sequences, ids_of(more, seed=3)], 1)
        if more == 20:
            truth = theirs.generate(**left_padding(ids), **OPTIONS)
            assert error(lb.generate(ours, **left_padding(ids), cache=fork, **OPTIONS), truth) < 2e-3
            continue
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"'longrope' and change beyond 100 tokens.*this fork cannot go on to 154"
            ):
                lb.generate(ours, **left_padding(ids), cache=fork, **OPTIONS)
            assert int(fork.get_seq_length()) == 63
        fork.reset()
        truth = theirs.generate(**left_padding(ids), **OPTIONS)
        assert error(lb.generate(ours, **left_padding(ids), cache=fork, **OPTIONS), truth) < 2e-3


@pytest.mark.parametrize("capacity", [None, 300])
def test_nothing_is_left_of_a_text_that_was_cropped_whole(models, capacity):
    """Another text begins, also in a fork, and it is the one whose length counts."""
    ours, theirs = models
    cache = lb.from_preset("dense", ours, max_cache_len=capacity)
    with torch.no_grad():
        ours(ids_of(150), **as_argument(cache))
        for each in (cache, *cache.fork()):
            each.crop(-150)
            short = ids_of(20)
            assert torch.allclose(ours(short, **as_argument(each)).logits, theirs(short).logits, atol=1e-4)
        with pytest.warns(UserWarning, match="holds tokens of a text that had 20"):
            ours(ids_of(140), **as_argument(cache))


def test_generate_many_below_the_limit(models):
    ours, theirs = models
    requests = [ids_of(tokens, seed=tokens)[0].tolist() for tokens in (50, 70, 96)]
    results = lb.generate_many(
        ours, requests, preset="dense", max_new_tokens=4, memory="50MB", prefill_chunk_size=32, **GREEDY
    )
    for ids, result in zip(requests, results, strict=True):
        want = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=4, **GREEDY)
        assert result.generated_tokens == want[0, len(ids) :].tolist()


def test_generate_many_refuses_requests_beyond_the_limit(models):
    ours, _ = models
    requests = [ids_of(97)[0].tolist(), ids_of(20)[0].tolist()]
    refused, served = lb.generate_many(ours, requests, preset="dense", max_new_tokens=4, memory="50MB", **GREEDY)
    assert "beyond 100 tokens they look at the longest row" in refused.error
    assert len(served.generated_tokens) == 4


# ---- what the user cuts -----------------------------------------------------------------------------------------------


def test_chunks_of_the_users_size(llama):
    ours, theirs = llama
    prompt = left_padding(ids_of(170))
    stock = theirs.generate(
        **prompt, prefill_chunk_size=64, **as_argument(DynamicCache(config=theirs.config)), **OPTIONS
    )
    with pytest.warns(UserWarning, match=PARTS) as caught:
        out = dense(ours, prompt, prefill_chunk_size=64)
    assert len(caught) == 1
    assert error(out, stock) < 2e-3
    below = left_padding(ids_of(90))
    assert error(dense(ours, below, prefill_chunk_size=64), theirs.generate(**below, **OPTIONS)) < 2e-3


@pytest.mark.parametrize("entry", ["generate", "plain"])
def test_a_further_turn_of_the_user(models, entry):
    ours, theirs = models
    text, cache = ids_of(60), DynamicCache(config=theirs.config)
    stock = theirs.generate(**left_padding(text), **as_argument(cache), **OPTIONS)
    mine = lb.from_preset("dense", ours, max_cache_len=400 if entry == "generate" else None, **SMALL_PAGES)

    def ask(ids):
        call = ours.generate if entry == "plain" else lambda **options: lb.generate(ours, **options)
        return call(**left_padding(ids), **as_argument(mine), **OPTIONS)

    assert error(ask(text), stock) < 2e-3
    for turn, more in enumerate((60, 20)):
        text = torch.cat([stock.sequences, ids_of(more, seed=4)], 1)
        stock = theirs.generate(**left_padding(text), **as_argument(cache), **OPTIONS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = ask(text)
        assert error(out, stock) < 2e-3
        assert [PARTS in str(each.message) for each in caught] == ([True] if turn == 0 else [])


def test_steps_that_pass_the_limit(llama, monkeypatch):
    """As transformers' cache does: recorded where transformers switches in place, otherwise not recorded."""
    ours, theirs = llama
    prompt, options = left_padding(ids_of(LIMIT - 6)), {**OPTIONS, "max_new_tokens": 14}
    truth = theirs.generate(**prompt, **options)
    monkeypatch.setattr(recording, "graphs_for", lambda device: lambda: FakeGraph(() if SWITCHES_IN_PLACE else READS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cannot be recorded.*")
        for _ in range(2):
            out = lb.generate(ours, **prompt, preset="dense", cache_options=SMALL_PAGES, **options)
            assert error(out, truth) < 2e-3
    lb.release(ours)


# ---- what a cache knows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [60, 150])
def test_copies_know_with_which_embeddings_they_were_read(llama, tokens, tmp_path):
    ours, _ = llama
    cache = cache_in(dense(ours, left_padding(ids_of(tokens)), max_cache_len=400))
    cache.save_pretrained(tmp_path)
    for each in (cache, copy.deepcopy(cache), cache.fork()[0], lb.LowBitCache.from_pretrained(tmp_path, ours)):
        suits = [each.read_lengths.suits(each, length) for length in (90, 200)]
        assert suits == [tokens == 60, tokens == 150]
        each.crop(-20)
        assert each.read_lengths.suits(each, 200) == (tokens == 150)


def test_an_answer_that_passes_the_limit_suits_no_text(llama):
    ours, _ = llama
    cache = cache_in(dense(ours, left_padding(ids_of(98)), max_cache_len=400))
    assert not any(cache.read_lengths.suits(cache, length) for length in (90, 200))


def test_the_frequencies_of_a_part(models):
    """Positions of a part, as of a longer text: bits of the whole."""
    ours, _ = models
    rotary, x = ours.model.rotary_emb, torch.zeros(1, 1, 8)
    positions = torch.arange(300)[None]
    whole = rotary(x, positions)
    rotary(x, positions[:, :20])
    with whole_prompt.rope_of_whole_prompt(ours, torch.ones(1, 300)):
        part = rotary(x, position_ids=positions[:, 5:40])
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one[:, 5:40], other)
    short = rotary(x, positions[:, :40])
    assert not torch.allclose(short[0][:, 5:], part[0])


def test_kinds_of_layers_may_differ():
    kinds = {"full_attention": longrope(32), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ours, _ = rope_models("longrope", "llama")
    ours.config.rope_parameters = kinds
    assert length_rope(ours) == LengthRope((("longrope", LIMIT),))
    ours.config.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    assert length_rope(ours) is None
    both = LengthRope((("longrope", 100), ("dynamic", 200)))
    assert [both.agree(*pair) for pair in ((50, 90), (90, 150), (150, 190), (190, 250), (250, 260), (250, 250))] == [
        *(True, False, True, False, False, True)
    ]
