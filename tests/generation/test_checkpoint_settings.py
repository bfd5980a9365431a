"""Settings of caches that a checkpoint's generation configuration carries, and texts that come as embeddings."""

import copy

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import GREEDY, SMALL_PAGES
from mla_cases import tiny_models as tiny_mla
from transformers import DynamicCache, GenerationConfig, StaticCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import NAME

pytestmark = pytest.mark.host
NEW = 6


@pytest.fixture
def models():
    ours, theirs = tiny_models("llama")
    yield ours, theirs
    lb.release(ours)


def truth(model, **inputs):
    return model.generate(**inputs, max_new_tokens=NEW, **GREEDY)


def cache_of(model, **options):
    out = model.generate(
        left_padded(1, 40)[0], max_new_tokens=NEW, return_dict_in_generate=True, **{**GREEDY, **options}
    )
    return out.get(NAME)


# ---- generation_config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static", "offloaded", "dynamic"])
def test_the_cache_implementation_of_a_checkpoint_gives_way(name, models):
    ours, theirs = models
    inputs = {"input_ids": left_padded(1, 80)[0]}
    want = truth(theirs, **inputs)
    ours.generation_config.cache_implementation = name
    assert torch.equal(lb.generate(ours, **inputs, preset="dense", max_new_tokens=NEW, **GREEDY), want)
    same = copy.deepcopy(ours.generation_config)
    options = {"generation_config": same}
    assert torch.equal(lb.generate(ours, **inputs, preset="dense", max_new_tokens=NEW, **options, **GREEDY), want)
    for more in ({}, options):
        (result,) = lb.generate_many(ours, [inputs["input_ids"]], "dense", max_new_tokens=NEW, **more, **GREEDY)
        assert result.generated_tokens == want[0, 80:].tolist()
    other = GenerationConfig(cache_implementation="quantized")
    with pytest.raises(ValueError, match="cache_implementation='quantized' is not allowed: rows have packed pages"):
        lb.generate_many(ours, [[5]], "dense", max_new_tokens=NEW, generation_config=other)
    held = lb.from_preset("dense", ours, **SMALL_PAGES)
    with lb.enable(ours, "dense"):
        assert torch.equal(truth(ours, **inputs), want)
        assert type(cache_of(ours)) is lb.LowBitCache
        assert type(cache_of(ours, generation_config=same)) is lb.LowBitCache
        assert type(cache_of(ours, generation_config=GenerationConfig(max_new_tokens=2))) is lb.LowBitCache
        assert torch.equal(truth(ours, **inputs, **{NAME: held}), want)
    assert ours.generation_config.cache_implementation == name, "the model keeps its own"


@pytest.mark.filterwarnings("ignore:.*cache_implementation.*")
def test_what_a_call_names_counts(models):
    ours, _ = models
    ours.generation_config.cache_implementation = "static"
    with lb.enable(ours, "dense"):
        assert type(cache_of(ours, cache_implementation="static", disable_compile=True)) is StaticCache
        assert type(cache_of(ours, cache_implementation="dynamic")) is DynamicCache
        config = GenerationConfig(cache_implementation="dynamic")
        assert type(cache_of(ours, generation_config=config)) is DynamicCache
    with pytest.raises(ValueError, match="cache_implementation='static' is not allowed: the cache is a low-bit one"):
        lb.generate(ours, left_padded(1, 20)[0], max_new_tokens=2, cache_implementation="static")


def test_a_checkpoint_that_was_saved_without_caching_gets_a_cache(models):
    ours, theirs = models
    inputs = {"input_ids": left_padded(1, 80)[0]}
    want = truth(theirs, **inputs)
    ours.generation_config.use_cache = False
    held = lb.from_preset("dense", ours, **SMALL_PAGES)
    with lb.enable(ours, "dense"):
        assert type(cache_of(ours)) is lb.LowBitCache
        assert torch.equal(truth(ours, **inputs), want)
        assert torch.equal(truth(ours, **inputs, **{NAME: held}), want)
        assert cache_of(ours, use_cache=False) is None, "the call's own choice"
    same = {"generation_config": copy.deepcopy(ours.generation_config)}
    for more in ({}, same):
        assert torch.equal(lb.generate(ours, **inputs, preset="dense", max_new_tokens=NEW, **more, **GREEDY), want)
        (result,) = lb.generate_many(ours, [inputs["input_ids"]], "dense", max_new_tokens=NEW, **more, **GREEDY)
        assert result.generated_tokens == want[0, 80:].tolist()
    with pytest.raises(ValueError, match="use_cache=False is not allowed"):
        lb.generate(ours, **inputs, preset="dense", max_new_tokens=NEW, use_cache=False)
    ours.generation_config.use_cache = True
    with lb.enable(ours, "dense"):
        assert cache_of(ours, generation_config=GenerationConfig(use_cache=False, max_new_tokens=3)) is None
    with pytest.raises(ValueError, match="use_cache=False is not allowed"):
        lb.generate(ours, **inputs, preset="dense", generation_config=GenerationConfig(use_cache=False))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_is_refused_where_each_step_would_store_the_whole_text(family, padded):
    """In the second step. Gemma 2 does not hand `use_cache` to its layers, but positions that begin again."""
    if NAME == "past_key_values":
        pytest.skip("this transformers passes caches no positions")
    model = (tiny_mla if family == "deepseek_v3" else tiny_models)(family)[0]
    model.generation_config.use_cache = False
    ids, mask = left_padded(2, 40)
    inputs = {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}
    if not padded:
        inputs["input_ids"] = ids[:1]
    cache = lb.from_preset("dense" if family != "deepseek_v3" else "mla", model)
    with pytest.raises(ValueError, match="use_cache=False"):
        truth(model, **inputs, **{NAME: cache})
    cache.reset()
    theirs = truth(model, **inputs, use_cache=True)
    assert torch.equal(truth(model, **inputs, use_cache=True, **{NAME: cache}), theirs)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation='sdpa'")
