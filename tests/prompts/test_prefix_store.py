"""The prefix store: texts that are not read again, and tokens that are those of a call without it."""

import copy
import gc
import pickle

import pytest
import torch
from cases import SMALL_PAGES, Counted, read, tiny_models
from generation_cases import GREEDY
from prefix_cases import DENSE, generated, text

import hf_lowbit_kv as lb
from hf_lowbit_kv.formats import fragment


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


@pytest.mark.host
def test_a_shared_beginning_is_read_once(model):
    """100 tokens in common: the last 32 of them are read again, and pages end at 64."""
    store = lb.PrefixStore("1GB")
    system = text(100, 1)
    for turn in range(3):
        ids = torch.cat([system, text(130, 10 + turn)], dim=1)
        tokens, cached, count = generated(model, ids, store)
        assert torch.equal(tokens, generated(model, ids, None)[0])
        assert (cached, count) == ((0, 230) if turn == 0 else (64, 166))
    assert (store.hits, store.misses, store.tokens_saved, len(store)) == (2, 1, 128, 3)
    assert "3 texts" in repr(store)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    assert generated(model, ids, store)[1] == 0


@pytest.mark.host
def test_a_text_that_goes_on_and_one_that_comes_again(model):
    """A further turn sends only new tokens; the same prompt sends its last token."""
    store = lb.PrefixStore()
    ids = text(90, 1)
    first, *_ = generated(model, ids, store)
    again, cached, count = generated(model, ids, store)
    assert torch.equal(again, first)
    assert (cached, count) == (89, 1)
    turn = torch.cat([first, text(9, 2)], dim=1)
    tokens, cached, count = generated(model, turn, store)
    assert torch.equal(tokens, generated(model, turn, None)[0])
    assert (cached, count) == (first.shape[1] - 1, 10)
    assert len(store) == 1  # it continues from the first
    short, cached, count = generated(model, ids[:, :50], store)
    assert torch.equal(short, generated(model, ids[:, :50], None)[0])
    assert cached + count == 50


@pytest.mark.parametrize("preset", ["kivi-4", "kivi-2-sink", "kitty", "int8", "fp8", "kivi-4-hadamard"])
def test_packed_presets(model, preset):
    """A text that continues from an exact end has the tokens of a call that continues with the cache."""
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, **GREEDY}
    store, ids = lb.PrefixStore(), text(300, 1)
    first = lb.generate(
        model, ids, preset, prefixes=store, cache_options={"page_size": 32}, max_cache_len=600, **options
    )
    turn = torch.cat([first.sequences, text(20, 2)], dim=1)
    stored = lb.generate(model, turn, preset, prefixes=store, cache_options={"page_size": 32}, **options)
    assert stored.past_key_values.cached_tokens == first.sequences.shape[1] - 1
    assert torch.equal(
        stored.sequences, lb.generate(model, turn, past_key_values=first.past_key_values, **options).sequences
    )


def test_rows_take_the_shortest_match(model):
    store, system = lb.PrefixStore(), text(150, 1)
    rows = [torch.cat([system[:, :keep], text(200 - keep, keep)], dim=1) for keep in (150, 100)]
    generated(model, system, store)
    ids = torch.cat(rows)
    tokens, cached, count = generated(model, ids, store)
    assert torch.equal(tokens, generated(model, ids, None)[0])
    assert (cached, count) == (64, 136)
    stored = {prompt.ids.shape[0] for prompt in store._prompts}
    assert stored == {161, 211}


