"""`lb.generate`: what `model.generate` gives with a growing cache, from a cache that is kept, and steps that do not wait."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch._dynamo.utils
from cases import left_padded, tiny_models
from transformers import (
    CompileConfig,
    DynamicCache,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import hf_lowbit_kv as lb
from hf_lowbit_kv import generation

pytestmark = pytest.mark.host

SMALL_PAGES = {"page_size": 32, "residual": 32}
GREEDY = {"do_sample": False, "pad_token_id": 0}
#: inductor's own
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class StopAt(StoppingCriteria):
    """All rows stop once they are so long."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


class Collect(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 40},
    "logits_processor": {"logits_processor": [RepetitionPenaltyLogitsProcessor(3.0)], "no_repeat_ngram_size": 2},
    "stopping_criteria": {"stopping_criteria": [StopAt(105)]},
    "eos": {"eos_token_id": list(range(0, 160, 2))},
}


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


@pytest.fixture(autouse=True)
def _forget(request):
    yield
    if "model" in request.fixturenames:
        lb.release(request.getfixturevalue("model"))


def growing(model, ids, mask, preset="kivi-2-sink", new_tokens=12, **options):
    """`model.generate` with a growing cache, eagerly."""
    torch.manual_seed(1)
    cache = lb.from_preset(preset, model, **SMALL_PAGES)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new_tokens, **GREEDY | options
    )


def ours(model, ids, mask, preset="kivi-2-sink", new_tokens=12, **options):
    torch.manual_seed(1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    options = GREEDY | {"cache_options": SMALL_PAGES, "progress": False} | options
    return lb.generate(model, inputs, preset, new_tokens, **options)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_the_growing_cache(model, mode, batch):
    ids, mask = left_padded(batch, 100)
    want = growing(model, ids, mask, **MODES[mode])
    for _ in range(2):  # with a new cache, and with the one that was kept
        assert torch.equal(ours(model, ids, mask, **MODES[mode]), want)
    if mode == "stopping_criteria" or (mode, batch) == ("eos", 1):
        assert want.shape[1] < 112


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_other_families(family):
    model, theirs = tiny_models(family)
    ids, mask = left_padded(2, 60)
    want = theirs.generate(
        ids, attention_mask=mask, past_key_values=DynamicCache(config=theirs.config), max_new_tokens=8, **GREEDY
    )
    assert torch.equal(ours(model, ids, mask, "dense", 8), want)


def test_streamer_sees_every_token(model):
    ids, mask = left_padded(1, 50)
    streamer = Collect()
    out = ours(model, ids, mask, streamer=streamer)
    assert torch.equal(torch.cat(streamer.pieces), out[0])
    assert streamer.ended


def test_inputs_may_be_ids_alone(model):
    ids, _ = left_padded(1, 50)
    out = lb.generate(model, ids, "kivi-2-sink", 12, cache_options=SMALL_PAGES, **GREEDY)
    assert torch.equal(out, growing(model, ids, torch.ones_like(ids)))


def test_a_cache_is_kept_and_serves_what_fits(model):
    def cache_of(tokens, batch=1, preset="kivi-2", **options):
        ids, mask = left_padded(batch, tokens)
        out = ours(model, ids, mask, preset, return_dict_in_generate=True, **options)
        assert int(out.past_key_values.get_seq_length()) == tokens + 11
        return out.past_key_values

    first = cache_of(300)
    assert first.get_max_length() == 512
    assert cache_of(400) is first
    assert cache_of(20) is first
    larger = cache_of(20, max_cache_len=1000)
    assert larger is not first
    assert larger.get_max_length() == 1024
    assert cache_of(600) is larger
    assert cache_of(20, batch=2) is not larger
    assert cache_of(600) is larger
    assert cache_of(20, preset="kivi-4") is not larger  # the third kind: the one used longest ago goes
    assert len(generation._kept[model]) == generation.KEPT_CACHES


def test_release_gives_the_memory_back(model):
    ids, mask = left_padded(1, 20)
    cache = weakref.ref(ours(model, ids, mask, return_dict_in_generate=True).past_key_values)
    assert cache() is not None
    lb.release(model)
    gc.collect()
    assert cache() is None
    lb.release(model)


def test_lengths_are_rounded_up_by_a_quarter_at_most():
    for tokens in (1, 512, 513, 5000, 131072, 131073, 10**6):
        length = generation.cache_length(tokens)
        assert tokens <= length < tokens + max(tokens / 4, 512)
        assert generation.cache_length(length) == length
    assert generation.cache_length(5000) == generation.cache_length(5100)


def turns(model, generate, cache=None):
    """Two turns, the second with padding in the middle."""
    (ids, mask), (more_ids, more_mask) = left_padded(3, 90), left_padded(3, 50, seed=1)
    first = generate(ids, mask, cache)
    cache = first.past_key_values
    ids = torch.cat([first.sequences, more_ids], dim=1)
    mask = torch.cat([mask, torch.ones_like(first.sequences[:, mask.shape[1] :]), more_mask], dim=1)
    return first.sequences, generate(ids, mask, cache).sequences


def test_a_second_turn_goes_on_with_the_cache(model):
    options = {"return_dict_in_generate": True, "max_new_tokens": 12, **GREEDY}

    def with_growing(ids, mask, cache):
        cache = cache or lb.from_preset("kivi-2", model, **SMALL_PAGES)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)

    def with_ours(ids, mask, cache):
        new = {"preset": "kivi-2", "max_cache_len": 256, "cache_options": SMALL_PAGES}
        kind = {"past_key_values": cache} if cache else new
        return lb.generate(model, {"input_ids": ids, "attention_mask": mask}, **kind, **options)

    for got, want in zip(turns(model, with_ours), turns(model, with_growing), strict=True):
        assert torch.equal(got, want)


