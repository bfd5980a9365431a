"""Native layers when the model's dtype or device changes, and inside and outside of inference mode."""

import pytest
import torch
from cases import left_padded, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.cache.native_layer_contents import contents_of, put_contents
from hf_lowbit_kv.cache.native_layers import native_layers, replace_for_others, tensors_of

pytestmark = pytest.mark.host
FAMILIES = ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen3_next", "lfm2"]


def read(model, cache, tokens=60):
    """Logits `[rows, vocab]` after a prompt."""
    with torch.no_grad():
        return model(left_padded(2, tokens)[0], past_key_values=cache).logits[:, -1]


def dtypes(cache):
    return [[x.dtype for x in tensors_of(layer)] for layer in cache.layers if not isinstance(layer, LowBitLayer)]


@pytest.mark.parametrize("max_cache_len", [None, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reset_cache_takes_the_models_new_dtype(family, max_cache_len):
    model, _ = tiny_models(family)
    cache = lb.from_preset("dense", model, max_cache_len=max_cache_len)
    read(model, cache)
    model.bfloat16()
    cache.reset()
    new = lb.from_preset("dense", model, max_cache_len=max_cache_len)
    assert torch.equal(read(model, cache), read(model, new))
    assert dtypes(cache) == dtypes(new)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reset_layer_takes_contents_of_another_dtype_or_device(family):
    model, _ = tiny_models(family)
    cache = lb.from_preset("dense", model, max_cache_len=100)
    read(model, cache)
    for layer in cache.layers:
        if isinstance(layer, LowBitLayer):
            continue
        seen, tensors = contents_of(layer)
        for device in ("cpu", "meta"):
            layer.reset()
            put_contents(layer, seen, {name: x.half().to(device) for name, x in tensors.items()})
            kept = {x for x in tensors_of(layer) if x.is_floating_point()}
            assert {(x.dtype, x.device) for x in kept} == {(torch.float16, next(iter(kept)).device)}
            assert next(iter(kept)).device.type == device


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reset_layer_follows_its_model_to_another_device(family):
    config = tiny_models(family)[0].config
    layer = native_layers(config, 100)[0]
    for device in ("cpu", "meta"):
        states = torch.zeros(2, 4, 3, 8, device=device)
        replace_for_others(layer, states)
        if family in ("gemma3_text", "gpt_oss"):
            layer.update(states, states)
        else:
            layer.update_conv_state(states[0])
            assert layer.device.type == device  # indices of beams go there
        assert {x.device.type for x in tensors_of(layer)} == {device}
        layer.reset()


SWAPPED = torch.tensor([1, 0])


def _swapped(cache):
    cache.reorder_cache(SWAPPED)
    return cache


@pytest.mark.parametrize(
    ("max_cache_len", "change"), [(None, lambda cache: cache), (200, _swapped), (None, lambda cache: cache.fork()[0])]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_filled_in_inference_mode_continues_outside(family, max_cache_len, change):
    model, theirs = tiny_models(family)
    cache, stock = lb.from_preset("dense", model, max_cache_len=max_cache_len), DynamicCache(config=theirs.config)
    with torch.inference_mode():
        read(model, cache)
        cache = change(cache)
    read(theirs, stock)
    if change is _swapped:
        stock.reorder_cache(SWAPPED)
    for tokens in (5, 1):
        ids = left_padded(2, tokens)[0]
        with torch.no_grad():
            want = theirs(ids, past_key_values=stock).logits
            torch.testing.assert_close(model(ids, past_key_values=cache).logits, want)