@pytest.mark.host
def test_padded_rows_of_different_lengths(model):
    store, system = lb.PrefixStore(), text(110, 1)
    generated(model, torch.cat([system, text(130, 5)], dim=1), store)
    ids, mask = torch.zeros(3, 150, dtype=torch.long), torch.zeros(3, 150, dtype=torch.long)
    for row, length in enumerate((150, 130, 141)):
        ids[row, 150 - length :] = torch.cat([system, text(length - 110, 20 + row)], dim=1)[0]
        mask[row, 150 - length :] = 1
    options = {"attention_mask": mask}
    with_logits = {"cache_options": DENSE, "return_dict_in_generate": True, "output_logits": True, **options, **GREEDY}
    want = lb.generate(model, ids, "kivi-4", 12, **with_logits)
    with Counted(model) as counted:
        got = lb.generate(model, ids, "kivi-4", 12, prefixes=store, **with_logits)
    tokens = got.sequences
    assert torch.equal(tokens, want.sequences)
    # positions that are wrong by a row's padding change logits, and here no token
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)
    assert (got.past_key_values.cached_tokens, counted.tokens - 11) == (64, 86)
    # what they left is what each one leaves in its own store
    for row, length in enumerate((150, 130, 141)):
        turn = torch.cat([tokens[row : row + 1, 150 - length :], text(5, 9)], dim=1)
        again, cached, _ = generated(model, turn, store)
        assert torch.equal(again, generated(model, turn, None)[0])
        assert cached == length + 11
    # and crop counts their padding
    out = lb.generate(
        *(model, ids, "kivi-4", 5),
        prefixes=store, cache_options=DENSE, max_cache_len=300, return_dict_in_generate=True, **options, **GREEDY,
    )  # fmt: skip
    out.past_key_values.crop(-40)
    assert out.past_key_values.packed_layers[0].store.state.length[:, 0].tolist() == [114, 94, 105]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3_next", "jamba", "lfm2"])
def test_models_with_sliding_or_recurrent_layers_match_exact_ends(family):
    ours, _ = tiny_models(family)
    store, system = lb.PrefixStore(), text(100, 1)
    texts = [torch.cat([system, text(30, seed)], dim=1) for seed in (5, 6, 7)]
    for number, ids in enumerate(texts):
        tokens, cached, count = generated(ours, ids, store)
        assert torch.equal(tokens, generated(ours, ids, None)[0])
        # the second one shows where they part; from then on that is an end
        assert (cached, count) == ((100, 30) if number == 2 else (0, 130))
    again, cached, count = generated(ours, texts[0], store)
    assert (cached, count) == (129, 1)
    turn = torch.cat([again, text(9, 2)], dim=1)
    mask = torch.ones_like(turn)  # an answer may have the id of padding in it
    tokens, cached, _ = generated(ours, turn, store, attention_mask=mask)
    assert torch.equal(tokens, generated(ours, turn, None, attention_mask=mask)[0])
    assert cached == again.shape[1] - 1


