"""Forks: several caches that hold the same tokens in the same pages, and continue differently."""

import copy
import gc
import itertools

import pytest
import torch
from cases import (
    SMALL_PAGES,
    cache_of,
    continued,
    every_preset,
    filled,
    left_padded,
    random_parameters,
    read,
    tiny_models,
    with_windows,
)
from generation_cases import GREEDY
from mla_cases import tiny_models as mla_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

DENSE = {"key_format": "dense", "value_format": "dense"}
LENGTHS = pytest.mark.parametrize("max_cache_len", [None, 400], ids=["growing", "preallocated"])


def _memory(caches) -> int:
    """Bytes that caches take together, by their storages."""
    tensors = [x for cache in caches for layer in cache.packed_layers for x in layer.store.state.tensors()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.host
@pytest.mark.parametrize(
    ("formats", "residual", "max_cache_len"), with_windows((0, None), (32, 400), (32, None), (0, 400))
)
def test_a_fork_gives_the_logits_of_its_cache(model, formats, residual, max_cache_len):
    """Rows of different lengths; several pages are packed after the fork, differently in each."""
    ids, mask = left_padded(2, 100)
    options = {"page_size": 32, "residual": residual, "max_cache_len": max_cache_len}
    cache, reference = (cache_of(model, formats, **options) for _ in range(2))
    for each in (cache, reference):
        read(model, each, ids, mask)
    first, second = cache.fork(2)
    texts = [torch.randint(3, 160, (2, 70)) for _ in range(3)]
    mask_after = continued(mask, 70)
    found = [read(model, each, text, mask_after) for each, text in zip((first, second, cache), texts, strict=True)]
    for text, got in zip(texts, found, strict=True):
        fresh = cache_of(model, formats, **options)
        read(model, fresh, ids, mask)
        assert torch.equal(read(model, fresh, text, mask_after), got)
    # and they hold only their own tokens now
    for each, text in zip((first, second, cache), texts, strict=True):
        fresh = copy.deepcopy(reference)
        read(model, fresh, text, mask_after)
        step = torch.tensor([[7], [9]])
        assert torch.equal(read(model, fresh, step), read(model, each, step))


def test_layers_of_different_windows(model):
    """Their pages end at different tokens: a page that is full in one layer is not in the other."""
    options = {**SMALL_PAGES, "per_layer": {1: {"residual": 64}}}
    ids, texts = left_padded(1, 200)[0], torch.randint(3, 160, (2, 1, 70))
    cache = lb.LowBitCache(model, **DENSE, **options)
    read(model, cache, ids)
    assert len({int(layer.store.state.paged[0, 0]) for layer in cache.packed_layers}) == 2
    for each, text in zip((cache.fork()[0], cache), texts, strict=True):
        read(model, each, text)
        want = lb.LowBitCache(model, **DENSE, **options)
        read(model, want, torch.cat([ids, text], 1))
        step = torch.tensor([[7]])
        torch.testing.assert_close(read(model, each, step), read(model, want, step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *((family, (400, 200)) for family in ("gemma2", "qwen3_next", "jamba", "lfm2")),
        *(("gemma2", lengths) for lengths in ((None, None), (400, None), (22, 400))),
    ],
    ids=str,
)
def test_layers_of_transformers_are_forked_too(family, lengths):
    """A fork continues as transformers' own cache does; (22, 400) is shorter than the sliding window of 24."""
    ours, theirs = tiny_models(family)
    length, of_forks = lengths
    ids, _ = left_padded(1, 20 if length == 22 else 60)
    cache = lb.LowBitCache(ours, **DENSE, **SMALL_PAGES, max_cache_len=length)
    stock = DynamicCache(config=theirs.config)
    read(ours, cache, ids)
    read(theirs, stock, ids)
    fork = cache.fork(max_cache_len=of_forks)[0]
    for count in (11, 1, 30, 1):
        text = torch.randint(3, 160, (1, count))
        torch.testing.assert_close(read(ours, fork, text), read(theirs, stock, text), atol=1e-4, rtol=1e-4)
    assert int(fork.get_seq_length(1)) == ids.shape[1] + 43
    assert int(cache.get_seq_length(1)) == ids.shape[1]


@LENGTHS
@pytest.mark.parametrize("formats", [("int4-channel", "int4-token"), ("int4-token", "int4-token")], ids="/".join)
@pytest.mark.parametrize("residual", [32, 0])
def test_sixteen_forks_cost_their_windows_and_open_pages(model, formats, residual, max_cache_len):
    cache = cache_of(model, formats, sink=4, page_size=32, residual=residual, max_cache_len=max_cache_len)
    read(model, cache, left_padded(1, 200)[0])
    before = cache.nbytes
    forks = cache.fork(16)
    assert cache.nbytes == before
    store = cache.packed_layers[0].store
    spec, heads = store.spec, store.num_heads
    window = heads * (spec.sink + spec.tail_size) * 2 * 64 * 4
    own_pages = 1 if spec.direct else 0
    if max_cache_len is not None:  # the room that is preallocated
        own_pages = spec.pages_for(max_cache_len) - int(store.state.paged[0, 0]) // spec.page_size
    tables = 2000
    for fork in forks:
        cost = len(cache.packed_layers) * (window + own_pages * heads * store.page_bytes)
        assert cost <= fork.nbytes <= cost + len(cache.packed_layers) * tables
        own = int(spec.direct) * heads * store.page_bytes * len(cache.packed_layers)
        assert fork.nbytes.codes + fork.nbytes.metadata == own
        assert fork.nbytes.window == before.window
        assert fork.nbytes.shared == before.codes + before.metadata - own
        assert fork.bits_per_value == cache.bits_per_value
    assert sum(each.nbytes for each in (cache, *forks)) == _memory((cache, *forks))


@LENGTHS
def test_every_byte_counts_once_whoever_goes_first(model, max_cache_len):
    """The oldest cache that is alive counts what is shared; the last one counts everything."""
    for order in itertools.permutations(range(3)):
        cache = filled(model, max_cache_len=max_cache_len)
        caches = [cache, *cache.fork(), *cache.fork()]
        del cache
        stored = caches[0].nbytes
        alive = {0: caches[0], 1: caches[1], 2: caches[2]}
        del caches
        for gone in order[:2]:
            del alive[gone]
            gc.collect()
            assert sum(each.nbytes for each in alive.values()) == _memory(alive.values())
            assert [each.nbytes.codes for each in alive.values()] == [stored.codes, *[0] * (len(alive) - 1)]


@LENGTHS
def test_pages_of_a_fork_are_not_written_by_what_it_came_from(model, max_cache_len):
    """Whatever happens to one of the two, the other is unaffected."""
    ids, _ = left_padded(1, 80)

    def reset(cache):
        cache.reset()
        read(model, cache, torch.randint(3, 160, (1, 150)))

    def crop(cache):
        cache.crop(-70)
        read(model, cache, torch.randint(3, 160, (1, 150)))

    def crop_and_fork(cache):
        cache.crop(-20)
        for fork in cache.fork(2):
            read(model, fork, torch.randint(3, 160, (1, 100)))

    for change, of_fork in itertools.product((reset, crop, crop_and_fork), (True, False)):
        cache, reference = (filled(model, max_cache_len=max_cache_len) for _ in range(2))
        fork = cache.fork()[0]
        changed, kept = (fork, cache) if of_fork else (cache, fork)
        for _ in range(2):
            change(changed)
        text = torch.randint(3, 160, (1, 60))
        assert torch.equal(read(model, kept, text), read(model, reference, text))
        change(changed)
        changed.reset()
        assert torch.equal(read(model, changed, ids), read(model, filled_nothing(model, max_cache_len), ids))


@LENGTHS
@pytest.mark.parametrize("count", [2, 3])
def test_pages_that_several_forks_hold_are_not_written(model, count, max_cache_len):
    cache, reference = (filled(model, max_cache_len=max_cache_len) for _ in range(2))
    forks = cache.fork(count)
    cache.reset()
    read(model, cache, torch.randint(3, 160, (1, 150)))
    text = torch.randint(3, 160, (1, 60))
    want = read(model, reference, text)
    for fork in forks:
        assert torch.equal(read(model, fork, text), want)


def filled_nothing(model, max_cache_len):
    return lb.from_preset("kivi-2", model, **SMALL_PAGES, max_cache_len=max_cache_len)


def test_pages_come_back(model):
    """A cache that is forked, emptied and filled again takes new memory once: when forks are gone their pages are free."""
    cache = filled(model, max_cache_len=400)
    store = cache.packed_layers[0].store
    for _ in range(5):
        fork = cache.fork()[0]
        cache.reset()
        read(model, cache, left_padded(1, 80)[0])
        assert store.num_pages <= 2 * store.pages_per_row
        del fork


def test_every_fork_has_memory_of_its_own(model, monkeypatch):
    """Whichever way PyTorch copies many tensors: older releases lack a call for that. No two tensors of forks share memory, but
    for full pages and records, and no fork shares an object that it changes in place."""
    for name in ("_foreach_clone", "_foreach_mul"):
        if name == "_foreach_mul":
            monkeypatch.delattr(torch, "_foreach_clone", raising=False)
        cache = filled(model, max_cache_len=400)
        forks = cache.fork(3)
        own = []
        for each in (cache, *forks):
            states = [layer.store.state for layer in each.packed_layers]
            own += [
                getattr(state, field)
                for state in states
                for field in state._fields
                if field not in ("pool", "parameters")
            ]
            own += [layer.length.seen for layer in each.packed_layers]
        places = {x.untyped_storage().data_ptr() for x in own if x.numel()}
        assert len(places) == sum(x.numel() > 0 for x in own)
        for fork in forks:
            for layer, before in zip(fork.packed_layers, cache.packed_layers, strict=True):
                for field in ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged", "lost"):
                    assert torch.equal(getattr(layer.store.state, field), getattr(before.store.state, field))
                assert not layer.store.state.scratch.any()
                shared = {key for key, value in layer.__dict__.items() if value is before.__dict__[key]}
                changed = {"store", "length", "_padding", "parameters"}
                assert not shared & changed
                kinds = (bool, int, str, type(None), torch.dtype, torch.device)
                read_only = {"spec", "config", "model_side", "_prepared", "filled_by", "readers", "new_token_masks"}
                assert all(isinstance(layer.__dict__[key], kinds) for key in shared - read_only)


def test_beams_over_a_fork(model):
    """Rows of forks share pages among themselves as well."""
    ids, _ = left_padded(1, 80)
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 50, **GREEDY}
    cache = cache_of(model, ("dense", "dense"), **SMALL_PAGES)
    want = model.generate(ids, **as_argument(cache_of(model, ("dense", "dense"), **SMALL_PAGES)), **options)
    read(model, cache, ids[:, :-1])
    for each in (*cache.fork(2), cache):
        each.batch_repeat_interleave(4)
        assert torch.equal(model.generate(ids, **as_argument(each), **options), want)


