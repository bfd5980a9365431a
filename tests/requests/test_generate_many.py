"""`lb.generate_many`: the output of a request does not depend on other requests."""

import pytest
import torch
from generation_cases import StopAt
from pool_cases import CHUNK, FIXED, Collected, many, one_row, tokens_of, transformers_own
from tiny_tokenizers import letters
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import hf_lowbit_kv as lb
from hf_lowbit_kv.requests import pool_steps

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "top_p": {"do_sample": True, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "eos": {"do_sample": True, "eos_token_id": list(range(0, 160, 10))},
    "min_new_tokens": {"do_sample": True, "eos_token_id": list(range(0, 160, 3)), "min_new_tokens": 5},
    "criterion": {"do_sample": False, "stopping_criteria": [StopAt(70)]},
}


@pytest.fixture
def texts():
    return [torch.randint(3, 158, (length,)) for length in (7, 33, 130, 300, 64)]


def seeded_requests(texts, **more):
    return [{"input_ids": text, "seed": seed, **more} for seed, text in enumerate(texts)]


@pytest.mark.parametrize("mode", MODES)
def test_dense_pages_write_what_transformers_writes(models, texts, mode):
    """Ragged prompts, chunks, rows that wait, seeds, options; nothing is shared."""
    ours, theirs = models
    found = many(ours, seeded_requests(texts), max_rows=3, pad_token_id=0, **MODES[mode])
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
        *(
            pytest.param(1, "kivi-4-sink", marks=pytest.mark.slow),
            pytest.param(4, "kivi-2", marks=pytest.mark.slow),
            pytest.param(1, "kv4-hadamard", marks=pytest.mark.slow),
        ),
    ],
)
def test_packed_pages_write_what_one_row_writes(model, texts, preset, rows):
    """With and without other requests, prompts are cut at the same places."""
    found = many(model, texts, preset, max_rows=rows, share_prefixes=False)
    assert tokens_of(found) == [one_row(model, text, preset) for text in texts]


def test_rows_that_end_in_one_step(models, texts):
    ours, theirs = models
    same = [texts[0]] * 4
    found = many(ours, same * 2, new_tokens=5, max_rows=4)
    assert tokens_of(found) == transformers_own(theirs, same * 2, 5)


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
    found = many(ours, prompts, new_tokens=12, max_rows=2)
    # after a prefix of 160 tokens, too, prompts are divided at multiples of the chunk size
    assert {stop for _, stop in chunks} <= {*range(0, 1000, CHUNK), *map(len, prompts)}
    assert (160, 192) in chunks
    assert tokens_of(found) == transformers_own(theirs, prompts, 12)
    # the first has 207 + 12 tokens: after 160 of them in pages of 32 come at least the residual 32
    assert [result.cached_tokens for result in found] == [0, 160, 192, 192, 192]
    apart = many(ours, prompts, new_tokens=12, max_rows=2, share_prefixes=False)
    assert [result.cached_tokens for result in apart] == [0] * 5


@pytest.mark.parametrize("preset", ["dense", "kivi-4-sink"])
def test_a_store_keeps_prompts_from_call_to_call(models, texts, preset):
    """A prompt that continues from a stored one is read from there; the same one ends within it."""
    ours, theirs = models
    options = {"new_tokens": 10, "share_prefixes": False, "prefixes": lb.PrefixStore("1GB")}
    first = many(ours, texts[3:4], preset, **options)
    again = [torch.cat([texts[3], texts[1]]), texts[3], torch.cat([texts[3][:150], texts[2]])]
    found = many(ours, again, preset, **options)
    assert [result.error for result in found] == [None] * 3
    assert first[0].cached_tokens == 0
    assert all(result.cached_tokens >= 96 for result in found)
    assert found[1].generated_tokens == first[0].generated_tokens or preset != "dense"
    if preset == "dense":
        assert tokens_of(found) == transformers_own(theirs, again, 10)