LLAMA4 = {"num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 64}


@pytest.mark.parametrize(
    ("family", "changes"), [("gemma2", {}), ("gpt_oss", {}), ("qwen3_next", {}), ("lfm2", {}), ("llama4_text", LLAMA4)]
)
def test_a_prompt_that_is_the_beginning_of_a_stored_text(family, changes):
    """Native layers have only its end, so it is read again, and from then on it has an end of its own."""
    ours, _ = tiny_models(family, **changes)
    long = text(150, 1)
    for length in (70, 149):
        ids, store = long[:, :length], lb.PrefixStore()
        want = generated(ours, ids, None)[0]
        generated(ours, long, store)
        for reads in ((0, length), (length - 1, 1)):
            tokens, *rest = generated(ours, ids, store)
            assert torch.equal(tokens, want)
            assert tuple(rest) == reads
        store = lb.PrefixStore()
        with lb.enable(ours, "kivi-4", prefixes=store, **DENSE):
            ours.generate(long, max_new_tokens=12, **GREEDY)
            for _ in range(2):
                assert torch.equal(ours.generate(ids, max_new_tokens=12, **GREEDY), want)
        assert store.hits == 1


def test_sliding_layers_have_only_the_end_of_a_text():
    """Not a place in its window, although packed layers hold that; and not the ends of two texts at once."""
    ours, _ = tiny_models("gemma2")
    store, texts = lb.PrefixStore(), [text(100, 1), text(108, 2)]
    for ids in texts:
        generated(ours, ids, store, 1)
    parted = torch.cat([texts[0][:, :98], text(30, 3)], dim=1)
    cache = lb.from_preset("kivi-4", ours, **DENSE)
    assert store.find(cache, [parted[0]]) == (0, 98, None)
    longer = [torch.cat([ids, text(9, 4)], dim=1)[0] for ids in texts]
    assert [store.find(cache, [ids]).tokens for ids in longer] == [100, 108]
    assert store.find(cache, longer).tokens == 0
    # so a text is kept beside those that it continues, and those that continue it
    for ids in (longer[0][None], texts[0][:, :60]):
        before = len(store)
        generated(ours, ids, store, 1)
        assert len(store) > before
    ends = {tuple(prompt.ids.tolist()) for prompt in store._prompts}
    assert {tuple(ids.flatten().tolist()) for ids in (texts[0], longer[0], texts[0][:, :60])} <= ends


def test_a_place_in_the_window_of_a_text(model):
    """No page is read again. Two rows begin there with one text, and with two texts that do not have the same length at a
    page."""
    store, ids = lb.PrefixStore(), text(100, 1)
    longer = torch.cat([ids, text(8, 2)], dim=1)
    for each in (ids, longer.flip(1)):
        generated(model, each, store, 1)
    cache = lb.from_preset("kivi-4", model, **DENSE)
    rows = [torch.cat([ids[0, :98], text(30, seed)[0]]) for seed in (3, 4)]
    assert store.find(cache, rows).tokens == 98
    rows[1] = torch.cat([longer.flip(1)[0, :107], text(30, 5)[0]])
    assert store.find(cache, rows).tokens == 64


def test_a_text_that_another_one_saves_reading_is_no_hit(model):
    """A pool may know more tokens of a text than the store does."""
    store, ids = lb.PrefixStore(), text(100, 1)
    generated(model, ids, store, 1)
    cache, longer = lb.from_preset("kivi-4", model, **DENSE), torch.cat([ids, text(9, 2)], dim=1)[0]
    before = store.hits, store.misses
    for known in (100, 128):
        assert store.find(cache, [longer], known=known).contents is None
    assert (store.hits, store.misses) == before
    assert store.find(cache, [longer], known=99).tokens == 100
    assert store.hits == before[0] + 1


def test_rows_of_another_length_are_not_kept(model):
    store, ids = lb.PrefixStore(), text(90, 1)
    cache = lb.from_preset("kivi-4", model, max_cache_len=200, **DENSE)
    read(model, cache, ids)
    for other in (ids[0, :80], ids[0, :0], text(91, 1)[0]):
        store.add(cache, [other])
    assert len(store) == 0
    store.add(cache, [ids[0]])
    assert len(store) == 1


@pytest.mark.host
@pytest.mark.parametrize("sequences", [1, 3])
def test_enabled_models(model, sequences):
    """Growing caches read the store's pages where they lie."""
    model = copy.deepcopy(model)
    store, system = lb.PrefixStore(), text(100, 1)
    options = {"max_new_tokens": 12, "num_return_sequences": sequences, "pad_token_id": 0}
    options |= {"do_sample": sequences > 1}
    for turn in range(3):
        ids = torch.cat([system, text(130, 10 + turn)], dim=1)
        found = []
        for prefixes in (store, None):
            with lb.enable(model, "kivi-4", prefixes=prefixes, **DENSE), Counted(model) as counted:
                torch.manual_seed(turn)
                found.append(model.generate(ids, **options))
            assert counted.tokens - 11 == (166 if prefixes is not None and turn else 230)
        assert torch.equal(*found)
    before = store.nbytes
    gc.collect()
    assert store.nbytes == before
    assert store.hits == 2


def test_what_a_cache_does_later_does_not_change_the_store(model):
    """Growing caches that hold a stored prefix are cropped, emptied and filled again."""
    store, ids = lb.PrefixStore(), text(200, 1)
    want, *_ = generated(model, ids, store)
    for _ in range(3):
        cache = lb.LowBitCache(model, **DENSE)
        assert store.restore(cache, [ids[0]]).tokens == 199
        cache.crop(-150)
        with torch.no_grad():
            model(text(120, 3), past_key_values=cache)
            fork = cache.fork()[0]
            cache.reset()
            model(text(170, 4), past_key_values=cache)
            model(text(170, 4), past_key_values=fork)
        tokens, cached, _ = generated(model, ids, store)
        assert torch.equal(tokens, want)
        assert cached == 199


def test_a_copy_of_an_enabled_model_has_the_same_store(model, tmp_path):
    """Other weights do not match. Only a folder is another process's too."""
    store, ids = lb.PrefixStore(folder=tmp_path), text(100, 1)
    with lb.enable(copy.deepcopy(model), "kivi-4", prefixes=store, **DENSE) as enabled:
        want = enabled.model.generate(ids, max_new_tokens=4, **GREEDY)
        copied = copy.deepcopy(enabled.model)
    assert torch.equal(copied.generate(ids, max_new_tokens=4, **GREEDY), want)
    assert (len(store), store.hits) == (1, 1)
    with torch.no_grad():
        copied.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    copied.generate(ids, max_new_tokens=4, **GREEDY)
    assert (len(store), store.hits) == (2, 1)
    assert copy.copy(store) is copy.deepcopy(store) is store
    assert pickle.loads(pickle.dumps(copied)).generate(ids, max_new_tokens=1, **GREEDY).shape == (1, 101)


# ---- room ---------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_text_goes_first(model):
    store = lb.PrefixStore()
    generated(model, text(100, 1), store)
    one = store.nbytes
    store = lb.PrefixStore(int(2.5 * one))
    for seed in (1, 2, 1, 3):
        generated(model, text(100, seed), store)
    assert len(store) == 2
    assert store.nbytes <= 2.5 * one
    for seed, cached in ((1, 99), (3, 99), (2, 0)):
        assert generated(model, text(100, seed), store)[1] == cached


def test_a_text_that_is_larger_than_the_store(model, tmp_path):
    """One warning, unless a folder takes it."""
    store = lb.PrefixStore()
    generated(model, text(100, 1), store)
    one = store.nbytes
    small = lb.PrefixStore(one - 1)
    with pytest.warns(
        UserWarning, match=f"of 111 tokens takes {one} bytes and is not kept: max_bytes={one - 1} is too small"
    ):
        generated(model, text(100, 1), small)
    generated(model, text(100, 2), small)
    assert (len(small), small.nbytes, small.removed) == (0, 0, 2)
    generated(model, text(100, 1), lb.PrefixStore(1, folder=tmp_path))
    exact = lb.PrefixStore(one)
    for seed in (1, 2):
        generated(model, text(100, seed), exact)
    assert (len(exact), exact.removed) == (1, 1)


def test_a_text_that_is_larger_than_the_store_removes_no_other(model, tmp_path):
    """Neither another text nor the one that it continues; and none of the folder if it is larger than that."""
    first, expected = text(100, 1), lb.PrefixStore()
    tokens, *_ = generated(model, first, expected)
    longer = torch.cat([tokens, text(500, 3)], 1)
    store = lb.PrefixStore(int(2.5 * expected.nbytes))
    for ids in (first, text(100, 2)):
        generated(model, ids, store)
    with pytest.warns(UserWarning, match="of 623 tokens takes .* and is not kept"):
        generated(model, longer, store)
    assert (len(store), store.removed) == (2, 1)
    assert [generated(model, ids, store)[1] for ids in (first, text(100, 2))] == [99, 99]

    generated(model, longer, lb.PrefixStore(1, folder=tmp_path))
    store = lb.PrefixStore(store.max_bytes, folder=tmp_path)
    for ids in (first, text(100, 2)):
        generated(model, ids, store)
    assert generated(model, longer, store)[1] == 611  # read from the folder, used once
    assert (len(store), store.nbytes <= store.max_bytes) == (2, True)
    store.save()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    limited = lb.PrefixStore(1, folder=tmp_path, max_folder_bytes=size // 2)
    generated(model, text(40, 4), limited)
    assert len(limited._folder) == 3


def test_a_large_text_does_not_keep_others_from_being_loaded(model, tmp_path):
    store = lb.PrefixStore(folder=tmp_path)
    generated(model, text(100, 1), store)
    store.save()
    one = store.nbytes
    generated(model, text(600, 2), store)
    store.save()
    assert lb.PrefixStore(one, folder=tmp_path).load(lb.from_preset("kivi-4", model, **DENSE)) == 1


def test_a_text_whose_beginning_was_used_stays(model):
    """The least recently used one goes first."""
    store, system = lb.PrefixStore(), text(200, 1)
    for ids in (system, text(200, 2)):
        generated(model, ids, store, 1)
    assert generated(model, torch.cat([system[:, :150], text(20, 3)], 1), store, 1)[1] > 0
    store.max_bytes = store.nbytes - 1
    store._make_room()
    assert torch.equal(store._prompts[0].ids[:200], system[0])


def test_the_window_of_each_layer_is_read_again(model):
    """A match ends before the largest residual of all layers, which only pages would not hold."""
    options = {**DENSE, "per_layer": {1: {"residual": 96}}}
    store, system = lb.PrefixStore(), text(200, 1)
    generated(model, torch.cat([system, text(100, 2)], 1), store, 1, cache_options=options)
    ids = torch.cat([system, text(9, 3)], 1)
    tokens, cached, _ = generated(model, ids, store, 3, cache_options=options)
    assert cached == 96  # of 200, 96 after it
    assert torch.equal(tokens, generated(model, ids, None, 3, cache_options=options)[0])


def test_texts_share_the_pages_that_they_have_in_common(model):
    store = lb.PrefixStore()
    system = text(500, 1)
    generated(model, system, store)
    one = store.nbytes
    for seed in range(4):
        generated(model, torch.cat([system, text(20, seed)], dim=1), store)
    assert len(store) == 5
    assert store.nbytes < 3 * one
    tensors = [x for prompt in store._prompts for x in prompt.tensors()]
    assert store.nbytes == sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors if len(x)}.values())