def test_settings_may_come_from_a_generation_configuration(model):
    ids, mask = left_padded(1, 50)
    config = lb.generation.host.GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)
    out = lb.generate(model, {"input_ids": ids, "attention_mask": mask}, "kivi-2", generation_config=config)
    assert out.shape == (1, 57)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "kivi-3"}, "preset='kivi-3' is not known; did you mean"),
        ({"preset": None}, "preset=None: name one"),
        ({"max_new_tokens": None}, "max_new_tokens=None: the cache is allocated"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not allowed"),
        ({"max_length": 70}, "max_length is not allowed: give max_new_tokens"),
        ({"num_beams": 3}, "num_beams=3 is not allowed: transformers does not compile beam search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is not allowed"),
        ({"use_cache": False}, "use_cache=False is not allowed"),
        ({"max_cache_len": 61}, "max_cache_len=61 is too small: the prompt has 50 tokens and max_new_tokens=12"),
        ({"cache_options": {"max_cache_len": 99}}, "it is an argument of its own"),
        ({"cache_options": {"sink": -1}}, "sink=-1 is not allowed"),
        ({"inputs": {"attention_mask": None}}, "inputs must be token ids"),
        ({"inputs": torch.arange(3)}, "inputs must be token ids"),
        ({"past_key_values": "a cache"}, "preset and cache_options describe a new cache"),
        ({"past_key_values": "a cache", "preset": None}, "must be a low-bit cache made with max_cache_len"),
    ],
)
def test_bad_arguments(model, arguments, message):
    arguments = {"inputs": left_padded(1, 50)[0], "preset": "kivi-2", "max_new_tokens": 12} | arguments
    with pytest.raises(ValueError, match=message):
        lb.generate(model, **arguments)
    assert not generation._kept.get(model)


def test_a_turn_must_fit_the_cache(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=60)
    with pytest.raises(ValueError, match="max_cache_len=60, and this turn ends at 62 tokens"):
        lb.generate(model, left_padded(1, 50)[0], max_new_tokens=12, past_key_values=cache)


def test_another_attention_implementation_is_refused():
    _, theirs = tiny_models("llama")
    theirs.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa' cannot read packed pages"):
        lb.generate(theirs, left_padded(1, 50)[0], "kivi-2", 12)


def test_calls_and_turns_use_the_compiled_step_again(model):
    """With the host's own way to compile on any device: one compilation for calls of any length, and for further turns."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    for tokens in (100, 33, 100):
        ids, mask = left_padded(3, tokens)
        assert torch.equal(ours(model, ids, mask, compile_config=config), growing(model, ids, mask))

    def with_compiled(ids, mask, cache):
        options = {"return_dict_in_generate": True, "compile_config": config, **GREEDY}
        kind = {"past_key_values": cache} if cache else {"preset": "kivi-2-sink", "cache_options": SMALL_PAGES}
        return lb.generate(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=12, **kind, **options)

    turns(model, with_compiled)
    assert counters["stats"]["unique_graphs"] == 1


def test_stop_checks_are_deferred_only_inside(monkeypatch):
    check = generation.host.DeferredStopCheck.is_supported
    cache = lb.from_preset("kivi-2", tiny_models("llama")[0], max_cache_len=64)
    cuda = torch.device("cuda")
    assert not check(cuda, cache, True, is_assistant=False)
    with generation._deferred_stop_check():
        assert check(cuda, cache, True, is_assistant=False)
        assert not check(cuda, cache, True, is_assistant=True)
        assert not check(torch.device("cpu"), cache, True, is_assistant=False)
    assert not check(cuda, cache, True, is_assistant=False)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


class Watch(LogitsProcessor):
    """From its third call on, whatever waits for the device raises."""

    def __init__(self, first=3):
        self.calls, self.first = 0, first

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.first:
            torch.cuda.set_sync_debug_mode("error")
        return scores


@pytest.fixture(scope="module")
def gpu_model():
    model = tiny_models("llama")[0].cuda()  # in float32: fused 16-bit arithmetic rounds differently
    yield model
    lb.release(model)


@pytest.fixture(autouse=True)
def _allow_synchronising():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


class StopWatching(StoppingCriteria):
    """Allows waiting again before the last step: the end of `generate` reads back what was written."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            torch.cuda.set_sync_debug_mode("default")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@QUIET
