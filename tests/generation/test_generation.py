"""`lb.generate`: what `model.generate` gives with a growing cache, from a cache that is kept, and steps that do not wait."""

import pytest
import torch
import torch._dynamo.utils
import transformers
from cases import left_padded, tiny_models
from generation_cases import GREEDY, MODES, SMALL_PAGES, growing, ours, turns
from transformers import CompileConfig, DynamicCache, GenerationConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import call_options, compiling
from hf_lowbit_kv.generation.kept_caches import kept_caches

pytestmark = pytest.mark.host


@pytest.mark.parametrize(("mode", "batch"), [*((mode, 3) for mode in MODES), ("eos", 1)])
def test_tokens_of_the_growing_cache(model, mode, batch):
    ids, mask = left_padded(batch, 100)
    want = growing(model, ids, mask, **MODES[mode])
    for _ in range(2):  # with a new cache, and with the one that was kept
        assert torch.equal(ours(model, ids, mask, **MODES[mode]), want)
    if mode == "stopping_criteria" or (mode, batch) == ("eos", 1):
        assert want.shape[1] < 112


@pytest.mark.parametrize("what", ["positions", "padding inferred", "mask"])
def test_chunks_of_the_prompt_see_what_the_model_is_given(what):
    model, theirs = tiny_models("llama")
    ids, mask = left_padded(2, 100)
    inputs = {"input_ids": ids}
    if what != "padding inferred":
        inputs["attention_mask"] = mask
    if what == "positions":
        inputs["position_ids"] = 3 * torch.arange(100).expand(2, -1)
    settings = GREEDY | {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    want = theirs.generate(**inputs, max_new_tokens=8, **settings).logits
    got = lb.generate(model, inputs, "dense", 8, prefill_chunk_size=16, progress=False, **settings).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_inference_mode_once_and_then_not(family):
    model, _ = tiny_models(family)
    ids, mask = left_padded(2, 100)
    with torch.inference_mode():
        want = ours(model, ids, mask)
    assert torch.equal(ours(model, ids, mask), want)
    assert torch.equal(want, growing(model, ids, mask))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_other_families(family):
    model, theirs = tiny_models(family)
    ids, mask = left_padded(2, 60)
    want = theirs.generate(
        ids, attention_mask=mask, past_key_values=DynamicCache(config=theirs.config), max_new_tokens=8, **GREEDY
    )
    assert torch.equal(ours(model, ids, mask, "dense", 8), want)


def test_inputs_may_be_keyword_arguments(model):
    ids, mask = left_padded(2, 50)
    named = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    want = lb.generate(model, {"input_ids": ids, "attention_mask": mask}, "kivi-4-sink", 12, **GREEDY)
    assert torch.equal(lb.generate(model, **named, max_new_tokens=12), want)
    assert torch.equal(lb.generate(model, **named, max_length=62), want)
    config = GenerationConfig(max_length=62)
    assert torch.equal(lb.generate(model, **named, generation_config=config), want)


def test_a_second_turn_goes_on_with_the_cache(model):
    options = {"return_dict_in_generate": True, "max_new_tokens": 12, **GREEDY}

    def with_growing(ids, mask, cache):
        cache = cache or lb.from_preset("kivi-2", model, **SMALL_PAGES)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)

    def with_ours(ids, mask, cache):
        new = {"preset": "kivi-2", "max_cache_len": 256, "cache_options": SMALL_PAGES}
        kind = {"past_key_values": cache} if cache else new
        return lb.generate(model, {"input_ids": ids, "attention_mask": mask}, **kind, **options)

    for got, want in zip(turns(with_ours), turns(with_growing), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "kivi-3"}, "preset='kivi-3' is not known; did you mean"),
        ({"max_new_tokens": None}, "max_new_tokens=None: the cache is allocated"),
        (
            {"max_length": 50, "max_new_tokens": None},
            "max_length=50 leaves no room for new tokens: the prompt has 50 tokens",
        ),
        ({"step": "fast"}, "step='fast' is not known; allowed: 'recorded', 'compiled', 'eager'"),
        ({"input_ids": torch.ones(1, 5)}, "inputs and input_ids are both given"),
        ({"num_beams": 3}, "num_beams=3 is not allowed: a preallocated cache does not serve beam search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not allowed"),
        ({"use_cache": False}, "use_cache=False is not allowed"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size=-1 is not allowed"),
        ({"inputs": torch.ones(1, 0, dtype=torch.long)}, "inputs must be token ids"),
        ({"max_cache_len": 61}, "max_cache_len=61 is too small: the prompt has 50 tokens and max_new_tokens=12"),
        ({"inputs": torch.tensor([[5, 160]])}, "input_ids have token 160, which is not one of the model's 160"),
        (
            {"inputs": {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(1, 5)}},
            r"attention_mask has shape \(1, 5\); .* here \(2, 5\)",
        ),
        ({"num_return_sequences": 0}, "num_return_sequences=0 is not allowed; it must be an integer of 1 or more"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 is not allowed; it must be a number from 0 to 1"),
        ({"past_key_values": "a cache", "max_cache_len": 99}, "max_cache_len and prefixes are for a new cache"),
        ({"past_key_values": "a cache", "preset": "kivi-4-sink"}, "must be a low-bit cache made with max_cache_len"),
    ],
)
def test_bad_arguments(model, arguments, message):
    arguments = {"inputs": left_padded(1, 50)[0], "preset": "kivi-2", "max_new_tokens": 12} | arguments
    with pytest.raises(ValueError, match=message):
        lb.generate(model, **arguments)
    assert not kept_caches(model).entries


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_token": 5}, r"'max_new_token' is not known: .*; did you mean 'max_new_tokens'\?"),
        ({"per_layer": {0: "kv8"}}, r"pass it as lb\.generate\(\.\.\., cache_options=\{'per_layer': \.\.\.\}\)"),
        ({"sink": 5}, r"'sink' is an option of the cache; pass it as .*cache_options=\{'sink': \.\.\.\}"),
        ({"residuall": 5}, r"did you mean 'residual', as cache_options=\{'residual': \.\.\.\}\?"),
        ({"pixel_values": torch.ones(1)}, "'pixel_values' is not known: neither .*, nor an input of the model"),
    ],
    ids=str,
)
def test_names_that_nobody_knows_come_before_anything_else(model, options, message):
    """The other arguments are as bad as can be."""
    with pytest.raises(ValueError, match=message):
        lb.generate(model, **{"inputs": "a text", "preset": "kivi-3", "prefixes": 3, "max_length": -1, **options})