def test_generate_goes_on_with_a_fork(model):
    ids, _ = left_padded(1, 60)
    more = torch.randint(3, 160, (1, 20))
    options = {"max_new_tokens": 40, "return_dict_in_generate": True, "cache_options": SMALL_PAGES, **GREEDY}
    first = lb.generate(model, ids, "kivi-4", max_cache_len=400, **options)
    text = torch.cat([first.sequences, more], dim=1)
    want = lb.generate(model, text, "kivi-4", **options).sequences.shape
    cache = first.past_key_values
    del options["cache_options"]
    turns = [lb.generate(model, text, past_key_values=each, **options).sequences for each in cache.fork(2)]
    assert turns[0].shape == want
    assert torch.equal(turns[0], turns[1])
    assert torch.equal(turns[0], lb.generate(model, text, past_key_values=cache, **options).sequences)
    other = (torch.cat([text, text], dim=1) + 1) % model.config.vocab_size
    with pytest.raises(ValueError, match="do not begin with the text"):
        lb.generate(model, other, past_key_values=cache.fork()[0], **options)


def test_a_fork_before_the_first_token_and_in_inference_mode(model):
    empty = filled_nothing(model, None)
    ids, _ = left_padded(1, 80)
    with torch.inference_mode():
        fork = empty.fork()[0]
        inside = model(ids, **as_argument(fork)).logits[:, -1]
        again = fork.fork()[0]
    assert torch.equal(read(model, empty, ids), inside)
    assert torch.equal(read(model, empty, ids), read(model, again, ids))  # writes to what was made inside


