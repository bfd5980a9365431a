"""Bad input: a clear error that names the argument, before any state changes."""

import copy
import dataclasses
import importlib.util
import pickle

import pytest
import torch
from cases import SMALL_PAGES, filled, left_padded, next_logits, read, tiny_config, tiny_models
from tiny_architectures import tiny_model
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.storage.transforms import Hadamard

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("name", "close"), [("kivi2", "kivi-2"), ("k4v22", "k4v2"), ("bitdecoding-kc", "bitdecoding-kc-4")]
)
def test_unknown_preset_names_the_close_ones(model, name, close):
    with pytest.raises(ValueError, match=f"preset='{name}' is not known; did you mean.*'{close}'"):
        lb.from_preset(name, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits_k": 3}, r"bits=3 is not offered; allowed: \(2, 4, 5, 6, 8\)"),
        ({"key_format": "float4"}, "format='float4' is not known; allowed"),
        ({"page_size": 32, "group_size": 64}, "group_size=64.*does not divide page_size=32"),
        ({"sink": -1}, "sink=-1 is not allowed"),
        ({"backend": "cutlass"}, "backend='cutlass' is not known; allowed"),
        ({"dense_layers": [7]}, "dense_layers has the index 7, which is not a full-attention layer"),
    ],
)
def test_arguments_out_of_range(model, options, message):
    with pytest.raises(ValueError, match=message):
        lb.from_preset("kivi-2", model, **options)


def test_arguments_of_the_wrong_type(model):
    with pytest.raises(TypeError, match=r"preset must be a name such as 'kivi-2', not .*LlamaForCausalLM"):
        lb.from_preset(model, "kivi-2")
    for call in (lambda: lb.generate("gpt2", torch.tensor([[5]]), "kivi-2", 4), lambda: lb.release(None)):
        with pytest.raises(TypeError, match=r"model must be a transformers model .*, not <class"):
            call()


def test_formats_and_transforms_that_are_not_registered(model):
    """Operations get them by name, so these would fail in the first pass, or silently be others."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Renamed(lb.Affine):
        name = "mine"

    class Other(Hadamard):
        name = "other"

    for options in ({"key_format": Renamed(4, "channel")}, {"transform": Other()}):
        with pytest.raises(ValueError, match="is not registered under its name"):
            lb.LowBitCache(model, **options)


def test_going_back_through_the_cache_raises(model):
    """In eval mode too, where a pass with gradients enabled is common, and harmless."""
    cache = lb.from_preset("kivi-2", model)
    with torch.enable_grad():
        out = model(torch.arange(5)[None], past_key_values=cache).logits
        assert out.requires_grad
        with pytest.raises(
            RuntimeError, match=r"no gradients: compute under torch.no_grad\(\), or train without a cache"
        ):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
@pytest.mark.parametrize("max_cache_len", [None, 100])
def test_going_back_through_dense_tensors_raises(max_cache_len):
    """The first chunk's gradients are exact. Later ones would lack the part of the tokens that are stored."""
    _, model = tiny_models("llama")
    first, second = torch.arange(3, 63)[None, :40], torch.arange(3, 63)[None, 40:]
    cache = lb.from_preset("kivi-2", model, max_cache_len=max_cache_len, **SMALL_PAGES)
    parameter = model.model.layers[0].self_attn.k_proj.weight
    with torch.enable_grad():
        got = torch.autograd.grad(model(first, past_key_values=cache).logits.sum(), parameter)[0]
        want = torch.autograd.grad(model(first, use_cache=False).logits.sum(), parameter)[0]
        torch.testing.assert_close(got, want)
        out = model(second, past_key_values=cache).logits
        with pytest.raises(
            RuntimeError, match=r"no gradients: compute under torch.no_grad\(\), or train without a cache"
        ):
            out.sum().backward()


def test_one_warning_where_the_model_does_not_read_packed_pages():
    _, model = tiny_models("llama")
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    expected = r"attn_implementation='sdpa'.*set_attn_implementation\('lowbit_kv'\)"
    with pytest.warns(UserWarning, match=expected):
        next_logits(model, cache)
    next_logits(model, cache)  # once: warnings are errors
    assert "sdpa (slow: reads dense tensors" in cache.summary()
    model.set_attn_implementation(lb.ATTENTION_NAME)
    cache.reset()
    next_logits(model, cache)  # warnings are errors
    assert "lowbit_kv (reads packed pages)" in cache.summary()


