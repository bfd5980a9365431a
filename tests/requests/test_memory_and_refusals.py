"""`lb.generate_many`: the memory that a call keeps to and gives back, what is refused before any is allocated, and that ten
thousand requests leave nothing: no objects, no memory, no pages."""

import gc
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from pool_cases import FIXED, Collected, many, one_row, tokens_of, transformers_own

import hf_lowbit_kv as lb
from hf_lowbit_kv.requests import pool_steps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def texts():
    return [torch.randint(3, 158, (length,)) for length in (7, 33, 130, 300, 64)]


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


# ---- ending early ----------------------------------------------------------------------------------------------------


def test_ctrl_c_frees_the_pool_and_hands_over_what_was_written(model, texts, pools):
    requests = [
        {"input_ids": texts[0], "max_new_tokens": 3},
        {"input_ids": texts[1], "streamer": Collected(fails_at=8, error=KeyboardInterrupt())},
        {"input_ids": texts[2], "num_return_sequences": 2, "do_sample": True},
        texts[3],
        texts[4],
    ]
    with pytest.raises(lb.Interrupted, match="1 of 6 sequences had ended") as caught:
        many(model, requests, max_rows=2)
    results = caught.value.results
    assert [(result.index, result.sequence) for result in results] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]
    assert [result.finish_reason for result in results] == ["length"] + ["cancelled"] * 5
    assert results[1].generated_tokens == one_row(model, texts[1], "dense")[: len(results[1].generated_tokens)]
    assert len(results[1].generated_tokens) >= 7
    assert isinstance(caught.value, KeyboardInterrupt)
    assert not pools[0].memory.groups
    # the model is as it was, and serves the next call
    assert tokens_of(many(model, texts[:1])) == [one_row(model, texts[0], "dense")]


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


def test_weights_that_change_between_two_results_are_an_error(texts, pools):
    theirs = tiny_models("llama")[0]
    options = {"max_new_tokens": 20, "do_sample": False, "as_completed": True, "max_rows": 1}
    running = lb.generate_many(theirs, texts, **options, **FIXED)
    next(running)
    next(running)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"changed between two results: v_proj\.weight of layer 1 has other numbers"):
        next(running)
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


def test_calls_of_two_threads_follow_each_other(model, texts):
    expected = [one_row(model, text, "dense") for text in texts]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: many(model, texts), range(2)))
    assert tokens_of(found[0]) == tokens_of(found[1]) == expected
    spans = sorted((min(r.timestamps[0] for r in some), max(r.timestamps[-1] for r in some)) for some in found)
    assert spans[0][1] < spans[1][0]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["700 kB", pytest.param(3_000_000, marks=pytest.mark.slow)])
def test_memory_is_kept_to(model, pools, memory):
    requests = ({"input_ids": torch.randint(3, 158, (200,))} for _ in range(6))
    found = lb.generate_many(model, requests, max_new_tokens=10, do_sample=False, memory=memory, **FIXED)
    assert [result.error for result in found] == [None] * 6
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


def test_hinted_lengths_may_exceed_the_longest_row(model):
    """An upper bound beyond the model's positions or the memory leaves room for shorter rows."""
    from hf_lowbit_kv.requests.memory_budget import pool_size
    from hf_lowbit_kv.requests.pool_steps import read_once, stored_layers

    cache = lb.from_preset("kivi-4-sink", model, max_cache_len=32, **SMALL_PAGES)
    read_once(model, cache, 2)
    layers = stored_layers(cache)
    assert pool_size(layers, 30_000_000, [9000] * 3, 1024, None, True, may_be_shorter=True) == pool_size(
        layers, 30_000_000, [1024] * 3, 1024, None, True
    )
    one_row = pool_size(layers, 300_000, None, None, 1, True)
    assert (
        pool_size(layers, 300_000, [100_000] * 3, None, None, True, may_be_shorter=True).max_length
        >= 0.9 * one_row.max_length
    )


def test_a_request_that_does_not_fit_gets_an_error(model, texts):
    small = 30_000 + 2 * 2 * 2 * 64 * 4 * 3 * 64  # windows and pages of some 100 tokens
    found = many(model, texts[:4], memory=small)
    assert [result.finish_reason for result in found] == ["length", "length", "length", "error"]
    assert "300 prompt tokens plus max_new_tokens=20 exceed the" in found[3].error
    assert tokens_of(found[:3]) == [one_row(model, text, "dense") for text in texts[:3]]


@pytest.mark.parametrize("tokens", [10**9, 1000])
def test_a_request_that_can_never_fit_gets_no_memory(model, texts, pools, tokens):
    """It is more than the model has positions, or than there is memory. The others get the pool that they get without it."""
    memory = 10**9 if tokens > 1000 else 700_000
    good = [{"input_ids": text, "max_new_tokens": 5} for text in texts[:3]]
    bad = {"input_ids": texts[0], "max_new_tokens": tokens}
    without = many(model, good, memory=memory)
    found = many(model, [good[0], bad, *good[1:]], memory=memory)
    assert tokens_of(found[:1] + found[2:]) == tokens_of(without)
    assert [result.error is None for result in found] == [True, False, True, True]
    advice = (
        "that the model reads: lower max_new_tokens or shorten the prompt"
        if tokens > 1000
        else "tokens of a row: lower"
    )
    assert advice in found[1].error
    assert pools[1].bytes < 1.1 * pools[0].bytes