@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["dense", "kivi-2-sink", "kv8", "k4v2", "kitty-hadamard"])
def test_gpu_steps_do_not_wait_and_give_the_eager_tokens(gpu_model, preset):
    torch._dynamo.reset()
    ids, mask = (x.cuda() for x in left_padded(2, 200))
    options = {"cache_options": None, "new_tokens": 100}
    want = ours(gpu_model, ids, mask, preset, disable_compile=True, **options)
    ours(gpu_model, ids, mask, preset, **options)  # compiles
    watch = Watch()
    got = ours(gpu_model, ids, mask, preset, logits_processor=[watch], stopping_criteria=[StopWatching(299)], **options)
    assert watch.calls == 100
    assert torch.equal(got, want)
    # the host's own check, in contrast, waits in every step
    cache = lb.from_preset(preset, gpu_model, max_cache_len=512)
    options = {"max_new_tokens": 9, "disable_compile": True, "logits_processor": [Watch()], **GREEDY}
    with pytest.raises(RuntimeError, match="synchronizing"):
        gpu_model.generate(ids, attention_mask=mask, past_key_values=cache, **options)


@QUIET
@pytest.mark.gpu
def test_gpu_one_graph_a_step_and_no_recompilation(gpu_model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for tokens in (100, 33, 100):
        ids, mask = (x.cuda() for x in left_padded(3, tokens))
        want = ours(gpu_model, ids, mask, disable_compile=True, cache_options={"sink": 16})
        assert torch.equal(ours(gpu_model, ids, mask, cache_options={"sink": 16}), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    with torch.profiler.profile() as profiler:
        ours(gpu_model, ids, mask, cache_options={"sink": 16}, new_tokens=12)
    calls = [event.name() for event in profiler.profiler.kineto_results.events()]
    assert calls.count("cudaGraphLaunch") == 11  # the first token comes from the prompt


@QUIET
@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode", ["sampling", "return_sequences", "chunked_prefill", "logits_processor", "eos", "streamer"]
)
def test_gpu_modes(gpu_model, mode):
    ids, mask = (x.cuda() for x in left_padded(1, 100))
    options = MODES.get(mode, {})
    streamers = [Collect(), Collect()] if mode == "streamer" else [None, None]
    eager = ours(gpu_model, ids, mask, disable_compile=True, new_tokens=60, streamer=streamers[0], **options)
    out = ours(gpu_model, ids, mask, new_tokens=60, streamer=streamers[1], return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, eager)
    # a step beyond the end, which the deferred check takes, has left no trace
    assert int(out.past_key_values.get_seq_length()) == eager.shape[1] - 1
    if mode == "eos":
        assert eager.shape[1] < 160
    if mode == "streamer":
        assert torch.equal(torch.cat(streamers[1].pieces), eager[0].cpu())


@QUIET
@pytest.mark.gpu
def test_gpu_second_turn_after_a_stop(gpu_model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results = []
    for disable in (True, False):

        def generate(ids, mask, cache, disable=disable):
            kind = {"past_key_values": cache} if cache else {"preset": "kivi-2", "max_cache_len": 512}
            options = {
                "return_dict_in_generate": True,
                "disable_compile": disable,
                "eos_token_id": [7, 14, 21],
                **GREEDY,
            }
            inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
            return lb.generate(gpu_model, inputs, max_new_tokens=80, progress=False, **kind, **options)

        results.append(turns_on_gpu(generate))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 1


def turns_on_gpu(generate):
    (ids, mask), (more_ids, more_mask) = left_padded(3, 90), left_padded(3, 50, seed=1)
    first = generate(ids, mask, None)
    written = first.sequences.cpu()
    ids = torch.cat([written, more_ids], dim=1)
    mask = torch.cat([mask, torch.ones_like(written[:, mask.shape[1] :]), more_mask], dim=1)
    return written, generate(ids, mask, first.past_key_values).sequences.cpu()
