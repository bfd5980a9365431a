"""`lb.generate_many`: the output of a request does not depend on other requests."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from generation_cases import StopAt
from letters import letters
from marked import slow_case
from pool_cases import CHUNK, Collected, one_row
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

import hf_lowbit_kv as lb
from hf_lowbit_kv.requests import pool_steps

LENGTHS = (7, 33, 130, 300, 64)
FIXED = {"cache_options": SMALL_PAGES, "prefill_chunk_size": CHUNK, "progress": False}
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "top_p": {"do_sample": True, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "eos": {"do_sample": True, "eos_token_id": list(range(0, 160, 10))},
    "min_new_tokens": {"do_sample": True, "eos_token_id": list(range(0, 160, 3)), "min_new_tokens": 5},
    "criterion": {"do_sample": False, "stopping_criteria": [StopAt(70)]},
}


@pytest.fixture(scope="module")
def models(one_thread):
    return tiny_models("llama")


@pytest.fixture(scope="module")
def model(models):
    return models[0]


@pytest.fixture
def texts():
    return [torch.randint(3, 158, (length,)) for length in LENGTHS]


def seeded_requests(texts, **more):
    return [{"input_ids": text, "seed": seed, **more} for seed, text in enumerate(texts)]


def tokens_of(results):
    return [result.generated_tokens for result in results]


def transformers_own(model, texts, new_tokens=20, **options):
    """What transformers writes after each text, in a batch of one, with its own cache."""
    found = []
    for seed, text in enumerate(texts):
        torch.manual_seed(seed)
        out = model.generate(text[None], max_new_tokens=new_tokens, pad_token_id=0, **options)
        found.append(out[0, len(text) :].tolist())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_dense_pages_write_what_transformers_writes(models, texts, mode):
    """Ragged prompts, chunks, rows that wait, seeds, options; nothing is shared."""
    ours, theirs = models
    options = MODES[mode] | {"pad_token_id": 0}
    found = lb.generate_many(ours, seeded_requests(texts), "dense", max_new_tokens=20, max_rows=3, **FIXED, **options)
    assert tokens_of(found) == transformers_own(theirs, texts, **MODES[mode])
    assert [result.prompt_ids for result in found] == [text.tolist() for text in texts]
    ends = MODES[mode].get("eos_token_id", ())
    for result in found:
        stopped = result.generated_tokens[-1] in ends or (
            "stopping_criteria" in MODES[mode] and len(result.prompt_ids) >= 50
        )
        assert result.finish_reason == ("stop" if stopped else "length")
        assert len(result.timestamps) == len(result.generated_tokens)


@pytest.mark.parametrize(
    ("rows", "preset"),
    [
        *((1, "kivi-2"), (4, "kivi-4-sink"), (4, "kv4-hadamard")),
        *(slow_case(1, "kivi-4-sink"), slow_case(4, "kivi-2"), slow_case(1, "kv4-hadamard")),
    ],
)
def test_packed_pages_write_what_one_row_writes(model, texts, preset, rows):
    """With and without other requests, prompts are cut at the same places."""
    options = {"max_new_tokens": 20, "max_rows": rows, "do_sample": False, "share_prefixes": False}
    found = lb.generate_many(model, texts, preset, **options, **FIXED)
    assert tokens_of(found) == [one_row(model, text, preset) for text in texts]


def test_rows_that_end_in_one_step(models, texts):
    ours, theirs = models
    same = [texts[0]] * 4
    found = lb.generate_many(ours, same * 2, "dense", max_new_tokens=5, max_rows=4, do_sample=False, **FIXED)
    assert tokens_of(found) == transformers_own(theirs, same * 2, 5, do_sample=False)


def test_prompts_that_begin_alike_share_pages(models, texts, monkeypatch):
    ours, theirs = models
    begin = texts[3]
    prompts = [torch.cat([begin[:200], text]) for text in texts]
    chunks = []
    prefill = pool_steps.PoolSteps.prefill
    monkeypatch.setattr(
        pool_steps.PoolSteps,
        "prefill",
        lambda self, row, ids: (chunks.append((row.length, row.length + len(ids))), prefill(self, row, ids))[1],
    )
    found = lb.generate_many(ours, prompts, "dense", max_new_tokens=12, max_rows=2, do_sample=False, **FIXED)
    # after a prefix of 160 tokens, too, prompts are divided at multiples of the chunk size
    assert {stop for _, stop in chunks} <= {*range(0, 1000, CHUNK), *map(len, prompts)}
    assert (160, 192) in chunks
    assert tokens_of(found) == transformers_own(theirs, prompts, 12, do_sample=False)
    # the first has 207 + 12 tokens: after 160 of them in pages of 32 come at least the residual 32
    assert [result.cached_tokens for result in found] == [0, 160, 192, 192, 192]
    apart = lb.generate_many(
        ours, prompts, "dense", max_new_tokens=12, max_rows=2, do_sample=False, share_prefixes=False, **FIXED
    )
    assert [result.cached_tokens for result in apart] == [0] * 5


@pytest.mark.parametrize("preset", ["dense", "kivi-4-sink"])
def test_a_store_keeps_prompts_from_call_to_call(models, texts, preset):
    """A prompt that continues from a stored one is read from there; the same one ends within it."""
    ours, theirs = models
    store = lb.PrefixStore("1GB")
    options = {"max_new_tokens": 10, "do_sample": False, "share_prefixes": False, "prefixes": store}
    first = lb.generate_many(ours, texts[3:4], preset, **options, **FIXED)
    again = [torch.cat([texts[3], texts[1]]), texts[3], torch.cat([texts[3][:150], texts[2]])]
    found = lb.generate_many(ours, again, preset, **options, **FIXED)
    assert [result.error for result in found] == [None] * 3
    assert first[0].cached_tokens == 0
    assert all(result.cached_tokens >= 96 for result in found)
    assert found[1].generated_tokens == first[0].generated_tokens or preset != "dense"
    if preset == "dense":
        assert tokens_of(found) == transformers_own(theirs, again, 10, do_sample=False)


def test_shared_prefixes_go_where_memory_is_needed(models, texts):
    """Kept pages are given up, the oldest first, before a request waits."""
    ours, theirs = models
    prompts = [torch.randint(3, 158, (200,)) for _ in range(12)]
    room = 40_000 + 2 * 2 * 2 * 64 * 4 * (2 * 220 + 2 * 64)
    found = lb.generate_many(
        ours, prompts, "dense", max_new_tokens=12, max_rows=2, do_sample=False, memory=room, **FIXED
    )
    assert tokens_of(found) == transformers_own(theirs, prompts, 12, do_sample=False)


@pytest.mark.parametrize("rows", [2, 5])
def test_several_sequences_of_a_prompt(models, texts, rows):
    """Forked where there is room, else read again: the same texts, and each has a seed of its own."""
    ours, theirs = models
    options = MODES["sampling"] | {"max_new_tokens": 15, "pad_token_id": 0}
    requests = seeded_requests(texts[1:4], num_return_sequences=3)
    found = lb.generate_many(ours, requests, "dense", max_rows=rows, **FIXED, **options)
    assert [(result.index, result.sequence) for result in found] == [(i, j) for i in range(3) for j in range(3)]
    firsts = transformers_own(theirs, texts[1:4], 15, **MODES["sampling"])
    assert tokens_of(found[::3]) == firsts
    single = [lb.generate_many(ours, [each], "dense", max_rows=3, **FIXED, **options) for each in requests]
    assert tokens_of(found) == [tokens for three in single for tokens in tokens_of(three)]
    assert len({tuple(tokens) for tokens in tokens_of(found[:3])}) == 3


def test_logprobs_are_those_that_tokens_were_drawn_with(models, texts):
    ours, theirs = models
    options = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}
    (found,) = lb.generate_many(
        ours, [{"input_ids": texts[1], "seed": 3, "logprobs": True}], "dense", max_new_tokens=9, **FIXED, **options
    )
    torch.manual_seed(3)
    out = theirs.generate(texts[1][None], max_new_tokens=9, output_scores=True, return_dict_in_generate=True, **options)
    expected = theirs.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)[0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_texts_messages_and_stop_strings(model):
    tokenizer = letters()
    long = {"max_new_tokens": 30, "do_sample": False, "suppress_tokens": [*range(33), *range(127, 160)]}
    (plain,) = lb.generate_many(model, ["abc"], "dense", tokenizer=tokenizer, **long, **FIXED)
    assert plain.prompt_ids == [97, 98, 99]
    assert plain.text == "".join(map(chr, plain.generated_tokens))
    stop = plain.text[3:5]
    requests = [
        {"prompt": "abc", "id": "stopped", "stop_strings": [stop]},
        [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}],
        {"messages": [{"role": "user", "content": "ab"}], "chat_template_kwargs": {"extra": "c"}},
        dict(tokenizer("abc", return_tensors="pt", return_token_type_ids=False)),
    ]
    found = lb.generate_many(model, requests, "dense", tokenizer=tokenizer, **long, **FIXED)
    assert [result.error for result in found] == [None] * 4
    assert found[0].text == plain.text[: plain.text.index(stop) + 2]
    assert (found[0].id, found[0].finish_reason) == ("stopped", "stop")
    for result in found[1:]:
        assert result.prompt_ids == [97, 98, 99]
        assert result.generated_tokens == plain.generated_tokens


def test_requests_share_what_finds_their_stop_strings(model, monkeypatch):
    """A criterion of transformers reads the whole vocabulary when it is made. It is made once for each list of stop
    strings, and the texts end where transformers' `generate` ends them."""
    tokenizer, ours, made = letters(), model, []
    wanted = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": [*range(33), *range(127, 160)]}
    (plain,) = lb.generate_many(ours, ["a"], "dense", tokenizer=tokenizer, **wanted, **FIXED)
    whole = plain.text
    stops = [
        [whole[0]],
        whole[6:9],
        [whole[2:12], "never here"],
        [f"a{whole[:4]}"],
        ["a longer text than there will be"],
    ]
    create = StopStringCriteria.__init__
    monkeypatch.setattr(
        StopStringCriteria, "__init__", lambda self, *args, **options: made.append(create(self, *args, **options))
    )
    requests = [{"prompt": prompt, "stop_strings": stop} for prompt in ("a", "a", "b") for stop in stops]
    results = lb.generate_many(ours, requests, "dense", tokenizer=tokenizer, **wanted, **FIXED)
    assert len(made) == len(stops)
    for request, result in zip(requests, results, strict=True):
        ids = tokenizer(request["prompt"], return_tensors="pt").input_ids
        expected = ours.generate(ids, tokenizer=tokenizer, stop_strings=request["stop_strings"], **wanted)
        assert result.prompt_ids + result.generated_tokens == expected[0].tolist()
    assert len({len(result.generated_tokens) for result in results}) > 3


