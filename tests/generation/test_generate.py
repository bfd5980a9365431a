"""`generate()` in every mode: the `dense` format gives the tokens of the stock cache, every other the tokens of its rows."""

import copy
import itertools
import warnings

import pytest
import torch
from cases import FAMILIES, FORMAT_CASES, SMALL_PAGES, cache_of, left_padded, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb

pytestmark = pytest.mark.host

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "chunked_prefill": {"prefill_chunk_size": 40},
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    return tiny_models(request.param)


def _generate(model, cache, ids, mask, **options):
    torch.manual_seed(1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **{**GREEDY, **options})


def _has_host_layers(cache) -> bool:
    return len(cache.packed_layers) < len(cache.layers)


def _every_mode() -> list:
    """One model in every way, the others in growing caches of several rows: greedily, and in a mode that changes from family
    to family. The rest is slow."""
    cases = []
    for (number, family), mode, batch, size in itertools.product(enumerate(FAMILIES), MODES, (1, 4), (None, 200)):
        if (mode, batch) == ("prompt_lookup", 4):  # transformers offers prompt lookup for one row only
            continue
        several = batch == 4 or mode == "prompt_lookup"
        own = list(MODES)[number % len(MODES)]
        few = family == "llama" or (several and size is None and mode in ("greedy", own))
        cases.append(
            (family, mode, batch, size) if few else pytest.param(family, mode, batch, size, marks=pytest.mark.slow)
        )
    return cases


@pytest.mark.parametrize(
    ("models", "mode", "batch", "max_cache_len"), _every_mode(), indirect=["models"], scope="module"
)
def test_dense_gives_the_tokens_of_the_stock_cache(models, mode, batch, max_cache_len):
    ours, theirs = models
    ids, mask = left_padded(batch, 100)
    if mode == "prompt_lookup":
        ids = ids[:, :25].repeat(1, 4)  # something to look up
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    if mode == "prompt_lookup" and ours._is_stateful:
        pytest.skip("the host has no prompt lookup for models with recurrent layers")
    if mode == "prompt_lookup" and max_cache_len and _has_host_layers(cache):
        pytest.skip("the host's preallocated sliding layers cannot crop")
    want = _generate(theirs, DynamicCache(config=theirs.config), ids, mask, **MODES[mode])
    got = _generate(ours, cache, ids, mask, **MODES[mode])
    assert torch.equal(got, want)
    assert int(cache.packed_layers[0].store.state.paged.min()) > 0  # something was packed


#: a single attention layer, and layers that stay transformers' own: sliding and recurrent ones
EACH_KIND = ("llama", "gemma3_text", "qwen3_next")
OTHERS = [family for family in FAMILIES if family != "llama"]
#: other models with the kind of layers that llama has
LIKE_LLAMA = ("qwen3", "qwen3_moe", "mistral", "mixtral", "phi3")


def _marked(family: str, *values):
    """A case that runs on the oldest version too if its family is one of `EACH_KIND`, and in `make test-all` if it has llama's
    layers."""
    if family in LIKE_LLAMA:
        return pytest.param(family, *values, marks=pytest.mark.slow)
    return (family, *values) if family in EACH_KIND else pytest.param(family, *values, marks=pytest.mark.newest)


@pytest.mark.parametrize(
    ("models", "batch", "max_cache_len"),
    [
        *(("llama", 1, None), ("llama", 1, 300), ("llama", 4, 300)),
        *(_marked(family, 4, None) for family in FAMILIES),
        *(
            pytest.param(family, *way, marks=pytest.mark.slow)
            for family in OTHERS
            for way in ((1, None), (1, 300), (4, 300))
        ),
    ],
    indirect=["models"],
    scope="module",
)
def test_second_turn_on_the_same_cache(models, batch, max_cache_len):
    ours, theirs = models
    ids, mask = left_padded(batch, 90)
    more_ids, more_mask = left_padded(batch, 50, seed=1)  # padding in the middle, for rows beyond the first
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    stock = DynamicCache(config=theirs.config)
    turns = []
    for model, past in ((ours, cache), (theirs, stock)):
        first = _generate(model, past, ids, mask)
        # generate() does not run the last token it returns, so the history is one token short of `first`
        second_ids = torch.cat([first, more_ids], dim=1)
        second_mask = torch.cat([mask, torch.ones_like(first[:, ids.shape[1] :]), more_mask], dim=1)
        turns.append((first, _generate(model, past, second_ids, second_mask)))
    assert torch.equal(turns[0][0], turns[1][0])
    assert torch.equal(turns[0][1], turns[1][1])


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss"])
def test_texts_shorter_than_the_sliding_window(family):
    # transformers then gives its sliding layers no mask, whether their keys are the chunk or a whole preallocated layer
    ours, theirs = tiny_models(family, sliding_window=512)
    ids, mask = left_padded(1, 100)
    want = _generate(theirs, DynamicCache(config=theirs.config), ids, mask)
    for options in ({}, {"max_cache_len": 150}, {"max_cache_len": 600}):
        assert torch.equal(_generate(ours, lb.from_preset("dense", ours, **SMALL_PAGES, **options), ids, mask), want)
    # transformers' own caches under our attention function
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(ours.generate(ids, attention_mask=mask, **GREEDY, **options), want)
    assert torch.equal(lb.generate(ours, ids, "dense", **GREEDY), want)