def test_one_long_request_fits_beside_many_short_ones(model, texts, pools):
    """Rows of the short ones must not take the memory that it needs."""
    settings = {"new_tokens": 600, "eos_token_id": list(range(160)), "memory": 1_700_000}
    assert many(model, [[5, 6]], **settings)[0].error is None
    found = many(model, [[5, 6], *({"input_ids": [5], "max_new_tokens": 1} for _ in range(40))], **settings)
    assert [result.error for result in found] == [None] * 41
    assert pools[1].slots > 1


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "num_beams": (4, "num_beams=4"),
    "max_new_tokenz": (3, "'max_new_tokenz' is not known: .* did you mean 'max_new_tokens'"),
    "per_layer": ({}, r"'per_layer' is .* pass it as lb.generate_many\(\.\.\., cache_options=\{'per_layer'"),
    "output_scores": (True, "output_scores=True"),
    "past_key_values": (1, "past_key_values"),
    "stop_strings": (["a"], "tokenizer=None: stop_strings"),
    "sequence_bias": ([[[400], 1.0]], "sequence_bias: token 400"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_before_anything_is_allocated(model, texts, pools, name):
    value, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        lb.generate_many(model, texts, **{"max_new_tokens": 5, "do_sample": False, name: value}, **FIXED)
    assert not pools


@pytest.mark.parametrize("way", ["list", "iterator"])
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
        ({"input_ids": 5}, "TypeError"),
        ({"input_ids": texts[1], "watermarking_config": 5}, "AttributeError"),
    ]
    requests = [texts[0], *(request for request, _ in bad), texts[2]]
    given = iter(requests) if way == "iterator" else requests
    results = many(model, given, new_tokens=4)
    assert [result.index for result in results] == list(range(len(requests)))
    assert [result.id for result in results] == ["0", "nothing", *map(str, range(2, len(requests)))]
    for (_, message), result in zip(bad, results[1:-1], strict=True):
        assert (result.finish_reason, result.generated_tokens) == ("error", [])
        assert f"request {result.index}: " in result.error
        assert message in result.error
    assert tokens_of([results[0], results[-1]]) == transformers_own(theirs, [texts[0], texts[2]], 4)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ("a text", "requests must be a list"),
        ([[], ""], r"request 0: \[\] is not allowed"),
        ([[3, 400]], "request 0: token 400"),
        ([torch.zeros(2, 3, dtype=torch.long)], "a batch is several requests"),
        (["a text"], "tokenizer=None"),
    ],
)
def test_requests_that_are_none(model, pools, requests, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lb.generate_many(model, requests, max_new_tokens=3, **FIXED)
    assert not pools


def test_a_model_without_weights_in_memory_is_refused(pools):
    offloaded = tiny_models("llama")[0].to("meta")
    with pytest.raises(ValueError, match=r"first weights of LlamaForCausalLM are not in memory .*use lb\.generate"):
        many(offloaded, [[5, 6]])
    assert not pools


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": 1000}, "memory=1000 bytes are too few"),
        ({"prefill_chunk_size": "auto"}, "prefill_chunk_size='auto'"),
        ({"preset": "kivi-5"}, "kivi-5"),
        ({"streamer": Collected()}, "streamer is not allowed for all"),
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


def test_weights_of_several_processes_are_refused(model):
    from transformers.distributed import DistributedConfig

    try:
        model.config.distributed_config = DistributedConfig(
            tp_size=2, tp_plan="auto"
        )  # as tensor_parallel models have it
        with pytest.raises(ValueError, match="spread over 2 processes"):
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
            assert f"exceed the {most + 2} tokens that the model reads: lower" in result.error


# ---- nothing is left ------------------------------------------------------------------------------------------------


REQUESTS = 10_000
#: requests between two looks at memory; the first look comes when everything has been used once
STRIDE = 2_500
#: bytes that resident memory may grow by over the last three quarters: allocators round up
MOST_GROWTH = 16e6


def requests():
    """Short texts, some of which begin alike, with limits of their own."""
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(3, 158, (40,), generator=generator).tolist()
    for number in range(REQUESTS):
        own = torch.randint(3, 158, (3 + number % 7,), generator=generator).tolist()
        yield {"input_ids": (beginning if number % 5 == 0 else []) + own, "max_new_tokens": 1 + number % 3}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kept", [False, True])
def test_ten_thousand_requests_leave_nothing(one_thread, kept):
    """kept: every text goes into a store that has room for a few, and rows read the store's pages."""
    model = tiny_models("llama")[0]
    options = {"cache_options": SMALL_PAGES, "max_rows": 32, "memory": "2MB", "progress": False, "do_sample": False}
    if kept:
        options["prefixes"] = lb.PrefixStore("200KB")
    process, looks = psutil.Process(), []
    results = lb.generate_many(model, requests(), preset="kivi-4", as_completed=True, **options)
    for number, result in enumerate(results, 1):
        assert result.finish_reason == "length", result.error
        assert len(result.generated_tokens) == 1 + result.index % 3
        if number % STRIDE == 0:
            gc.collect()
            looks.append((len(gc.get_objects()), process.memory_info().rss))
    assert number == REQUESTS
    objects, resident = zip(*looks)
    # rows at work at the moment of a look differ a little
    assert max(objects[1:]) - objects[0] < 2_000, objects
    assert resident[-1] - resident[0] < MOST_GROWTH, resident