def test_texts_in_different_layouts_are_restored_together(model):
    """As a store has them whose folder another backend wrote to."""
    store, rows = lb.PrefixStore(), torch.cat([text(300, 1), text(300, 2)])
    caches = [lb.from_preset("kivi-4", model) for _ in range(2)]
    read(model, caches[0], rows)
    store.add(caches[0], list(rows))
    for group in store._prompts[1].groups.values():
        for index, layer in group.layers.items():
            group.layers[index] = layer.in_layout_of(layer.spec.with_layouts(*fragment.LAYOUTS))
            assert not torch.equal(group.layers[index].slabs[0], layer.slabs[0])
    longer = torch.cat([rows, rows[:, :5]], dim=1)
    assert store.restore(caches[1], list(longer)).tokens == 300
    before, after = (read(model, cache, longer[:, 300:]) for cache in caches)
    assert torch.equal(before, after)


def test_pages_of_a_removed_text_that_no_other_uses_are_freed(model):
    """A short text shares the first pages of a long one, which goes."""
    long, expected = text(400, 1), lb.PrefixStore()
    short = torch.cat([long[:, :100], text(20, 2)], dim=1)
    generated(model, short, expected, 1)
    store = lb.PrefixStore()
    for ids in (long, short):
        generated(model, ids, store, 1)
    store.max_bytes = store.nbytes - 1
    store._make_room()
    assert [len(prompt.ids) for prompt in store._prompts] == [len(prompt.ids) for prompt in expected._prompts]
    assert store.nbytes == expected.nbytes