@pytest.fixture(scope="module")
def llama():
    return tiny_models("llama")


@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"residual": 0}, {"sink": 8}, {"max_cache_len": 200}))],
    ids=str,
)
def test_left_padded_rows_are_the_rows_alone(llama, formats, options):
    ours, _ = llama
    ids, mask = left_padded(3, 100)
    options = {**SMALL_PAGES, **options}
    together = _generate(ours, cache_of(ours, formats, **options), ids, mask)
    for row in range(3):
        start = 7 * row
        cache = cache_of(ours, formats, **options)
        single = _generate(ours, cache, ids[row : row + 1, start:], mask[row : row + 1, start:])
        assert torch.equal(together[row, start:], single[0])


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_other_attention_implementations_get_dense_tensors(llama, formats, implementation):
    ours, theirs = (copy.deepcopy(model) for model in llama)
    ids, mask = left_padded(2, 100)
    ids, mask = ids[:1], mask[:1]
    want = _generate(ours, cache_of(ours, formats, **SMALL_PAGES), ids, mask)
    theirs.set_attn_implementation(implementation)
    got = _generate(theirs, cache_of(theirs, formats, **SMALL_PAGES), ids, mask)
    assert torch.equal(got, want)


def test_attention_implementation_can_be_set_later(llama):
    _, theirs = (copy.deepcopy(model) for model in llama)
    ids, mask = left_padded(4, 100)
    want = _generate(theirs, DynamicCache(config=theirs.config), ids, mask)
    theirs.set_attn_implementation(lb.ATTENTION_NAME)
    assert torch.equal(_generate(theirs, lb.from_preset("dense", theirs, **SMALL_PAGES), ids, mask), want)
    # and plain calls, without a cache or with transformers' own, continue as before
    assert torch.equal(_generate(theirs, DynamicCache(config=theirs.config), ids, mask), want)
    assert torch.equal(_generate(theirs, None, ids, mask, use_cache=False), want)


@pytest.mark.parametrize(
    ("models", "max_cache_len"),
    [
        ("llama", 200),
        *(_marked(family, None) for family in FAMILIES),
        *(pytest.param(family, 200, marks=pytest.mark.slow) for family in OTHERS),
    ],
    indirect=["models"],
    scope="module",
)
def test_reset_starts_afresh(models, max_cache_len):
    ours, _ = models
    ids, mask = left_padded(2, 100)
    cache = lb.from_preset("kivi-2", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    want = _generate(ours, cache, ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(_generate(ours, cache, ids, mask), want)
    cache.reset()
    short = _generate(ours, cache, ids[:1], mask[:1])  # another batch size
    assert torch.equal(short[0], want[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("max_cache_len", [None, 200], ids=["growing", "preallocated"])
def test_a_cache_filled_in_inference_mode_can_be_used_outside(llama, options, max_cache_len):
    ours, _ = llama
    ids, mask = left_padded(1, 100)
    rows = options.get("num_beams", 1)
    caches = [lb.from_preset("kivi-2", ours, max_cache_len=max_cache_len, **SMALL_PAGES) for _ in range(2)]
    for cache, mode in zip(caches, (torch.inference_mode, torch.no_grad), strict=True):
        with mode():
            ours(ids[:, :80].repeat(rows, 1), past_key_values=cache)
            cache.reorder_cache(torch.arange(rows))
    results = [_generate(ours, cache, ids, mask, **options) for cache in caches]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("tokens", "new", "message"),
    [(20, 13, "prompt and answer may have 33 tokens"), (40, 2, "the prompt has 40 tokens"), (20, 12, None)],
)
def test_texts_beyond_the_models_positions_are_announced_before_they_are_read(tokens, new, message):
    model = tiny_models("llama", max_position_embeddings=32)[0]
    warned = []
    model.register_forward_pre_hook(lambda *args: warned.append(len(caught)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lb.generate(model, torch.randint(3, 150, (1, tokens)), max_new_tokens=new, do_sample=False, pad_token_id=0)
    assert warned[0] == len(caught) == (message is not None)
    if message is not None:
        assert f"{message}, and the model was made for at most 32" in str(caught[0].message)
        assert caught[0].filename == __file__