def test_a_fork_of_no_rows(model):
    cache = filled(model)
    cache.batch_select_indices(torch.zeros(0, dtype=torch.int64))
    for fork in (*cache.fork(2), cache.fork()[0].fork()[0]):
        assert fork.packed_layers[0].batch_size == 0
        fork.reset()
        ids, _ = left_padded(1, 80)
        assert torch.equal(read(model, fork, ids), read(model, filled_nothing(model, None), ids))


def test_bad_sizes(model):
    with pytest.raises(ValueError, match="max_cache_len=79 is too small: 80 tokens are stored"):
        filled(model, max_cache_len=100).fork(max_cache_len=79)
    with pytest.raises(ValueError, match="max_cache_len=500 is not allowed: this cache grows"):
        filled(model).fork(max_cache_len=500)


def test_a_fork_may_be_longer_or_shorter(model):
    cache = filled(model, max_cache_len=400)
    text = torch.randint(3, 160, (1, 20))
    short, long = cache.fork(max_cache_len=100)[0], cache.fork(max_cache_len=900)[0]
    assert torch.equal(read(model, short, text), read(model, cache, text))
    with pytest.raises(ValueError, match="max_cache_len=100 is too small"):
        read(model, short, text)
    read(model, long, torch.randint(3, 160, (1, 700)))
    assert int(long.get_seq_length()) == 780