def test_texts_that_come_from_the_folder_have_room(model, tmp_path):
    """One that a call needs takes the place of others; one that is only loaded does not, and is the first to go."""
    texts = [text(100, seed) for seed in range(4)]
    store = lb.PrefixStore(folder=tmp_path)
    for ids in texts[:3]:
        generated(model, ids, store, 1)
    store.save()
    one = store.nbytes // 3
    other = lb.PrefixStore(int(2.5 * one), folder=tmp_path)
    generated(model, texts[3], other, 1)
    cache = lb.from_preset("kivi-4", model, **DENSE)
    generated(model, texts[0], other, 1)
    assert (len(other), other.removed) == (2, 0)
    assert generated(model, texts[1], other, 1)[1] == 99
    assert (len(other), other.removed) == (2, 1)
    assert other.load(cache) == 2
    third = lb.PrefixStore(int(2.5 * one), folder=tmp_path)
    generated(model, texts[3], third, 1)
    for _ in range(2):
        assert third.load(cache) == 2
    third.max_bytes = third.nbytes - 1
    third._make_room()
    assert torch.equal(third._prompts[0].ids[:100], texts[3][0])


def test_a_text_that_a_call_uses_is_not_removed_for_another_one(model, tmp_path):
    """Whether the other one is needed by another row, or has more tokens in common and fewer that can be used."""
    first, second = text(100, 1), text(100, 2)
    longer = torch.cat([first, text(5, 3), text(100, 4)], dim=1)
    store = lb.PrefixStore(folder=tmp_path)
    for ids in (second, longer):
        generated(model, ids, store, 1)
    store.save()
    small = lb.PrefixStore(store.nbytes // 2, folder=tmp_path)
    cache = lb.from_preset("kivi-4", model, **DENSE)
    rows = [torch.cat([ids, text(9, 5)], dim=1)[0] for ids in (longer, second)]
    assert small.find(cache, rows).tokens == 64
    generated(model, first, small, 1)
    ids = torch.cat([longer[:, :105], text(20, 6)], dim=1)
    assert torch.equal(generated(model, ids, small)[0], generated(model, ids, None)[0])
    assert small.tokens_saved


# ---- what does not match ------------------------------------------------------------------------------------------------


def test_another_model_kind_of_cache_or_prompt(model):
    store, ids = lb.PrefixStore(), text(100, 1)
    generated(model, ids, store)
    for options in ({"cache_options": {**DENSE, "residual": 64}}, {"cache_options": SMALL_PAGES}):
        assert generated(model, ids, store, **options)[1] == 0
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    tokens, cached, _ = generated(tuned, ids, store)
    assert cached == 0
    assert torch.equal(tokens, generated(tuned, ids, None)[0])
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.div_(1.5)
    assert generated(model, ids, store)[1] == 99
    other = ids.clone()
    other[0, 0] += 1
    assert generated(model, other, store)[1] == 0
    holes = torch.ones_like(ids)
    holes[0, 3] = 0
    assert generated(model, ids, store, attention_mask=holes)[1] == 0


def test_offloaded_weights_are_refused_by_name(model, tmp_path):
    """They may be others than those that read a text. Nothing is kept and no folder is made."""
    offloaded, store, ids = copy.deepcopy(model), lb.PrefixStore(), text(40, 1)
    out = lb.generate(offloaded, ids, "kivi-4", 2, max_cache_len=60, return_dict_in_generate=True, **GREEDY)
    offloaded.lm_head.to("meta")
    reason = r"the numbers of lm_head\.weight are not in memory \(offloaded\), and {0} .* or do without {0}$"
    with pytest.raises(ValueError, match=reason.format("prefixes=")):
        lb.generate(offloaded, ids, "kivi-4", 2, prefixes=store, **GREEDY)
    with lb.enable(offloaded, "kivi-4", prefixes=store), pytest.raises(ValueError, match=reason.format("prefixes=")):
        offloaded.generate(ids, max_new_tokens=2, **GREEDY)
    with pytest.raises(ValueError, match=reason.format("a saved cache")):
        out.past_key_values.save_pretrained(tmp_path / "cache")
    assert (len(store), [*tmp_path.iterdir()]) == (0, [])


def test_sizes():
    assert lb.PrefixStore("8GB").max_bytes == 8 * 10**9
    assert lb.PrefixStore(5).max_bytes == 5
    with pytest.raises(ValueError, match="max_bytes='8 parsecs'"):
        lb.PrefixStore("8 parsecs")


def test_a_cache_has_its_own_prefix(model):
    first = lb.generate(model, text(5, 1), max_new_tokens=2, max_cache_len=50, return_dict_in_generate=True, **GREEDY)
    with pytest.raises(ValueError, match="prefixes are for a new cache"):
        lb.generate(
            model, text(9, 1), max_new_tokens=2, past_key_values=first.past_key_values, prefixes=lb.PrefixStore()
        )


def test_rows_that_a_beam_search_has_exchanged_are_kept_in_order(model):
    """Later pages of a row have lower numbers than its first ones."""
    rows, store = torch.cat([text(200, 1), text(200, 2)]), lb.PrefixStore()
    cache = lb.from_preset("kivi-4", model, **SMALL_PAGES)
    model(rows[:, :100], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    rows = torch.cat([rows[[1, 0], :100], rows[:, 100:]], 1)
    model(rows[:, 100:], past_key_values=cache)
    table = cache.packed_layers[0].store.state.page_table[0]
    assert (table.diff() < 0).any()
    store.add(cache, list(rows))
    new, again = text(1, 3), lb.from_preset("kivi-4", model, **SMALL_PAGES)
    assert store.restore(again, [torch.cat([row, new[0]]) for row in rows]).tokens == 200
    assert torch.equal(*(model(new.repeat(2, 1), past_key_values=x).logits for x in (again, cache)))