@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_a_change_mid_way_leaves_the_cache_as_it_was(model, max_cache_len):
    cache = filled(model, max_cache_len=max_cache_len)
    layer = cache.layers[0]
    state = torch.zeros(1, 2, 1, 64)
    wrong = {
        "batch size 3": torch.zeros(3, 2, 1, 64),
        "number of KV heads 4": torch.zeros(1, 4, 1, 64),
        "key head_dim 128": torch.zeros(1, 2, 1, 128),
        "dtype torch.bfloat16": state.bfloat16(),
        "device meta": state.to("meta"),
    }
    for message, key in wrong.items():
        with pytest.raises(ValueError, match=f"got {message}, but the cache holds"):
            layer.update(key, state)
    with pytest.raises(ValueError, match="got batch size 2, but the cache holds 1"):
        read(model, cache, torch.tensor([[5], [6]]))
    assert torch.equal(next_logits(model, cache), next_logits(model, filled(model, max_cache_len=max_cache_len)))


def test_more_tokens_than_max_cache_len(model):
    cache = filled(model, max_cache_len=81)
    next_logits(model, cache)
    with pytest.raises(ValueError, match="max_cache_len=81 is too small: the cache holds 81 tokens and got 1 more"):
        next_logits(model, cache)
    assert int(cache.get_seq_length()) == 81


@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_a_prompt_without_a_token_after_what_is_stored(model, max_cache_len):
    cache = lb.from_preset("kivi-2", model, max_cache_len=max_cache_len, **SMALL_PAGES)
    prompt, another = torch.arange(40)[None] + 3, torch.arange(20)[None] + 50
    options = {"max_new_tokens": 5, "do_sample": False, "past_key_values": cache}
    text = model.generate(prompt, **options)
    with pytest.raises(ValueError, match=r"got no new token, but the cache holds 44.*reset\(\)"):
        model.generate(another, **options)
    assert int(cache.get_seq_length()) == 44
    with pytest.raises(ValueError, match="the prompt has no token: there is nothing to read"):
        model.generate(prompt[:, :0], **{**options, "past_key_values": lb.from_preset("kivi-2", model)})
    continued = model.generate(text, **options)
    assert torch.equal(continued[:, :45], text)
    cache.reset()
    assert torch.equal(model.generate(prompt, **options), text)


@pytest.mark.parametrize("max_cache_len", [None, 200])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_prompt_that_is_not_longer_than_what_is_stored(model, padding, max_cache_len):
    """generate cuts the stored length off the prompt, also where that leaves no more than a wrong part of it."""
    cache = lb.from_preset("kivi-2", model, max_cache_len=max_cache_len, **SMALL_PAGES)

    options = {"max_new_tokens": 5, "do_sample": False, "past_key_values": cache}

    def begun(tokens, seed):
        mask = torch.ones(2, tokens, dtype=torch.long)
        mask[0, :padding] = 0
        return {"inputs": left_padded(2, tokens, seed=seed)[0], "attention_mask": mask, **options}

    text = model.generate(**begun(40, 1))
    for tokens in (30, 43) if padding else (30, 43, 44):
        with pytest.raises(ValueError, match=r"44 .*full text so far plus the new tokens.*[Cc]all cache\.reset\(\)"):
            model.generate(**begun(tokens, 2))
        assert int(cache.get_seq_length()) == 44
    more = begun(50, 1) | {"inputs": torch.cat([text, left_padded(2, 5)[0]], 1)}
    continued = model.generate(**more)
    assert torch.equal(continued[:, :45], text)
    assert int(cache.get_seq_length()) == 54
    cache.reset()
    assert torch.equal(model.generate(**begun(40, 1)), text)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_chunk_as_long_as_what_is_stored(model, compiles):
    """It has padding, so its mask is as long as what is stored. For a compiled step transformers makes the mask twice."""
    ids, mask = left_padded(2, 40)
    mask[1, :30], mask[0, 20:23] = 0, 0
    cache = lb.from_preset("dense", model, max_cache_len=60)
    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        for layer in cache.layers:
            layer.is_compileable = compiles
        model(**model.prepare_inputs_for_generation(ids, 20, cache, mask, is_first_iteration=True, use_cache=True))
    assert int(cache.get_seq_length()) == 40


