"""MLA models: attention to the latent itself gives the tokens that transformers gives from expanded keys and values."""

import copy
import gc
import pickle

import pytest
import torch
from mla_cases import (
    DENSE_MLP,
    GREEDY,
    SMALL_PAGES,
    attention_class,
    attentions,
    folders,
    prompt,
    replaced,
    tiny_config,
    tiny_models,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from wrapped_linears import Adapted, Int8Linear

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import latent_attention
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer

pytestmark = [
    pytest.mark.host,
    pytest.mark.filterwarnings("ignore:.*falling back to its reference.*"),
]

#: architectures whose attention an indexer makes sparse: refused
SPARSE = {"axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"}


@pytest.fixture(scope="module")
def models():
    return tiny_models("deepseek_v3", **DENSE_MLP)


@pytest.mark.parametrize("folder", folders())
def test_every_architecture_with_a_latent(folder):
    """Fused, with transformers' own tokens, or refused by name with the reason."""
    if folder in SPARSE:
        module = attention_class(folder)(tiny_config(folder), layer_idx=1)
        with pytest.raises(ValueError, match=f"{type(module).__name__} is sparse attention: an indexer"):
            latent_attention.check_module(module)
        return
    ours, theirs = tiny_models(folder)
    inputs = prompt(padded=7)
    expected = theirs.generate(**inputs, max_new_tokens=12, **GREEDY)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12, past_key_values=cache, **GREEDY), expected)
    assert expected[:, 50:].unique().numel() > 1
    assert sum(isinstance(layer, LowBitLayer) for layer in cache.layers) == len(attentions(ours))
    assert cache.nbytes.codes > 0
    assert not replaced(ours)


def test_all_that_have_no_indexer_are_known():
    """A new folder of transformers must be looked at: is it served, or sparse?"""
    known = SPARSE | {
        *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
        *("longcat_flash", "minicpm3", "mistral4", "youtu"),
    }
    assert set(folders()) <= known


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 100}], ids=str)
@pytest.mark.parametrize(
    "way",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}],
    ids=str,
)
def test_ways_of_generating(models, way, options):
    ours, theirs = models
    inputs = prompt(batch=1 if "prompt_lookup_num_tokens" in way else 2, padded=0 if "prefill_chunk_size" in way else 9)
    expected = theirs.generate(**inputs, max_new_tokens=20, **GREEDY, **way)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES, **options)
    found = ours.generate(**inputs, max_new_tokens=20, past_key_values=cache, **GREEDY, **way)
    assert torch.equal(found, expected)