@pytest.mark.parametrize("limit", [{"max_new_tokens": 6}, {"max_length": 56}])
@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 16}])
def test_a_configuration_is_passed_without_settings(model, monkeypatch, limit, chunks):
    """transformers warns of both together."""
    logged = []
    for level in ("warning", "warning_once"):
        monkeypatch.setattr(transformers.generation.utils.logger, level, lambda text, *_: logged.append(text))
    ids, config = left_padded(1, 50)[0], GenerationConfig(**limit, **chunks, pad_token_id=0)
    before = config.to_dict()
    want = lb.generate(model, ids, "kivi-2", 6, pad_token_id=0, **chunks)
    assert torch.equal(lb.generate(model, ids, "kivi-2", generation_config=config), want)
    assert logged == []
    assert config.to_dict() == before


def test_none_replaces_the_models_setting_in_spite_of_a_configuration(model):
    model.generation_config.prefill_chunk_size = 16
    options = call_options.in_one_configuration(
        model, {"prefill_chunk_size": None, "max_new_tokens": 3, "generation_config": GenerationConfig()}
    )
    config, _ = model._prepare_generation_config(**options)
    assert (config.prefill_chunk_size, config.max_new_tokens) == (None, 3)


def test_names_that_transformers_knows(model):
    ids = left_padded(1, 50)[0]
    config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    config.own_setting = 1
    options = {"synced_gpus": False, "tokenizer": None, "position_ids": torch.arange(50)[None], "token_type_ids": None}
    got = lb.generate(model, ids, "dense", generation_config=config, own_setting=2, **options)
    assert torch.equal(got, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("own", ["dense", "kivi-4-sink", None])
def test_a_cache_goes_on_with_its_own_preset(model, own):
    """A preset that is named beside it must store the same, the default too; names do not count."""
    ids, mask = left_padded(1, 50)
    options = GREEDY | {"max_new_tokens": 4}
    cache = lb.KIVICache(model, max_cache_len=60) if own is None else lb.from_preset(own, model, max_cache_len=60)
    for other in {"dense", "kivi-4-sink", "kivi-2"} - {own or "kivi-4-sink"}:
        with pytest.raises(ValueError, match=f"past_key_values has preset={own!r}.* not of preset='{other}'"):
            lb.generate(model, ids, other, past_key_values=cache, **options)
    want = growing(model, ids, mask, own or "kivi-4-sink", 4)
    for named in (None, own or "kivi-4-sink"):
        assert torch.equal(lb.generate(model, ids, named, past_key_values=cache, **options), want)
        cache.reset()
    assert torch.equal(lb.generate(model, ids, past_key_values=cache, **options), want)


def test_without_a_preset_it_is_the_default(model):
    ids = left_padded(1, 50)[0]
    for preset in ((), (None,)):
        out = lb.generate(model, ids, *preset, max_new_tokens=2, return_dict_in_generate=True, **GREEDY)
        assert out.past_key_values.preset == "kivi-4-sink"
        assert out.past_key_values.spec == lb.get_preset("kivi-4-sink").spec()


def test_a_turn_must_fit_the_cache(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=60)
    with pytest.raises(ValueError, match="max_cache_len=60, and this turn ends at 62 tokens"):
        lb.generate(model, left_padded(1, 50)[0], max_new_tokens=12, past_key_values=cache)


def test_a_turn_is_the_whole_conversation(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=100)
    lb.generate(model, left_padded(1, 50)[0], max_new_tokens=2, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"inputs have 5 tokens, and past_key_values holds 5[0-9]: pass the full text so far"
    ):
        lb.generate(model, left_padded(1, 5)[0], max_new_tokens=2, past_key_values=cache)


def test_a_turn_begins_with_what_is_stored(model):
    """Padding aside: the stored ids are known, until the cache is emptied or filled by others."""
    ids, mask = left_padded(2, 50)
    cache = lb.from_preset("kivi-2", model, max_cache_len=200)

    def turn(ids, mask):
        return lb.generate(model, ids, attention_mask=mask, max_new_tokens=2, past_key_values=cache, **GREEDY)

    written = turn(ids, mask)
    more, more_mask = torch.cat([written, ids], dim=1), torch.cat([mask, torch.ones_like(written[:, :2]), mask], dim=1)
    wrong = more.clone()
    wrong[1, 20] += 1
    with pytest.raises(ValueError, match=r"token 20 of row 1 is \d+, and \d+ is stored; pass the full text so far"):
        turn(wrong, more_mask)
    other_padding = more.clone()
    other_padding[1, 3] = 9
    written = turn(other_padding, more_mask)
    cache.crop(-60)
    wrong = written.clone()
    wrong[:, -20:] = 9  # these are no longer stored
    turn(wrong, torch.ones_like(wrong) * torch.cat([more_mask, torch.ones_like(wrong[:, -2:])], dim=1))
    cache.reset()
    turn(ids.flip(1), mask.flip(1) * 0 + 1)


@pytest.mark.newest  # compiled once, on the newest
def test_calls_and_turns_use_the_compiled_step_again(model):
    """With transformers' own way to compile on any device: one compilation for calls of any length, and for further turns."""
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

    turns(with_compiled)
    assert counters["stats"]["unique_graphs"] == 1


def test_compiling_leaves_no_trace(model, capsys):
    """What happens before the first call on a GPU, on a CPU: a few steps, a message, nothing stored, no random numbers."""
    cache = lb.from_preset("kivi-2", model, max_cache_len=64)
    options = {"attention_mask": left_padded(2, 20)[1], "do_sample": True, "output_hidden_states": True}
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    compiling.compile_first(model, cache, 2, options, progress=True)
    assert torch.equal(torch.rand(3), want)
    assert int(cache.get_seq_length()) == 0
    err = capsys.readouterr().err
    assert "Compiling the decoding step of LlamaForCausalLM for kivi-2, 2 x 64 tokens (once)" in err
    assert "Compiled in" in err
    compiling.compile_first(model, cache, 2, options, progress=True)
    assert not capsys.readouterr().err
    # without padding it is another step; where compiling fails, nothing remains either
    options = {"attention_mask": torch.ones(2, 20)}
    fail = pytest.MonkeyPatch()
    fail.setattr(model, "forward", None)
    with pytest.raises(TypeError):
        compiling.compile_first(model, cache, 2, options, progress=False)
    fail.undo()
    assert int(cache.get_seq_length()) == 0
    compiling.compile_first(model, cache, 2, options, progress=True)
    assert "Compiled in" in capsys.readouterr().err


class StopHereError(Exception):
    """Ends a test at the event that it tests."""


def test_a_step_is_compiled_for_all_its_rows(model, monkeypatch):
    """Each row of the prompt is repeated for its sequences, and the step that is compiled beforehand must have all of them."""
    compiled = []

    def note(model, cache, rows, *args):
        compiled.append(rows)
        raise StopHereError

    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(call_options, "why_gpu_cannot_launch", lambda: None)
    with pytest.raises(ValueError, match=r"\(disable_compile=True\)"):  # it would run eagerly
        ours(model, *left_padded(2, 50), step="compiled", disable_compile=True)
    monkeypatch.setattr(compiling, "check_compiles", lambda *args: None)
    monkeypatch.setattr(compiling, "compile_first", note)
    for options, rows in (({}, 2), ({"num_return_sequences": 3, "do_sample": True}, 6)):
        with pytest.raises(StopHereError):
            ours(model, *left_padded(2, 50), step="compiled", **options)
        assert compiled.pop() == rows
    config = GenerationConfig(num_return_sequences=2, do_sample=True, pad_token_id=0)
    with pytest.raises(StopHereError):
        lb.generate(model, left_padded(3, 50)[0], "kivi-2", 4, step="compiled", generation_config=config)
    assert compiled == [6]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_cache_made_inside_inference_mode_is_reset_outside(family, used):
    model, _ = tiny_models(family)
    ids, mask = left_padded(2, 60)

    def write(cache):
        options = {"past_key_values": cache, "max_new_tokens": 8, **GREEDY}
        return model.generate(ids, attention_mask=mask, **options)

    want = write(lb.from_preset("kivi-2-sink", model, max_cache_len=200, **SMALL_PAGES))
    with torch.inference_mode():
        cache = lb.from_preset("kivi-2-sink", model, max_cache_len=200, **SMALL_PAGES)
        if used:
            assert torch.equal(write(cache), want)
    for _ in range(2):
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        assert torch.equal(write(cache), want)