@pytest.mark.parametrize(
    ("own_positions", "padding", "max_cache_len"),
    [(False, (3, 25), None), (True, (3, 25), 60), (False, (20, 0), 60), (True, (20, 0), None), (False, (0, 0), None)],
)
def test_the_mask_of_a_chunk_as_long_as_what_is_stored(model, own_positions, padding, max_cache_len):
    """It reads as the mask of all tokens does, with positions that the caller counts and with the model's."""
    ids, _ = left_padded(2, 40)
    mask = torch.ones_like(ids)
    for row, columns in enumerate(padding):
        mask[row, :columns] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def read(whole):
        cache = lb.from_preset("dense", model, max_cache_len=max_cache_len)
        for start, stop in ((0, 20), (20, 40)):
            own = {"position_ids": positions[:, start:stop]} if own_positions else {}
            columns = mask[:, :stop] if whole else mask[:, start:stop]
            with torch.no_grad():
                out = model(ids[:, start:stop], attention_mask=columns, past_key_values=cache, **own)
        return out.logits

    real = mask[:, 20:].bool()
    assert torch.equal(read(False)[real], read(True)[real])


def test_a_text_that_continues_after_much_padding(model):
    """The positions of its 4 tokens, 8 to 11, are those that a prompt of 12 tokens would have there."""
    ids, mask = left_padded(1, 24)
    mask[:, :12] = 0
    cache = lb.from_preset("dense", model)
    options = {"do_sample": False, "past_key_values": cache}
    text = model.generate(ids[:, :16], attention_mask=mask[:, :16], max_new_tokens=5, **options)
    text = torch.cat([text[:, :20], ids[:, 20:]], 1)
    assert int(cache.get_seq_length()) == 20
    assert torch.equal(model.generate(text, attention_mask=mask, max_new_tokens=2, **options)[:, :24], text)
    assert int(cache.get_seq_length()) == 25


@pytest.mark.parametrize("first", [0, 5, 100])
def test_positions_of_the_callers_own(model, first):
    cache = lb.from_preset("dense", model)
    with torch.no_grad():
        for tokens in (20, 7):
            positions = torch.arange(first, first + tokens)[None]
            model(torch.full((1, tokens), 5), position_ids=positions, past_key_values=cache)
    assert int(cache.get_seq_length()) == 27


def test_attention_implementation_changed_mid_way():
    """Padding is not stored, and a mask of another implementation counts it. (`test_one_way_in.py` has rows without.)"""
    model, _ = tiny_models("llama")
    cache = lb.from_preset("kivi-2", model)
    read(model, cache, *left_padded(2, 80))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attention implementation changed to 'sdpa' .* padded rows .* reset"):
        model(torch.full((2, 1), 5), past_key_values=cache)
    cache.reset()
    with pytest.warns(UserWarning, match="attn_implementation='sdpa', which does not read packed pages"):
        next_logits(model, cache)


@pytest.mark.filterwarnings("ignore:.*does not read packed pages")
@pytest.mark.parametrize("chosen", [("sdpa", "lowbit_kv"), ("lowbit_kv", "sdpa")])
def test_attention_implementation_changed_after_all_tokens_were_removed(chosen):
    model, theirs = tiny_models("llama")
    cache = lb.from_preset("dense", model)
    for name, prompt in zip(chosen, (left_padded(2, 80), left_padded(2, 40)), strict=True):
        model.set_attn_implementation(name)
        out = read(model, cache, *prompt)
        cache.crop(-prompt[0].shape[1])
    assert torch.allclose(out, read(theirs, None, *prompt), atol=1e-4)


def test_training_with_gradients():
    model, _ = tiny_models("llama")
    model.train()
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    with pytest.raises(ValueError, match=r"no gradients: call model.eval\(\), or train without a cache"):
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.eval()
    model(torch.tensor([[5, 6, 7]]), past_key_values=cache)


def test_masks_beyond_padding(model):
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 1, 3, 3\) is not supported"):
        model(torch.tensor([[5, 6, 7]]), attention_mask=mask, past_key_values=lb.from_preset("kivi-2", model))


def test_triton_asked_for_and_missing(model, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "triton" else find_spec(name))
    with pytest.raises(ImportError, match=r"backend='triton' was requested, but Triton is not installed: pip install"):
        lb.from_preset("kivi-2", model, backend="triton")
    monkeypatch.setenv("HF_LOWBIT_KV_BACKEND", "triton")
    with pytest.raises(ImportError, match="HF_LOWBIT_KV_BACKEND='triton' was requested"):
        lb.from_preset("kivi-2", model)