# ---- forked and restored caches of every preset ---------------------------------------------------------------------


#: presets whose formats and windows differ most; the others run in `make test-all`
FAST = ("dense", "kivi-4-sink", "kitty", "eigen-2", "vecinfer-4", "kv8")
LATENT = tuple(name for name in every_preset() if lb.get_preset(name).attention_kind == "latent")
SEPARATE = tuple(name for name in every_preset() if name not in LATENT)


@pytest.fixture(scope="module")
def latent_model():
    return mla_models("deepseek_v2")[0]


def go_on_alike(model, folder, make):
    """Forks and restored caches, growing and preallocated: a text that fills pages, and a step after it."""
    prompt, text = left_padded(1, 400)[0], left_padded(1, 200, seed=1)[0]
    for length in (None, 800):
        cache = make(length)
        read(model, cache, prompt)
        cache.save_pretrained(folder)
        others = [*cache.fork(2), lb.LowBitCache.from_pretrained(folder, model, max_cache_len=length)]
        for ids in (text, torch.tensor([[7]])):
            want = read(model, cache, ids)
            for other in others:
                assert torch.equal(read(model, other, ids), want)
    return cache


@pytest.mark.parametrize(
    "preset", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SEPARATE]
)
def test_presets(model, preset, tmp_path):
    spec = lb.get_preset(preset).spec()
    given = {"parameters": random_parameters(model, spec)} if spec.parameters(64, 64, 2) else {}
    cache = go_on_alike(model, tmp_path, lambda length: lb.from_preset(preset, model, max_cache_len=length, **given))
    assert preset == "dense" or cache.nbytes.codes > 0, "nothing was packed"


@pytest.mark.parametrize("preset", LATENT)
def test_latents(latent_model, preset, tmp_path):
    go_on_alike(latent_model, tmp_path, lambda length: lb.from_preset(preset, latent_model, max_cache_len=length))
