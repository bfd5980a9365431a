"""The caches that `lb.generate` keeps: who gets which, and when they are let go."""

import contextlib
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY, SMALL_PAGES, growing, ours

import hf_lowbit_kv as lb
from hf_lowbit_kv import presets
from hf_lowbit_kv.generation import kept_caches as kept
from hf_lowbit_kv.generation.kept_caches import kept_caches
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.transforms import Hadamard

pytestmark = pytest.mark.host


def test_a_cache_is_kept_and_serves_what_fits(model):
    def cache_of(tokens, batch=1, preset="kivi-2", **options):
        ids, mask = left_padded(batch, tokens)
        out = ours(model, ids, mask, preset, return_dict_in_generate=True, **options)
        assert int(out.past_key_values.get_seq_length()) == tokens + 11
        return out.past_key_values.packed_layers[0]

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
    assert len(kept_caches(model).entries) == kept.KEPT_CACHES


def test_a_returned_cache_belongs_to_its_holder(model):
    ids, mask = left_padded(2, 60)

    def held(**options):
        return ours(model, ids, mask, return_dict_in_generate=True, **options).past_key_values

    first = held()
    layer, stored = first.packed_layers[0], int(first.get_seq_length())
    ours(model, ids, mask, new_tokens=3)  # another cache
    assert int(first.get_seq_length()) == stored
    for preset in ("kivi-4", "kv8", "k8v4"):  # more than are kept
        ours(model, ids, mask, preset)
    assert int(first.get_seq_length()) == stored
    lb.release(model)
    assert int(first.get_seq_length()) == stored
    first = held()
    layer = first.packed_layers[0]
    assert held().packed_layers[0] is not layer
    del first
    assert held().packed_layers[0] is layer


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_fails_gives_its_cache_back(model, error):
    ids, mask = left_padded(2, 60)

    def fail(input_ids, scores):
        if input_ids.shape[1] == 65:
            raise error
        return scores

    layer = ours(model, ids, mask, return_dict_in_generate=True).past_key_values.packed_layers[0]
    with pytest.raises(error) as caught:  # what was raised refers to the call's frames, and they to the cache
        ours(model, ids, mask, logits_processor=[fail])
    out = ours(model, ids, mask, return_dict_in_generate=True)
    assert out.past_key_values.packed_layers[0] is layer
    assert torch.equal(out.sequences, growing(model, ids, mask))
    del caught


def _allocates_for(monkeypatch, tokens):
    """No layer but the first has memory for more than so many tokens. Returns references to all stores."""
    made, allocate = [], PagedStore.new_slab

    def new_slab(self, pages):
        made.append(weakref.ref(self))
        if len(made) > 1 and self.memory.capacity > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(self, pages)

    monkeypatch.setattr(PagedStore, "new_slab", new_slab)
    return made


@pytest.mark.parametrize("enabled", [False, True])
def test_memory_that_ran_out_is_free_for_a_smaller_call(model, monkeypatch, enabled):
    """Although the caller that catches the error holds its traceback, and also what other calls had left."""
    in_place_of_graphs(monkeypatch)
    ids, mask = left_padded(2, 60)
    with lb.enable(model, "dense") if enabled else contextlib.nullcontext():

        def written(tokens):
            options = {"attention_mask": mask, "max_new_tokens": tokens, **GREEDY}
            return model.generate(ids, **options) if enabled else lb.generate(model, ids, "dense", **options)

        want = written(3)
        made = _allocates_for(monkeypatch, tokens=512)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            written(900)
        assert [store() for store in made] == [None, None]
        assert not kept_caches(model).entries
        assert torch.equal(written(3), want)
        del caught


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_cache_that_a_failed_call_made_is_not_kept(model, error):
    ids, mask = left_padded(2, 60)

    def fail(input_ids, scores):
        raise error

    with pytest.raises(error):
        ours(model, ids, mask, logits_processor=[fail])
    assert not kept_caches(model).entries


