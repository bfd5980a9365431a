"""Choices for single layers, and parameters of layers, through a real cache."""

import copy

import pytest
import torch
from cases import SMALL_PAGES, left_padded, tiny_config, tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends.choice import storage_spec

pytestmark = pytest.mark.host


LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama", num_hidden_layers=LAYERS)[0]


def stored(cache) -> list[str]:
    return [f"{layer.spec.key_format}/{layer.spec.value_format}" for layer in cache.packed_layers]


KIVI = "int2-channel/int2-token"


def test_a_mapping_with_indices_from_both_ends(model):
    cache = lb.from_preset("kivi-2", model, per_layer={0: "dense", -1: "kv8"}, **SMALL_PAGES)
    assert stored(cache) == ["dense/dense", KIVI, KIVI, "int8-token/int8-token"]
    assert f"{cache.spec.key_format}/{cache.spec.value_format}" == KIVI


@pytest.mark.parametrize(
    ("per_layer", "rows"),
    [
        ({}, {}),
        ({1: "kv8", -1: "kv8"}, {"layers 1, 3": "int8-token / int8-token, residual 128"}),
        (
            {2: {"sink": 8}, 1: {"transform": "hadamard"}},
            {
                "layer 1": "int2-channel / int2-token, key transform hadamard",
                "layer 2": "int2-channel / int2-token, sink 8",
            },
        ),
    ],
    ids=str,
)
def test_the_summary_names_the_layers_that_differ(model, per_layer, rows):
    cache = lb.from_preset("kivi-2", model, per_layer=per_layer, **SMALL_PAGES)
    for layer in cache.packed_layers:
        layer.spec = storage_spec(layer.spec, "cuda")  # as once it has tokens on a GPU
    lines = (line.strip("│").split("│") for line in cache.summary().splitlines() if line.startswith("│"))
    shown = {label.strip(): text.strip() for label, text in lines}
    assert {label: text for label, text in shown.items() if label.startswith("layer") and label != "layers"} == rows
    assert shown["keys / values"] == "int2-channel / int2-token"


def test_options_change_what_they_name(model):
    options = {"value_format": "int4-token", "sink": 8, "value_transform": "hadamard"}
    cache = lb.from_preset("kivi-2-hadamard", model, per_layer={2: options}, **SMALL_PAGES)
    spec = cache.packed_layers[2].spec
    assert stored(cache) == [KIVI, KIVI, "int2-channel/int4-token", KIVI]
    assert (spec.sink, str(spec.key_transform), str(spec.value_transform)) == (8, "hadamard", "hadamard")
    assert cache.packed_layers[1].spec.sink == 0


def test_a_preset_brings_its_window_and_keeps_the_page_size(model):
    cache = lb.from_preset("kivi-2", model, per_layer={1: "kitty-hadamard"}, **SMALL_PAGES)
    spec = cache.packed_layers[1].spec
    assert (spec.sink, spec.residual, spec.page_size, str(spec.key_transform)) == (32, 128, 32, "hadamard")


def test_a_function(model):
    def choose(index, config):
        assert config.num_hidden_layers == LAYERS
        return "kv8" if index >= config.num_hidden_layers // 2 else None

    cache = lb.from_preset("kivi-2", model, per_layer=choose, **SMALL_PAGES)
    assert stored(cache) == [KIVI, KIVI, *["int8-token/int8-token"] * 2]


def test_dense_layers_are_the_shorthand(model):
    short = lb.from_preset("kivi-2-hadamard", model, dense_layers=[0, -1], sink=4)
    options = {"key_format": "dense", "value_format": "dense", "transform": None}
    long = lb.from_preset("kivi-2-hadamard", model, per_layer={0: options, -1: options}, sink=4)
    assert [layer.spec for layer in short.packed_layers] == [layer.spec for layer in long.packed_layers]


def test_indices_count_layers_of_every_kind():
    config = tiny_config("gemma3_text")  # layer 0 slides
    cache = lb.from_preset("kivi-2", config, per_layer={-1: "kv8"}, **SMALL_PAGES)
    assert stored(cache) == ["int8-token/int8-token"]
    with pytest.raises(
        ValueError, match=r"per_layer has the index 0, which is not a full-attention layer.*allowed: \[1\]"
    ):
        lb.from_preset("kivi-2", config, per_layer={0: "kv8"})