def test_shared_prefixes_go_where_memory_is_needed(models, texts):
    """Kept pages are given up, the oldest first, before a request waits."""
    ours, theirs = models
    prompts = [torch.randint(3, 158, (200,)) for _ in range(12)]
    room = 40_000 + 2 * 2 * 2 * 64 * 4 * (2 * 220 + 2 * 64)
    found = many(ours, prompts, new_tokens=12, max_rows=2, memory=room)
    assert tokens_of(found) == transformers_own(theirs, prompts, 12)


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_several_sequences_of_a_prompt(models, texts, rows):
    """Forked where there is room, else read again: the same texts, and each has a seed of its own."""
    ours, theirs = models
    options = MODES["sampling"] | {"new_tokens": 15, "pad_token_id": 0}
    requests = seeded_requests(texts[1:4], num_return_sequences=3)
    found = many(ours, requests, max_rows=rows, **options)
    assert [(result.index, result.sequence) for result in found] == [(i, j) for i in range(3) for j in range(3)]
    firsts = transformers_own(theirs, texts[1:4], 15, **MODES["sampling"])
    assert tokens_of(found[::3]) == firsts
    single = [many(ours, [each], max_rows=3, **options) for each in requests]
    assert tokens_of(found) == [tokens for three in single for tokens in tokens_of(three)]
    assert len({tuple(tokens) for tokens in tokens_of(found[:3])}) == 3


def test_logprobs_are_those_that_tokens_were_drawn_with(models, texts):
    ours, theirs = models
    options = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}
    (found,) = many(ours, [{"input_ids": texts[1], "seed": 3, "logprobs": True}], new_tokens=9, **options)
    torch.manual_seed(3)
    out = theirs.generate(texts[1][None], max_new_tokens=9, output_scores=True, return_dict_in_generate=True, **options)
    expected = theirs.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)[0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_texts_messages_and_stop_strings(model):
    tokenizer = letters()
    long = {"new_tokens": 30, "suppress_tokens": [*range(33), *range(127, 160)]}
    (plain,) = many(model, ["abc"], tokenizer=tokenizer, **long)
    assert plain.prompt_ids == [97, 98, 99]
    assert plain.text == "".join(map(chr, plain.generated_tokens))
    stop = plain.text[3:5]
    requests = [
        {"prompt": "abc", "id": "stopped", "stop_strings": [stop]},
        [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}],
        {"messages": [{"role": "user", "content": "ab"}], "chat_template_kwargs": {"extra": "c"}},
        dict(tokenizer("abc", return_tensors="pt", return_token_type_ids=False)),
    ]
    found = many(model, requests, tokenizer=tokenizer, **long)
    assert [result.error for result in found] == [None] * 4
    assert found[0].text == plain.text[: plain.text.index(stop) + 2]
    assert (found[0].id, found[0].finish_reason) == ("stopped", "stop")
    for result in found[1:]:
        assert result.prompt_ids == [97, 98, 99]
        assert result.generated_tokens == plain.generated_tokens


def test_texts_end_with_stop_strings_as_in_generate(model):
    """One of the stop strings begins in the prompt."""
    tokenizer, ours = letters(), model
    wanted = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": [*range(33), *range(127, 160)]}
    (plain,) = many(ours, ["a"], tokenizer=tokenizer, **wanted)
    whole = plain.text
    stops = [
        [whole[0]],
        whole[6:9],
        [whole[2:12], "never here"],
        [f"a{whole[:4]}"],
        ["a longer text than there will be"],
    ]
    requests = [{"prompt": prompt, "stop_strings": stop} for prompt in ("a", "a", "b") for stop in stops]
    results = many(ours, requests, tokenizer=tokenizer, **wanted)
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
    broken, fine = many(model, requests, tokenizer=tokenizer, new_tokens=5)
    assert broken.finish_reason == "error"
    assert (fine.finish_reason, len(fine.generated_tokens)) == ("length", 5)


