"""Which options of a cache are the same to `lb.generate`: values are compared as they are at the call."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY, SMALL_PAGES, ours

import hf_lowbit_kv as lb
from hf_lowbit_kv import presets
from hf_lowbit_kv.generation.kept_caches import kept_caches
from hf_lowbit_kv.storage.transforms import Hadamard

pytestmark = pytest.mark.host


@pytest.fixture
def model():
    model = tiny_models("llama")[0]
    yield model
    lb.release(model)


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


#: makers of options: whatever is made twice is equal, and another object
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


def test_a_list_that_was_changed_in_place(model):
    layers = [0]
    first = layers_of(model, dense_layers=layers)
    layers.append(1)
    second = layers_of(model, dense_layers=layers)
    assert [layer.spec.key_format.name for layer in (*first, *second)] == ["dense", "int2-channel", "dense", "dense"]


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