def test_a_cache_is_refused_without_caching_under_another_attention(models):
    """transformers hands `use_cache` to caches since 5.24."""
    _, theirs = models
    cache = lb.from_preset("dense", theirs)
    if NAME == "past_key_values":
        pytest.skip("this transformers passes the cache nothing")
    with pytest.raises(ValueError, match="use_cache=False"):
        truth(theirs, input_ids=left_padded(1, 20)[0], use_cache=False, **{NAME: cache})
    assert cache.get_seq_length() == 20, "the prompt, once"


# ---- embeddings -------------------------------------------------------------------------------------------------------


def ours_with(model, cache, **inputs):
    return lb.generate(model, past_key_values=cache, max_new_tokens=NEW, **inputs, **GREEDY)


def enabled_with(model, cache, **inputs):
    with lb.enable(model, "dense"):
        return truth(model, **inputs, **{NAME: cache})


def conversation(models, run, first_as, second_as, change=None):
    """Two turns of two rows, the first row changed in the second turn. Returns the second turn's tokens and the true ones."""
    ours, theirs = models
    cache = lb.from_preset("dense", ours, max_cache_len=512, **SMALL_PAGES)
    ids = left_padded(1, 60)[0].repeat(2, 1)
    embed = ours.get_input_embeddings()

    def named(ids, name):
        return {"inputs_embeds": embed(ids).detach()} if name == "embeddings" else {"input_ids": ids}

    answer = run(ours, cache, **named(ids, first_as))[:, -NEW:]
    longer = torch.cat([ids, answer, left_padded(2, 20, seed=4)[0].clamp(min=3)], dim=1)
    if change is not None:
        longer[1, change] = (longer[1, change] + 1) % 150
    found = run(ours, cache, **named(longer, second_as))[:, -NEW:]
    return found, truth(theirs, input_ids=longer)[:, -NEW:]


@pytest.mark.parametrize(
    ("first_as", "second_as", "run"),
    [("embeddings", "embeddings", ours_with), ("embeddings", "ids", enabled_with), ("ids", "embeddings", ours_with)],
)
def test_a_text_of_embeddings_goes_on_and_another_is_refused(first_as, second_as, run, models):
    found, want = conversation(models, run, first_as, second_as)
    assert torch.equal(found, want)
    for token in (0, 31, 59, 62):  # of the prompt, and of the first answer
        with pytest.raises(ValueError, match=f"token {token} of row 1 has another embedding than the stored one"):
            conversation(models, run, first_as, second_as, change=token)


def test_remembered_embeddings_follow_the_cache(models, tmp_path):
    ours, _ = models
    cache = lb.from_preset("dense", ours, max_cache_len=512, **SMALL_PAGES)
    embeds = ours.get_input_embeddings()(left_padded(2, 60)[0]).detach()
    ours_with(ours, cache, inputs_embeds=embeds)
    assert cache.text.shape[:2] == (2, 60 + NEW - 1)
    cache.crop(-10)
    assert cache.text.shape[:2] == (2, 50 + NEW - 1)
    cache.save_pretrained(tmp_path)
    restored = lb.LowBitCache.from_pretrained(tmp_path, ours, max_cache_len=512)
    other = torch.cat([embeds, embeds], dim=1)
    for held in (restored, cache.fork()[0]):
        with pytest.raises(ValueError, match="token 3 of row 0"):
            ours_with(ours, held, inputs_embeds=torch.cat([other[:, :3], other[:, 4:]], dim=1))