def test_an_enabled_call_that_fails_leaves_the_cache_of_its_caller(model, monkeypatch):
    in_place_of_graphs(monkeypatch)
    ids, mask = left_padded(2, 60)
    with lb.enable(model, "dense"):
        first = model.generate(ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
        cache, text = first.past_key_values, torch.cat([first.sequences, ids[:, :9]], 1)
        whole = torch.cat([mask, torch.ones(2, 13, dtype=mask.dtype)], 1)
        options = {"attention_mask": whole, "past_key_values": cache, "max_new_tokens": 4, **GREEDY}
        with pytest.raises(ZeroDivisionError):
            model.generate(text, logits_processor=[lambda ids, scores: 1 / 0], **options)
    assert len(cache.layers) == 2
    assert int(cache.get_seq_length()) == text.shape[1]


def test_a_call_within_a_call_takes_another_cache(model):
    ids, mask = left_padded(2, 60)
    want, seen = ours(model, ids, mask), []

    def nested(input_ids, scores):
        if not seen:
            seen.append(None)
            seen.append(ours(model, ids, mask))
        return scores

    assert torch.equal(ours(model, ids, mask, logits_processor=[nested]), want)
    assert torch.equal(seen[1], want)
    assert len(kept_caches(model).entries) == 2


def test_threads_do_not_share_the_kept_cache_at_once(model):
    prompts = [left_padded(2, 100 + i, seed=i) for i in range(3)]
    want = [growing(model, *prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(3):
            got = threads.map(lambda prompt: ours(model, *prompt), prompts)
            assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_threads_may_go_on_with_their_own_caches(model):
    """What one thread holds is not emptied by the calls of others."""

    def both_turns(seed):
        ids, mask = left_padded(2, 60, seed=seed)
        options = {"return_dict_in_generate": True, "max_cache_len": 256}
        first = ours(model, ids, mask, **options)
        ids = torch.cat([first.sequences, ids], dim=1)
        mask = torch.cat([mask, torch.ones_like(ids[:, 60:])], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        return lb.generate(model, inputs, max_new_tokens=9, past_key_values=first.past_key_values, **GREEDY)

    want = [both_turns(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(both_turns, range(4)))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_the_environment_chooses_the_backend_of_each_call(model, monkeypatch):
    ids, mask = left_padded(1, 20)

    def backend():
        return ours(model, ids, mask, return_dict_in_generate=True).past_key_values.packed_layers[0].backend

    monkeypatch.setenv("HF_LOWBIT_KV_BACKEND", "torch")
    assert backend() == "torch"
    monkeypatch.setenv("HF_LOWBIT_KV_BACKEND", "cuda")
    with pytest.raises((ImportError, ValueError), match="HF_LOWBIT_KV_BACKEND='cuda'"):
        backend()


def test_release_gives_the_memory_back(model):
    ids, mask = left_padded(1, 20)
    out = ours(model, ids, mask, return_dict_in_generate=True)
    cache = weakref.ref(out.past_key_values.packed_layers[0])
    del out
    assert cache() is not None
    lb.release(model)
    gc.collect()
    assert cache() is None
    lb.release(model)


def test_lengths_are_rounded_up_by_a_sixteenth_at_most():
    for tokens in (1, 512, 513, 5000, 131072, 131073, 10**6):
        length = kept.cache_length(tokens)
        assert tokens <= length < tokens + max(tokens / 16, 512)
        assert kept.cache_length(length) == length
    assert kept.cache_length(5000) == kept.cache_length(5100)


# ---- which options are the same: values are compared as they are at the call ----------------------------------------


def layers_of(model, preset="kivi-2", **options):
    ids, mask = left_padded(2, 40)
    cache = ours(model, ids, mask, preset, 3, cache_options=SMALL_PAGES | options, return_dict_in_generate=True)
    return cache.past_key_values.packed_layers


@dataclasses.dataclass
class Choose:
    """A function of a layer, which may be set to choose something else."""

    first: str = "dense"

    def __call__(self, index, config):
        return self.first if index == 0 else None


#: makers of options: two results are equal, but different objects
EQUAL = {
    "names": lambda: {"per_layer": {0: "dense"}},
    "options": lambda: {"per_layer": {0: {"key_format": "int4-channel", "sink": 4}, -1: "kv8"}},
    "mapping": lambda: {"per_layer": MappingProxyType({1: "kv8"})},
    "presets": lambda: {"per_layer": {0: dataclasses.replace(presets.get_preset("kv8"))}},
    "formats": lambda: {"key_format": lb.parse_format("int4-token"), "value_format": lb.parse_format("int4-token-g32")},
    "transforms": lambda: {"transform": Hadamard()},
    "lists": lambda: {"dense_layers": [0]},
    "sets": lambda: {"dense_layers": {0, 1}},
    "functions": lambda: {"per_layer": lambda index, config: {"key_format": "dense"} if index else None},
    "callables": lambda: {"per_layer": Choose()},
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_options_find_the_same_cache(model, make):
    before = layers_of(model)[0]
    first = layers_of(model, **make())[0]
    assert first is not before
    assert layers_of(model, **make())[0] is first
    assert layers_of(model)[0] is before


@pytest.mark.parametrize(
    ("some", "other"),
    [
        ({"per_layer": {0: {"sink": 4, "residual": 64}, 1: "kv8"}}, {"per_layer": {1: "kv8", 0: {"residual": 64, "sink": 4}}}),
        ({"per_layer": {1: "kv8"}}, {"per_layer": {-1: "kv8"}}),
        ({"per_layer": {0: {"key_format": "dense", "value_format": "dense"}}}, {"dense_layers": [0]}),
        ({"dense_layers": [0, 1]}, {"dense_layers": (1, 0)}),
        ({"key_format": "int4-token"}, {"key_format": lb.parse_format("int4-token")}),
        ({"transform": "hadamard"}, {"transform": Hadamard()}),
        ({"sink": 0, "backend": None}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_other_words_for_the_same(model, some, other):
    assert layers_of(model, **some)[0] is layers_of(model, **other)[0]


@pytest.mark.parametrize(
    ("some", "other"),
    [
        ({"sink": 1}, {"sink": 2}),
        ({"per_layer": {0: "dense"}}, {"per_layer": {1: "dense"}}),
        ({"per_layer": {0: {"sink": 1}}}, {"per_layer": {0: {"sink": 2}}}),
        ({"transform": "hadamard"}, {"value_transform": "hadamard"}),
        ({"backend": "cpu"}, {"backend": "torch"}),
        ({"backend": "cpu"}, {}),
    ],
    ids=str,
)
def test_other_options_take_another_cache(model, some, other):
    assert layers_of(model, **some)[0] is not layers_of(model, **other)[0]


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ({0: "dense"}, lambda x: x.update({0: "kv8"})),
        ({0: "dense"}, lambda x: x.update({1: "kv8"})),
        ({0: "dense"}, dict.clear),
        ({0: {"key_format": "dense"}}, lambda x: x[0].update(key_format="int8-token")),
        ({0: {"key_format": "dense"}}, lambda x: x[0].update(sink=4)),
        (Choose(), lambda x: setattr(x, "first", "kv8")),
    ],
    ids=["choice", "layer", "none", "value", "option", "function"],
)
def test_options_that_were_changed_in_place(model, option, change):
    first = layers_of(model, per_layer=option)
    assert first[0].spec.key_format.name == "dense"
    change(option)
    fresh = lb.from_preset("kivi-2", model, per_layer=option, **SMALL_PAGES).packed_layers
    second = layers_of(model, per_layer=option)
    assert second[0] is not first[0]
    assert [layer.spec.key for layer in second] == [layer.spec.key for layer in fresh]
    assert second[0].spec != first[0].spec or second[1].spec != first[1].spec


@pytest.mark.parametrize("value", [True, 1.0])
def test_numbers_that_are_equal_and_of_another_kind_are_refused_each_time(model, value):
    layers_of(model, sink=1)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"sink={value} is not allowed"):
            layers_of(model, sink=value)
    assert len(kept_caches(model).entries) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_enable_takes_options_as_they_are_at_the_call(recorded, monkeypatch):
    model = tiny_models("llama")[1]
    if recorded:
        in_place_of_graphs(monkeypatch)
    ids, mask = left_padded(2, 40)
    per_layer, dense_layers = {0: {"key_format": "int8-token"}}, [1]

    def formats():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
        return [layer.spec.key_format.name for layer in out.past_key_values.packed_layers]

    with lb.enable(model, "kivi-2", per_layer=per_layer, dense_layers=dense_layers, **SMALL_PAGES):
        for _ in range(2):
            assert formats() == ["int8-token", "dense"]
            per_layer[0]["key_format"] = "int4-token"
            per_layer[5] = "nothing"
            dense_layers.append(0)
    lb.release(model)


def test_tokens_are_those_of_a_cache_made_with_these_options(model):
    """After a change in place, a kept cache decodes as a new one does."""
    ids, mask = left_padded(2, 90)
    option = {0: "dense"}
    for choice in ("kv8", "kivi-4"):
        ours(model, ids, mask, "kivi-2", cache_options=SMALL_PAGES | {"per_layer": option})
        option[0] = choice
        got = ours(model, ids, mask, "kivi-2", cache_options=SMALL_PAGES | {"per_layer": option})
        cache = lb.from_preset("kivi-2", model, per_layer={0: choice}, **SMALL_PAGES)
        want = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **GREEDY)
        assert torch.equal(got, want)