def test_triton_without_a_gpu(model, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cache = lb.from_preset("kivi-2", model, backend="triton")
    with pytest.raises(ValueError, match="backend='triton' needs a GPU"):
        next_logits(model, cache)
    monkeypatch.setenv("HF_LOWBIT_KV_BACKEND", "triton")
    with pytest.raises(ValueError, match="HF_LOWBIT_KV_BACKEND='triton' needs a GPU"):
        next_logits(model, lb.from_preset("kivi-2", model))
    monkeypatch.setenv("HF_LOWBIT_KV_BACKEND", "")  # as good as unset
    next_logits(model, lb.from_preset("kivi-2", model))


def test_crop_beyond_what_is_stored(model):
    cache = filled(model)
    with pytest.raises(ValueError, match="tokens_to_remove=-81 is more than the 80 tokens stored"):
        cache.crop(-81)
    with pytest.raises(ValueError, match="tokens_to_remove=3 is not allowed"):
        cache.crop(3)
    assert cache.get_seq_length() == 80


def test_crop_where_the_host_cannot():
    model, _ = tiny_models("gemma2")
    cache = filled(model, max_cache_len=100)
    with pytest.raises(
        ValueError, match=r"tokens_to_remove=-3 is not possible: layer 0, .*SlidingLayer, does not keep"
    ):
        cache.crop(-3)
    cache.crop(0)
    assert all(int(cache.get_seq_length(index)) == 80 for index in range(2))


@pytest.mark.parametrize("max_cache_len", [None, 100])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_crop_that_a_later_layer_cannot(family, max_cache_len):
    kind = "linear_attention" if family == "qwen3_next" else "sliding_attention"
    model, stock = tiny_models(family, layer_types=["full_attention", kind])
    cache, theirs = filled(model, "dense", max_cache_len=max_cache_len), DynamicCache(config=stock.config)
    with pytest.raises(ValueError, match="tokens_to_remove=-3 is not possible: layer 1"):
        cache.crop(-3)
    read(stock, theirs, left_padded(1, 80)[0])
    torch.testing.assert_close(next_logits(model, cache), next_logits(stock, theirs))


def test_a_model_that_computes_with_keys_before_the_attention_function():
    model = tiny_model("jetmoe")
    model.set_attn_implementation(lb.ATTENTION_NAME)
    with pytest.raises(AttributeError, match="its architecture computes with them before it attends"):
        model(left_padded(1, 5)[0], **as_argument(lb.from_preset("dense", model)))


def test_an_update_without_a_model_stores_nothing_and_says_so(model):
    cache, chunk = lb.from_preset("kivi-2", model), torch.randn(1, 2, 5, 64)
    keys, _ = cache.update(chunk, chunk, 0)
    for use in (lambda: keys.shape, lambda: keys[0], lambda: torch.cat([keys])):
        with pytest.raises((AttributeError, TypeError), match=r"update\(\) returns no tensors and has stored nothing"):
            use()
    assert cache.get_seq_length() == 0


@torch.no_grad()
@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_a_packed_layer_has_no_tensors_of_keys(model, max_cache_len):
    cache = lb.from_preset("kivi-2", model, max_cache_len=max_cache_len)
    model(left_padded(1, 5)[0], **as_argument(cache))
    layer = cache.layers[0]
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=f"a low-bit layer has no tensor '{name}': its tokens are packed"):
            getattr(layer, name)
        assert not hasattr(layer, name)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert int(other.get_seq_length()) == 5


@pytest.mark.parametrize("way", ["forward", "configuration", "lb.generate"])
def test_attention_weights_are_refused(way, monkeypatch):
    model, _ = tiny_models("llama")
    ids = left_padded(1, 20)[0]
    if way == "configuration":
        monkeypatch.setattr(model.config, "_output_attentions", True)
    calls = {
        "forward": lambda: model(ids, output_attentions=True),
        "configuration": lambda: model(ids),
        "lb.generate": lambda: lb.generate(model, ids, max_new_tokens=2, output_attentions=True),
    }
    with pytest.raises(
        ValueError, match="output_attentions=True is not possible under attn_implementation='lowbit_kv'"
    ):
        calls[way]()


def test_a_configuration_no_model_uses():
    cache = lb.from_preset("kivi-2", tiny_config("llama"))
    with pytest.warns(UserWarning, match="made from a configuration that no model uses"):
        cache.update(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64), 0)