def test_messages_that_a_template_refuses_stop_no_other_request(model):
    """A template raises errors of its own kind, and often for a system message."""
    tokenizer = letters()
    tokenizer.chat_template = "{{ raise_exception('no system message') if messages[0].role == 'system' else 'abc' }}"
    wrong = [
        ([{"role": "system", "content": "a"}], "request 1: TemplateError: no system message"),
        ({"messages": 5}, "TypeError"),
        ({"messages": [{"content": "a"}]}, "messages[0]={'content': 'a'} is not allowed"),
    ]
    requests = ["abc", *(request for request, _ in wrong), [{"role": "user", "content": "a"}]]
    found = many(model, requests, tokenizer=tokenizer, new_tokens=3)
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


@pytest.mark.parametrize("end", ["refused", "closed", "interrupted"])
def test_a_streamer_ends_once_however_its_request_ends(model, texts, end):
    """A thread that reads from it would wait for ever. Requests: not valid, too long, and 2 that get no row before the end."""
    ended = [0] * 6

    class Counting(Collected):
        def __init__(self, index):
            super().__init__(3, KeyboardInterrupt() if end == "interrupted" else None)
            self.index = index

        def end(self):
            ended[self.index] += 1

    more = [{"temperature": -1.0}, {"max_new_tokens": 10**6}, {"max_new_tokens": 2}, {}, {}, {}]
    requests = [{"input_ids": texts[0], "streamer": Counting(i), **options} for i, options in enumerate(more)]
    if end == "closed":
        running = many(model, requests, max_rows=1, as_completed=True)
        assert [next(running).index for _ in range(3)] == [0, 1, 2]
        running.close()
    elif end == "interrupted":
        with pytest.raises(lb.Interrupted):
            many(model, requests, max_rows=1)
    else:
        many(model, requests, max_rows=1)
    assert ended == [1] * 6


def test_the_error_of_one_request_does_not_stop_the_others(model, texts):
    requests = [
        texts[0],
        {"input_ids": texts[1], "logits_processor": [Broken()]},
        {"input_ids": texts[2], "streamer": Collected(fails_at=4)},
        {"input_ids": texts[3], "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)]},
    ]
    found = many(model, requests)
    assert [result.finish_reason for result in found] == ["length", "error", "error", "length"]
    assert found[1].error == "RuntimeError: the processor broke"
    assert len(found[1].generated_tokens) == 2
    assert found[2].error == "RuntimeError: the streamer broke"
    assert found[0].generated_tokens == one_row(model, texts[0], "dense")


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


# ---- the order of things ---------------------------------------------------------------------------------------------


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
    found = many(model, iter(given), new_tokens=6, max_rows=2)
    assert [result.index for result in found] == [0, 1, 2, 3]
    assert [result.finish_reason for result in found] == ["length", "error", "length", "error"]
    assert found[1].id == "odd"
    assert "num_beams=4" in found[1].error
    assert "request 3: 5 is not allowed" in found[3].error


@pytest.mark.parametrize("way", ["list", "as_completed", "streamer"])
def test_the_longest_answers_of_a_list_begin_first(models, texts, way):
    """With one row, the order in which answers begin is that of their timestamps. Where somebody sees it, it stays as given."""
    (model, theirs), limits = models, [3, 9, 5, 9]
    pairs = list(zip(texts, limits, strict=False))
    requests = [{"input_ids": text, "max_new_tokens": most} for text, most in pairs]
    if way == "streamer":
        requests[0]["streamer"] = Collected()
    results = list(many(model, requests, as_completed=way == "as_completed", max_rows=1))
    results.sort(key=lambda result: result.index)
    assert [len(result.generated_tokens) for result in results] == limits
    begun = sorted(range(4), key=lambda index: results[index].timestamps[0])
    assert begun == ([1, 3, 2, 0] if way == "list" else [0, 1, 2, 3])
    assert tokens_of(results) == [transformers_own(theirs, [text], most)[0] for text, most in pairs]


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