@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_layers_of_different_windows_give_the_tokens_of_dense_attention(model, max_cache_len):
    """All pages hold the model's dtype, so greedy tokens are those of the stock cache, padding and beams included."""
    ids, mask = left_padded(2, 90)
    generate = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    per_layer = {0: {"sink": 8}, 1: {"residual": 0}, -1: {"transform": "hadamard", "value_transform": "hadamard"}}
    options = {"per_layer": per_layer, "max_cache_len": max_cache_len, **SMALL_PAGES}
    want = model.generate(ids, **generate)
    assert torch.equal(model.generate(ids, past_key_values=lb.from_preset("dense", model, **options), **generate), want)
    if max_cache_len is None:
        want = model.generate(ids, num_beams=2, **generate)
        cache = lb.from_preset("dense", model, **options)
        assert torch.equal(model.generate(ids, past_key_values=cache, num_beams=2, **generate), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_layer": {9: "kv8"}}, r"per_layer has the index 9.*allowed: \[0, 1, 2, 3\]"),
        ({"per_layer": {-5: "kv8"}}, r"per_layer has the index -5.*negative ones count from layer 3"),
        ({"per_layer": {1: "kv8"}, "dense_layers": [-3]}, r"layers \[1\] are in dense_layers and in"),
        ({"per_layer": {1: "kv9"}}, r"per_layer\[1\]: preset='kv9' is not known"),
        (
            {"per_layer": {1: {"keys": "dense"}}},
            r"per_layer\[1\]: the option 'keys' is not known; allowed: \('key_format'",
        ),
        ({"per_layer": {2: "snapmla"}}, r"per_layer\[2\]: 'snapmla' does not fit.*'separate'"),
        (
            {"per_layer": {2: "eigen-2"}},
            r"per_layer\[2\] \(static-.* needs a calibration.*--preset eigen-2",
        ),
        (
            {"per_layer": {1: {"transform": "smooth"}}, "parameters": {}},
            r"layer 1: parameters: key_transform.factors is missing",
        ),
        (
            {"parameters": {7: {}}},
            r"parameters are given for layer 7; layers that are packed: \[0, 1, 2, 3\]",
        ),
        ({"parameters": {1: {"key_format.codebook": None}}}, "layer 1: .*which the layer does not take"),
    ],
    ids=str,
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        lb.from_preset("kivi-2", model, **options)


def smooth_parameters(head_dim=64, heads=2):
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(LAYERS, heads, head_dim, generator=generator) + 0.5
    return {index: {"key_transform.factors": factors[index]} for index in range(LAYERS)}


def test_parameters_are_counted_shared_and_kept(model):
    given = smooth_parameters()
    options = {"transform": "smooth+hadamard", "parameters": given, **SMALL_PAGES}
    cache = lb.from_preset("kivi-4", model, **options)
    ids, _ = left_padded(1, 80)
    with torch.no_grad():
        want = model(ids, past_key_values=cache).logits
        held = 2 * 2 * 64 * 4  # factors of keys and of queries, two heads, float32
        assert cache.nbytes.parameters == LAYERS * held
        nbytes = cache.nbytes
        counted = nbytes.codes + nbytes.metadata + nbytes.window + nbytes.parameters
        assert cache.bits_per_value == pytest.approx(8 * counted / (LAYERS * 80 * 2 * 2 * 64))
        twin = copy.deepcopy(cache)
        for layer, other in zip(cache.packed_layers, twin.packed_layers, strict=True):
            assert layer.store.state.parameters[0] is other.store.state.parameters[0]  # only read, so a fork shares it
        assert (cache.nbytes.parameters, twin.nbytes.parameters) == (LAYERS * held, 0)
        step = torch.tensor([[5]])
        assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=twin).logits)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, want)


def test_an_object_that_knows_each_layer(model):
    class File:
        def for_layer(self, index):
            return smooth_parameters()[index]

    ids, _ = left_padded(1, 80)
    logits = []
    for parameters in (File(), smooth_parameters()):
        cache = lb.from_preset("kivi-2", model, transform="smooth", parameters=parameters, **SMALL_PAGES)
        with torch.no_grad():
            logits.append(model(ids, past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_a_wrong_shape_or_dtype_is_told(model):
    given = smooth_parameters(head_dim=80)
    with pytest.raises(
        ValueError, match=r"layer 0: parameters: key_transform.factors is torch.float32 of shape \(2, 80\)"
    ):
        lb.from_preset("kivi-2", model, transform="smooth", parameters=given)
    given = {index: {name: x.half() for name, x in own.items()} for index, own in smooth_parameters().items()}
    with pytest.raises(ValueError, match=r"is torch.float16 .*needs torch.float32 of shape \(2, 64\), or \(1, 64\)"):
        lb.from_preset("kivi-2", model, transform="smooth", parameters=given)