@pytest.mark.newest  # compiled once, on the newest
def test_compiled_steps_are_one_graph(models):
    ours, theirs = models
    inputs = prompt()
    expected = theirs.generate(**inputs, max_new_tokens=6, **GREEDY)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES, max_cache_len=64)
    with torch.no_grad():
        token = ours(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        step = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
        found = [token]
        for at in range(5):
            position = torch.full((2, 1), 50 + at)
            token = step(token, past_key_values=cache, position_ids=position).logits[:, -1:].argmax(-1)
            found.append(token)
    assert torch.equal(torch.cat(found, 1), expected[:, 50:])


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_implementation_gets_dense_latents(models, other):
    theirs = models[1]
    inputs = prompt()
    expected = theirs.generate(**inputs, max_new_tokens=10, **GREEDY)
    model = copy.deepcopy(theirs)
    model.set_attn_implementation(other)
    cache = lb.from_preset("mla", model, **SMALL_PAGES)
    assert torch.equal(model.generate(**inputs, max_new_tokens=10, past_key_values=cache, **GREEDY), expected)


# ---- the model's own code -------------------------------------------------------------------------------------------------


def test_the_method_is_restored():
    ours, theirs = tiny_models("deepseek_v3", **DENSE_MLP)
    inputs = prompt()
    expected = theirs.generate(**inputs, max_new_tokens=4, **GREEDY)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    ours.generate(**inputs, max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert not replaced(ours)
    fixed = lb.from_preset("mla", ours, **SMALL_PAGES, max_cache_len=64)
    ours.generate(**inputs, max_new_tokens=4, past_key_values=fixed, **GREEDY)
    assert replaced(ours)  # compiled steps may follow
    stock = ours.generate(**inputs, max_new_tokens=4, past_key_values=DynamicCache(config=ours.config), **GREEDY)
    assert torch.equal(stock, expected)
    twin = copy.deepcopy(ours)
    twin.get_input_embeddings().weight.data.mul_(-1)
    attentions(twin)[0].kv_b_proj.weight.data.zero_()
    first = torch.ones(1, 1, 3, 64), torch.ones(1, 1, 3, 16)
    assert not attentions(twin)[0].expand_kv(*first)[1].any(), "a copy's method expands with the copy's weights"
    fixed.reset()
    assert not replaced(ours)
    ours.generate(**inputs, max_new_tokens=4, past_key_values=fixed, **GREEDY)
    del fixed
    gc.collect()
    assert not replaced(ours)


def test_an_error_in_the_model_leaves_the_method_restored(monkeypatch):
    ours, theirs = tiny_models("deepseek_v3", **DENSE_MLP)
    inputs = prompt()
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    attention = attentions(ours)[1]

    def fail(*args):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(attention.o_proj), "forward", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            ours(**inputs, past_key_values=cache)
    assert not replaced(ours)
    # between `update` and `expand_kv` there is only the rotation of queries: the method then serves tensors as ever
    cache.layers[0].model_side.begin(stays=False)
    expected = theirs(**inputs).logits
    torch.testing.assert_close(ours(**inputs).logits, expected)
    assert not replaced(ours)


def test_quantized_layers_are_dequantized_once_and_adapters_at_every_step():
    ours, theirs = tiny_models("deepseek_v3", **DENSE_MLP)
    inputs, tokens = prompt(), {"max_new_tokens": 8, **GREEDY}
    for attention in attentions(ours) + attentions(theirs):
        attention.kv_b_proj = Int8Linear(attention.kv_b_proj)
    expected = theirs.generate(**inputs, **tokens)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    Int8Linear.calls = 0
    assert torch.equal(ours.generate(**inputs, past_key_values=cache, **tokens), expected)
    layers = len(attentions(ours))
    assert Int8Linear.calls == 2 * layers, "the prompt, and one dequantization"
    for attention in attentions(ours) + attentions(theirs):
        attention.kv_b_proj.scale.mul_(-1.5)
    cache.reset()
    expected = theirs.generate(**inputs, **tokens)
    assert torch.equal(ours.generate(**inputs, past_key_values=cache, **tokens), expected)

    ours, theirs = tiny_models("deepseek_v3", **DENSE_MLP)
    layers = attentions(ours) + attentions(theirs)
    for attention in layers:
        attention.kv_b_proj = Adapted(attention.kv_b_proj)
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    for on in (True, False):
        for attention in layers:
            attention.kv_b_proj.on = on
        cache.reset()
        expected = theirs.generate(**inputs, **tokens)
        assert torch.equal(ours.generate(**inputs, past_key_values=cache, **tokens), expected)


def test_fp8_weights_with_a_scale_a_block():
    """DeepSeek-V3's own checkpoints: what transformers' layer holds is multiplied out."""
    layer = torch.nn.Linear(128, 256, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.tensor([[1.0], [3.0]]))
    layer.block_size = (128, 128)
    module = torch.nn.Module()
    module.kv_b_proj, module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank = layer, 32, 32, 128
    keys, values = latent_attention.UpProjection(module).matrices(torch.float32)
    full = torch.cat([layer.weight[:128].float(), layer.weight[128:].float() * 3]).view(4, 64, 128)
    assert torch.equal(keys, full[:, :32])
    assert torch.equal(values, full[:, 32:])


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operation made."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.found = max(self.found, made.numel())
        return made


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_copies_no_weights(models, tokens):
    """W_UK and W_UV are read as they lie. Copied for each row of a batch they outweigh thousands of tokens of that row."""
    attention, rows = attentions(models[0])[0], 6
    side = latent_attention.Absorbed(attention)
    heads, nope, rope = 4, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    query, out = torch.randn(rows, heads, tokens, nope + rope), torch.randn(rows, tokens, heads, side.rank)
    keys, values = latent_attention.UpProjection(attention).matrices(torch.float32)
    with Largest() as largest:
        absorbed, expanded = side.queries(query), side.outputs(out)
    assert largest.found == absorbed.numel() < rows * min(keys.numel(), values.numel())
    for head in range(heads):
        expected = torch.cat([query[:, head, :, :nope] @ keys[head], query[:, head, :, nope:]], -1)
        torch.testing.assert_close(absorbed[:, head], expected)
        torch.testing.assert_close(expanded[:, :, head], out[:, :, head] @ values[head].T)


# ---- FP8 --------------------------------------------------------------------------------------------------------------------


def test_a_token_takes_644_bytes():
    """512 of e4m3, 4 of scale, 64 RoPE channels of 2 bytes (SnapMLA, section 3.1)."""
    ours, _ = tiny_models("deepseek_v3", torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64)
    cache = lb.MLAFP8Cache(ours)
    with torch.no_grad():
        ours(**prompt(tokens=130), past_key_values=cache)
    assert cache.layers[0].store.token_bytes == 512 + 4 + 64 * 2 == 644
    assert "644 bytes per layer" in cache.summary()
    nbytes = cache.nbytes
    assert nbytes.codes + nbytes.metadata == 2 * 2 * 256 * 644, "two layers, two rows, two pages"
    assert nbytes.window == 0


def test_snapmla_stays_close_to_the_model(models):
    ours, theirs = models
    inputs = prompt(tokens=100)
    cache = lb.MLAFP8Cache(ours, **SMALL_PAGES)
    with torch.no_grad():
        for part in inputs["input_ids"].split(25, 1):  # later chunks attend to packed latents
            found = ours(part, past_key_values=cache).logits
        expected = theirs(inputs["input_ids"]).logits[:, -25:]
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_model_without_latents_is_told_which_caches_fit():
    from cases import tiny_models as others

    llama = others("llama")[0]
    for make in (lb.MLAFP8Cache, lambda model: lb.from_preset("snapmla", model)):
        with pytest.raises(
            ValueError, match=r"'llama' has no multi-head latent attention.*from_preset\('fp8', model\)"
        ):
            make(llama)


def test_bad_input(models):
    ours = models[0]
    with pytest.raises(ValueError, match=r"'deepseek_v3' caches a latent.*make the cache from the model itself"):
        lb.MLAFP8Cache(ours.config)
    with pytest.raises(ValueError, match=r"'deepseek_v3' caches a latent.*MLAFP8Cache"):
        lb.from_preset("fp8", ours)
    with pytest.raises(
        ValueError, match=r"format='int2-channel' does not store the latent of MLA models; allowed: 'dense'"
    ):
        lb.from_preset("kivi-2", ours)
    with pytest.raises(ValueError, match=r"transform='hadamard' is not allowed where a layer caches a latent"):
        lb.from_preset("snapmla", ours, transform="hadamard")
    odd = tiny_models("deepseek_v3", kv_lora_rank=96)[0]
    with pytest.raises(ValueError, match=r"kv_lora_rank=96 .* must be a multiple of 64"):
        lb.MLAFP8Cache(odd)


@pytest.mark.parametrize("at_work", [False, True], ids=["growing", "preallocated"])
def test_a_copy_of_the_model_is_not_served(at_work):
    """Its queries would be multiplied with the weights of the other copy, and nothing would show it."""
    ours, _ = tiny_models("deepseek_v3", **DENSE_MLP)
    first = lb.from_preset("mla", ours, **SMALL_PAGES, max_cache_len=64 if at_work else None)
    ours.generate(**prompt(), max_new_tokens=3, past_key_values=first, **GREEDY)
    twin = copy.deepcopy(ours)
    assert bool(replaced(twin)) == at_work
    cache = lb.from_preset("mla", ours, **SMALL_PAGES)
    with pytest.raises((ValueError, AttributeError), match=r"[Mm]ake the cache from the model that runs"):
        twin(**prompt(), past_key_values=cache)


def test_a_cache_outlives_no_model():
    ours, _ = tiny_models("deepseek_v3", **DENSE_MLP)
    cache = lb.from_preset("mla", ours)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(cache.layers[0].model_side)
    twin = copy.deepcopy(cache)
    inputs = prompt()
    assert torch.equal(
        *(ours.generate(**inputs, max_new_tokens=4, past_key_values=each, **GREEDY) for each in (cache, twin))
    )
    del ours
    gc.collect()
    with pytest.raises(RuntimeError, match="the model that this cache was made for is gone"):
        _ = cache.layers[0].model_side.module