def test_a_row_without_probabilities_does_not_end_others_that_have_stop_strings(model, monkeypatch):
    """Its token is no token, so that no stop string is looked for in it."""
    tokenizer = letters()

    class NoProbabilities(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("nan"))

    requests = [
        {"prompt": "abc", "stop_strings": ["never here"], "logits_processor": [NoProbabilities()], "do_sample": True},
        {"prompt": "abc", "stop_strings": ["never here"], "do_sample": False},
    ]
    broken, fine = lb.generate_many(model, requests, "dense", tokenizer=tokenizer, max_new_tokens=5, **FIXED)
    assert broken.finish_reason == "error"
    assert (fine.finish_reason, len(fine.generated_tokens)) == ("length", 5)


def test_messages_that_a_template_refuses_stop_no_other_request(model):
    """A template raises errors of its own kind, and often for a system message."""
    tokenizer = letters()
    tokenizer.chat_template = "{{ raise_exception('no system message') if messages[0].role == 'system' else 'abc' }}"
    wrong = [
        ([{"role": "system", "content": "a"}], "request 1: TemplateError: no system message"),
        ({"messages": 5}, "messages=5 is not allowed; it must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "messages must be dicts with a 'role'"),
        ({"prompt": "abc", "stop_strings": 5}, "stop_strings=5 is not allowed"),
    ]
    requests = ["abc", *(request for request, _ in wrong), [{"role": "user", "content": "a"}]]
    found = lb.generate_many(model, requests, "dense", tokenizer=tokenizer, max_new_tokens=3, do_sample=False, **FIXED)
    assert found[0].generated_tokens == found[-1].generated_tokens
    assert len(found[0].generated_tokens) == 3
    for (_, message), result in zip(wrong, found[1:-1], strict=True):
        assert message in result.error


class Broken(LogitsProcessor):
    """Raises at its third token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the processor broke")
        return scores


class Spoiled(LogitsProcessor):
    """After so many tokens one score is this number."""

    def __init__(self, number, after):
        self.number, self.left = number, after

    def __call__(self, input_ids, scores):
        self.left -= 1
        return scores if self.left >= 0 else scores.index_fill(1, torch.tensor([7]), self.number)


def test_a_streamer_gets_prompt_and_tokens(model, texts):
    streamer = Collected()
    requests = [{"input_ids": texts[0], "streamer": streamer}, texts[1]]
    first, _ = lb.generate_many(model, requests, max_new_tokens=6, do_sample=False, **FIXED)
    assert streamer.pieces == [texts[0].tolist(), *([token] for token in first.generated_tokens)]
    assert streamer.ended


def test_the_error_of_one_request_does_not_stop_the_others(model, texts):
    requests = [
        texts[0],
        {"input_ids": texts[1], "logits_processor": [Broken()]},
        {"input_ids": texts[2], "streamer": Collected(fails_at=4)},
        {"input_ids": texts[3], "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)]},
    ]
    found = lb.generate_many(model, requests, "dense", max_new_tokens=20, do_sample=False, **FIXED)
    assert [result.finish_reason for result in found] == ["length", "error", "error", "length"]
    assert found[1].error == "RuntimeError: the processor broke"
    assert len(found[1].generated_tokens) == 2
    assert found[2].error == "RuntimeError: the streamer broke"
    assert found[0].generated_tokens == one_row(model, texts[0], "dense")


def test_a_request_that_does_not_fit_gets_an_error(model, texts):
    small = 30_000 + 2 * 2 * 2 * 64 * 4 * 3 * 64  # windows and pages of some 100 tokens
    options = {"max_new_tokens": 20, "do_sample": False, "memory": small}
    found = lb.generate_many(model, texts[:4], "dense", **options, **FIXED)
    assert [result.finish_reason for result in found] == ["length", "length", "length", "error"]
    assert "300 prompt tokens plus max_new_tokens=20 exceed the" in found[3].error
    assert tokens_of(found[:3]) == [one_row(model, text, "dense") for text in texts[:3]]


@pytest.mark.parametrize("where", ["one of several", "all", "beside one that is greedy"])
def test_probabilities_that_are_not_finite_end_one_request(models, texts, where):
    """As `generate` ends, whatever makes them so."""
    (model, theirs) = models
    options = {"max_new_tokens": 6, "do_sample": True}
    bad = [
        {"input_ids": texts[0], "temperature": 1e-300},
        {"input_ids": texts[1], "logits_processor": [Spoiled(float("nan"), 3)]},
        {"input_ids": texts[2], "logits_processor": [Spoiled(float("inf"), 0)]},
    ]
    good = [] if where == "all" else [{"input_ids": texts[3], "seed": 5, "do_sample": where == "one of several"}]
    found = lb.generate_many(model, [*bad, *good], "dense", **options, **FIXED)
    for result, request, written in zip(found, bad, (0, 3, 0), strict=False):
        assert (result.finish_reason, len(result.generated_tokens)) == ("error", written)
        assert "RuntimeError: the probabilities of the next token are not finite" in result.error
        ids, *more = request.values()
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            theirs.generate(ids[None], pad_token_id=0, **options, **dict(zip([*request][1:], more, strict=True)))
    for result, request in zip(found[3:], good, strict=True):
        torch.manual_seed(5)
        want = theirs.generate(texts[3][None], max_new_tokens=6, pad_token_id=0, do_sample=request["do_sample"])
        assert result.generated_tokens == want[0, len(texts[3]) :].tolist()


# ---- the order of things ----------------------------------------------------------------------------------------------


def test_a_short_request_ends_before_a_long_one_that_was_given_first(model, texts):
    requests = [{"input_ids": texts[0], "max_new_tokens": 100}, {"input_ids": texts[1], "max_new_tokens": 5}]
    found = list(lb.generate_many(model, requests, do_sample=False, as_completed=True, **FIXED))
    assert [result.index for result in found] == [1, 0]
    assert [len(result.generated_tokens) for result in found] == [5, 100]


def test_an_iterator_is_read_as_rows_become_free(model, texts):
    taken = []

    def requests():
        for number in range(6):
            taken.append(number)
            yield {"input_ids": texts[number % 2], "max_new_tokens": 8 + 30 * (number == 0)}

    found = []
    for result in lb.generate_many(model, requests(), max_rows=2, do_sample=False, as_completed=True, **FIXED):
        found.append(result)
        # two rows, and no request is read that has no row
        assert len(taken) <= len(found) + 2
    assert [result.index for result in found] == [1, 2, 3, 4, 5, 0]
    first, second = found[5], found[0]
    assert second.timestamps[0] < first.timestamps[-1]


def test_an_iterator_may_have_nothing_at_the_moment_or_something_wrong(model, texts):
    given = [None, texts[0], None, {"input_ids": [1], "id": "odd", "num_beams": 4}, None, texts[1], 5]
    found = lb.generate_many(model, iter(given), "dense", max_new_tokens=6, do_sample=False, max_rows=2, **FIXED)
    assert [result.index for result in found] == [0, 1, 2, 3]
    assert [result.finish_reason for result in found] == ["length", "error", "length", "error"]
    assert found[1].id == "odd"
    assert "num_beams=4" in found[1].error
    assert "request 3: 5 is not allowed" in found[3].error


def ideal_steps(lengths, rows):
    """Steps of rows that are never empty while requests wait; the first token of a request needs no step."""
    ends = [0] * rows
    for length in lengths:
        ends[ends.index(min(ends))] += length - 1
    return max(ends)


def test_steps_are_few(model, monkeypatch):
    taken = []
    decode = pool_steps.PoolSteps.decode
    monkeypatch.setattr(
        pool_steps.PoolSteps, "decode", lambda self, rows: (taken.append(len(rows)), decode(self, rows))[1]
    )
    lengths = (2 + torch.empty(60).exponential_(1 / 20)).int().clamp(max=100).tolist()
    requests = [{"input_ids": [5, 6, 7 + i], "max_new_tokens": length} for i, length in enumerate(lengths)]
    found = lb.generate_many(model, requests, max_rows=8, do_sample=False, **FIXED)
    assert [len(result.generated_tokens) for result in found] == lengths
    assert len(taken) <= 1.05 * ideal_steps(lengths, 8)
    assert sum(taken) == sum(lengths) - len(lengths)


def test_no_history_is_unpacked_into_one_tensor(model, texts, monkeypatch):
    """What a gather of the stored tokens would need is not called."""
    from hf_lowbit_kv.backends import operations

    def refuse(*args):
        raise AssertionError("the history was read back")

    monkeypatch.setattr(operations, "read", refuse)
    found = lb.generate_many(model, texts, max_new_tokens=5, do_sample=False, **FIXED)
    assert [result.error for result in found] == [None] * 5


# ---- ending early -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pools(monkeypatch):
    """The pools that were made."""
    made = []

    class Watched(pool_steps.RowPool):
        def __init__(self, *args):
            super().__init__(*args)
            self.bytes = self.memory.nbytes
            made.append(self)

    monkeypatch.setattr(pool_steps, "RowPool", Watched)
    return made


def test_ctrl_c_frees_the_pool_and_hands_over_what_was_written(model, texts, pools):
    requests = [
        {"input_ids": texts[0], "max_new_tokens": 3},
        {"input_ids": texts[1], "streamer": Collected(fails_at=8, error=KeyboardInterrupt())},
        {"input_ids": texts[2], "num_return_sequences": 2, "do_sample": True},
        texts[3],
        texts[4],
    ]
    with pytest.raises(lb.Interrupted, match="1 of 6 sequences had ended") as caught:
        lb.generate_many(model, requests, "dense", max_new_tokens=20, do_sample=False, max_rows=2, **FIXED)
    results = caught.value.results
    assert [(result.index, result.sequence) for result in results] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]
    assert [result.finish_reason for result in results] == ["length"] + ["cancelled"] * 5
    assert results[1].generated_tokens == one_row(model, texts[1], "dense")[: len(results[1].generated_tokens)]
    assert len(results[1].generated_tokens) >= 7
    assert isinstance(caught.value, KeyboardInterrupt)
    assert not pools[0].memory.groups
    # the model is as it was, and serves the next call
    assert tokens_of(lb.generate_many(model, texts[:1], "dense", max_new_tokens=20, do_sample=False, **FIXED)) == [
        one_row(model, texts[0], "dense")
    ]


def test_closing_frees_all_rows(models, texts, pools):
    theirs = models[1]
    before = theirs.config._attn_implementation
    running = lb.generate_many(theirs, texts, max_new_tokens=20, do_sample=False, as_completed=True, **FIXED)
    assert not pools
    next(running)
    assert theirs.config._attn_implementation == before  # between results the model is the caller's
    assert pools[0].rows
    running.close()
    assert not pools[0].memory.groups
    assert list(running) == []


def test_an_error_of_the_model_frees_the_pool(model, texts, pools, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the model broke")

    options = {"max_new_tokens": 20, "do_sample": False, "max_rows": 1}
    running = lb.generate_many(model, texts, as_completed=True, **options, **FIXED)
    next(running)
    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(RuntimeError, match="the model broke"):
        next(running)
    assert not pools[0].memory.groups


def test_calls_of_two_threads_follow_each_other(models, texts):
    ours = models[0]
    found, expected = {}, [one_row(ours, text, "dense") for text in texts]

    def ask(number):
        found[number] = lb.generate_many(ours, texts, "dense", max_new_tokens=20, do_sample=False, **FIXED)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens_of(found[0]) == tokens_of(found[1]) == expected
    spans = sorted((min(r.timestamps[0] for r in some), max(r.timestamps[-1] for r in some)) for some in found.values())
    assert spans[0][1] < spans[1][0]


# ---- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["3MB", "700 kB", 5_000_000])
def test_memory_is_kept_to(model, pools, memory):
    requests = ({"input_ids": torch.randint(3, 158, (200,))} for _ in range(12))
    found = lb.generate_many(model, requests, max_new_tokens=10, do_sample=False, memory=memory, **FIXED)
    assert [result.error for result in found] == [None] * 12
    assert pools[0].slots >= 1


def test_a_pool_takes_no_more_than_memory_says(model):
    from hf_lowbit_kv.requests.memory_budget import pool_size
    from hf_lowbit_kv.requests.pool_steps import read_once, stored_layers
    from hf_lowbit_kv.requests.row_pool import RowPool

    cache = lb.from_preset("kivi-4-sink", model, max_cache_len=32, **SMALL_PAGES)
    read_once(model, cache, 2)
    layers = stored_layers(cache)
    for memory in (300_000, 1_000_000, 30_000_000):
        for limits in (None, [100] * 500, [5000, 20, 20]):
            for rows in (None, 3):
                size = pool_size(layers, memory, limits, 8192, rows, True)
                pool = RowPool(layers, *size)
                sinks = size.slots * sum(x.nbytes for pair in pool.memory.sinks(0) for x in pair)
                assert pool.memory.nbytes + sinks <= memory
                if limits is None:
                    assert pool.memory.nbytes + sinks > 0.8 * memory or size.slots == rows


@pytest.mark.parametrize("tokens", [10**9, 1000])
def test_a_request_that_can_never_fit_gets_no_memory(model, texts, pools, tokens):
    """It is more than the model has positions, or than there is memory. The others get the pool that they get without it."""
    options = {"do_sample": False, "memory": 10**9 if tokens > 1000 else 700_000, **FIXED}
    good = [{"input_ids": text, "max_new_tokens": 5} for text in texts[:3]]
    bad = {"input_ids": texts[0], "max_new_tokens": tokens}
    without = lb.generate_many(model, good, "dense", **options)
    found = lb.generate_many(model, [good[0], bad, *good[1:]], "dense", **options)
    assert tokens_of(found[:1] + found[2:]) == tokens_of(without)
    assert [result.error is None for result in found] == [True, False, True, True]
    assert "tokens of a row: lower max_new_tokens or raise memory=" in found[1].error
    assert pools[1].bytes < 1.1 * pools[0].bytes


def test_one_long_request_fits_beside_many_short_ones(model, texts, pools):
    """Rows of the short ones must not take the memory that it needs."""
    settings = {
        "max_new_tokens": 600,
        "do_sample": False,
        "eos_token_id": list(range(160)),
        "memory": 1_700_000,
        **FIXED,
    }
    assert lb.generate_many(model, [[5, 6]], "dense", **settings)[0].error is None
    found = lb.generate_many(
        model, [[5, 6], *({"input_ids": [5], "max_new_tokens": 1} for _ in range(40))], "dense", **settings
    )
    assert [result.error for result in found] == [None] * 41
    assert pools[1].slots > 1


# ---- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "num_beams": (4, "num_beams=4"),
    "assistant_model": ("model", "assistant_model"),
    "prompt_lookup_num_tokens": (3, "prompt_lookup_num_tokens"),
    "pixel_values": (torch.zeros(1), "'pixel_values' is not known"),
    "max_new_tokenz": (3, "'max_new_tokenz' is not known: .* did you mean 'max_new_tokens'"),
    "per_layer": ({}, r"'per_layer' is .* pass it as lb.generate_many\(\.\.\., cache_options=\{'per_layer'"),
    "penalty_alpha": (0.6, "contrastive"),
    "output_scores": (True, "output_scores=True"),
    "guidance_scale": (2.0, "guidance_scale=2.0"),
    "past_key_values": (1, "past_key_values is not allowed"),
    "seed": (-1, "seed=-1"),
    "logprobs": (5, "logprobs=5"),
    "num_return_sequences": (2, "num_return_sequences"),
    "stop_strings": (["a"], "tokenizer=None: stop_strings"),
    "max_new_tokens": (0, "max_new_tokens=0"),
    "logits_processor": (3, "logits_processor=3"),
    "temperature": (0.0, r"`temperature` \(=0.0\) has to be a strictly positive"),
    "top_k": (-1, "top_k=-1 is not allowed; it must be an integer of 0 or more"),
    "top_p": (1.5, "top_p=1.5 is not allowed; it must be a number from 0 to 1"),
    "min_p": (2.0, "min_p=2.0 is not allowed; it must be a number from 0 to 1"),
    "max_time": (float("inf"), "max_time=inf is not allowed"),
    "eos_token_id": ([5, 1.5], r"eos_token_id=\[5, 1.5\] is not allowed"),
    "sequence_bias": ([[[400], 1.0]], "sequence_bias: token 400 is not one of the model's 160"),
    "prefix_allowed_tokens_fn": (5, "prefix_allowed_tokens_fn=5 is not allowed; it must be a function"),
    "generation_config": (5, "generation_config=5 is not allowed; it must be a GenerationConfig"),
    "watermarking_config": (5, "AttributeError: 'int' object has no attribute 'validate'"),
}
#: values of `num_return_sequences` that are no counts
NO_COUNTS = (0, -1, "2", 1.5, True)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["call", "every request"])
def test_what_cannot_be_served_is_refused_before_anything_is_allocated(model, texts, pools, name, where):
    value, message = REFUSED[name]
    many = {"max_new_tokens": 5, "do_sample": name in ("temperature", "top_k", "top_p", "min_p")}
    requests = texts if where == "call" else [{"input_ids": text, name: value} for text in texts[:2]]
    if where == "call":
        many[name] = value
    with pytest.raises((ValueError, TypeError), match=message):
        lb.generate_many(model, requests, **many, **FIXED)
    assert not pools


@pytest.mark.parametrize("way", ["list", "as_completed", "iterator"])
def test_bad_requests_of_a_list_are_results_with_errors(models, texts, way):
    """The others have the tokens that they have without it."""
    (model, theirs) = models
    bad = [
        ({"input_ids": [], "id": "nothing"}, "has no token"),
        ([3, 400], "token 400 is not one of"),
        ("a text", "tokenizer=None"),
        ({"input_ids": texts[1], "max_new_tokenz": 3}, "did you mean 'max_new_tokens'"),
        ({"input_ids": texts[1], "num_beams": 4}, "num_beams=4"),
        ({"input_ids": texts[1], "temperature": 0.0, "do_sample": True}, "`temperature`"),
        (5, "5 is not allowed"),
        (b"abc", "b'abc' is not allowed"),
        ({"input_ids": 5}, "input_ids=5 is not allowed; it must be integers"),
        ([True, 5], "input_ids must be integers"),
        ({"input_ids": texts[1], 5: 6}, "5 is not the name of an option"),
        ({"input_ids": texts[1], "watermarking_config": 5}, "AttributeError"),
    ]
    requests = [texts[0], *(request for request, _ in bad), texts[2]]
    results = lb.generate_many(
        model,
        iter(requests) if way == "iterator" else requests,
        "dense",
        max_new_tokens=4,
        do_sample=False,
        as_completed=way == "as_completed",
        **FIXED,
    )
    results = sorted(results, key=lambda result: result.index)
    assert [result.index for result in results] == list(range(len(requests)))
    assert [result.id for result in results] == ["0", "nothing", *map(str, range(2, len(requests)))]
    for (_, message), result in zip(bad, results[1:-1], strict=True):
        assert (result.finish_reason, result.generated_tokens) == ("error", [])
        assert f"request {result.index}: " in result.error
        assert message in result.error
    for text, result in ((texts[0], results[0]), (texts[2], results[-1])):
        ids = torch.as_tensor(text)[None]
        want = theirs.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert result.generated_tokens == want.tolist()


@pytest.mark.parametrize("way", ["list", "as_completed", "streamer"])
def test_the_longest_answers_of_a_list_begin_first(models, texts, way):
    """With one row, the order in which answers begin is that of their timestamps. Where somebody sees it, it stays as given."""
    (model, theirs), limits = models, [3, 9, 5, 9]
    requests = [
        {"input_ids": text, "max_new_tokens": most, "do_sample": False}
        for text, most in zip(texts, limits, strict=False)
    ]
    if way == "streamer":
        requests[0]["streamer"] = Collected()
    completed = way == "as_completed"
    results = list(lb.generate_many(model, requests, "dense", as_completed=completed, max_rows=1, **FIXED))
    results.sort(key=lambda result: result.index)
    assert [len(result.generated_tokens) for result in results] == limits
    begun = sorted(range(4), key=lambda index: results[index].timestamps[0])
    assert begun == ([1, 3, 2, 0] if way == "list" else [0, 1, 2, 3])
    pairs = zip(texts, limits, strict=False)
    assert tokens_of(results) == [transformers_own(theirs, [x], most, do_sample=False)[0] for x, most in pairs]


@pytest.mark.parametrize("value", NO_COUNTS)
def test_numbers_of_sequences_that_are_no_counts(model, texts, pools, value):
    message = f"num_return_sequences={value!r} is not allowed; it must be an integer of 1 or more"
    with pytest.raises(ValueError, match=message):
        lb.generate_many(model, texts, num_return_sequences=value, max_new_tokens=5, **FIXED)
    with pytest.raises(ValueError, match=f"request 0: {message}"):
        lb.generate_many(
            model, [{"input_ids": texts[0], "num_return_sequences": value}], max_new_tokens=5, do_sample=True, **FIXED
        )
    (of_iterator,) = lb.generate_many(
        model, iter([{"input_ids": texts[0], "num_return_sequences": value}]), max_new_tokens=5, **FIXED
    )
    assert of_iterator.finish_reason == "error"
    assert message in of_iterator.error


@pytest.mark.parametrize("as_completed", [False, True])
@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_no_requests_have_no_results(model, pools, kind, as_completed):
    assert list(lb.generate_many(model, kind([]), max_new_tokens=3, as_completed=as_completed, **FIXED)) == []
    assert kind is iter or not pools


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ("a text", "requests must be a list"),
        ({"input_ids": [1]}, "requests must be a list"),
        (torch.zeros(2, 3), "requests must be a list"),
        ([5], "request 0: 5 is not allowed"),
        ([[], ""], r"request 0: \[\] is not allowed"),
        ([[3, 400]], "request 0: token 400"),
        (None, "requests must be a list or an iterator of requests, not NoneType"),
        ([None], "request 0: None is not allowed"),
        ([torch.zeros(0, dtype=torch.long)], r"request 0: input_ids=.* has no token"),
        ([{"input_ids": [3, 4], "attention_mask": [0, 0]}], "has no token"),
        ([torch.zeros(2, 3, dtype=torch.long)], "a batch is several requests"),
        (["a text"], "tokenizer=None"),
        ([{"prompt": "a", "input_ids": [1]}], "must have one of"),
        ([{}], "must have one of"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "tokenizer=None|images"),
    ],
)
def test_requests_that_are_none(model, pools, requests, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lb.generate_many(model, requests, max_new_tokens=3, **FIXED)
    assert not pools


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "much"}, "much"),
        ({"memory": -1}, "memory=-1"),
        ({"memory": 1000}, "memory=1000 bytes are too few"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"prefill_chunk_size": "auto"}, "prefill_chunk_size='auto'"),
        ({"preset": "kivi-5"}, "kivi-5"),
        ({"cache_options": {"max_cache_len": 5}}, "max_cache_len"),
        ({"streamer": Collected()}, "streamer is not allowed for all"),
        ({"tokenizer": 5}, "tokenizer=5 is not allowed"),
        ({"share_prefixes": "no"}, "share_prefixes='no' is not allowed; it must be True or False"),
        ({"as_completed": 1}, "as_completed=1 is not allowed"),
    ],
)
def test_arguments_out_of_range(model, texts, pools, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lb.generate_many(model, texts, **{"max_new_tokens": 3, **FIXED, **arguments})
    assert not pools


def test_recurrent_layers_are_refused(pools):
    model = tiny_models("lfm2")[0]
    with pytest.raises(
        ValueError, match=r"layer 0 of Lfm2ForCausalLM keeps a state instead of tokens .*; use lb\.generate"
    ):
        lb.generate_many(model, [[5]], max_new_tokens=3)
    assert not pools


def test_many_small_requests_do_not_grow(model):
    import gc

    def held():
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    begin = time.perf_counter()
    counts = []
    requests = ({"input_ids": [3 + number % 100, 5], "max_new_tokens": 2} for number in range(300))
    for number, _ in enumerate(lb.generate_many(model, requests, max_rows=8, as_completed=True, **FIXED)):
        if number in (100, 290):
            counts.append(held())
    assert counts[1] <= counts[0] + 20
    assert time.perf_counter() - begin < 60


def test_weights_of_several_processes_are_refused(model):
    from transformers.distributed import DistributedConfig

    try:
        model.config.distributed_config = DistributedConfig(
            tp_size=2, tp_plan="auto"
        )  # as tensor_parallel models have it
        with pytest.raises(ValueError, match=r"spread over 2 processes .* would not schedule alike"):
            lb.generate_many(model, [[5, 6]], max_new_tokens=2)
    finally:
        model.config.__dict__.pop("distributed_config", None)


def test_more_tokens_than_the_model_has_positions_are_refused(model):
    """In a list as in an iterator."""
    most = model.config.max_position_embeddings - 2
    requests = [{"input_ids": [5, 6], "max_new_tokens": most + extra} for extra in (1, 10**6)]
    for given in (requests, iter(requests)):
        for result in lb.generate_many(model, given, max_rows=1, **FIXED):
            assert (result.finish_reason, result.generated_tokens) == ("error", [])
            assert f"exceed the {most + 2} tokens of a row" in result.error


def test_the_code_of_the_page_runs(model, capsys, monkeypatch, tmp_path):
    """All blocks of docs/many-requests.md. tests/package/test_examples.py runs those of docs/server.md."""
    for loader, what in ((AutoModelForCausalLM, model), (AutoTokenizer, letters())):
        monkeypatch.setattr(loader, "from_pretrained", lambda *_, what=what, **__: what)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).resolve().parents[2] / "docs" / "many-requests.md").read_text(encoding="utf-8")
    known = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block.replace("max_new_tokens=200", "max_new_tokens=8"), "many-requests.md", "exec"), known)
    out = capsys.readouterr().out
    assert all(f"q{number} " in out for number in range(4))
    assert "lower max_new_tokens or raise memory=" in out
