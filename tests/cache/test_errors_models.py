"""Models that a cache does not serve: by their architecture, or because the cache was made for another one."""

import pytest
import torch
from cases import SMALL_PAGES, left_padded, next_logits, tiny_config, tiny_models
from transformers import AutoConfig, AutoModelForCausalLM

import hf_lowbit_kv as lb

pytestmark = pytest.mark.host


def test_layers_of_different_head_dim():
    # Gemma 4: its full-attention layers have larger heads than the others
    with pytest.raises(ValueError, match=r"layer 5.*head_dim=48 is not supported"):
        lb.from_preset("kivi-2", AutoConfig.for_model("gemma4_text", global_head_dim=48))
    cache = lb.from_preset("kivi-2", AutoConfig.for_model("gemma4_text"))
    assert cache.packed_sizes[5] == (4, 512, 512)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config("llama", head_dim=48), "head_dim=48 is not supported.*allowed"),
        (AutoConfig.for_model("t5"), "'t5' is an encoder-decoder model"),
        (
            tiny_config("mistral", sliding_window=64),
            r"nothing to pack, because sliding_window=64 is set\. Load the model with sliding_window=None",
        ),
        (AutoConfig.for_model("mamba"), r"nothing to pack|attention interface"),
        (
            AutoConfig.for_model("mllama_text_model", num_hidden_layers=3, cross_attention_layers=[1]),
            "'mllama_text_model' has cross-attention layers",
        ),
        (AutoConfig.for_model("deepseek_v3"), "'deepseek_v3' caches a latent"),
        (
            AutoConfig.for_model("gemma4_text", use_bidirectional_attention="all"),
            "use_bidirectional_attention='all' attends in both directions",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        lb.from_preset("kivi-2", config)


def test_without_its_sliding_window_a_model_computes_short_texts_as_before(tmp_path):
    _, theirs = tiny_models("mistral", sliding_window=64)
    theirs.save_pretrained(tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, sliding_window=None, attn_implementation="lowbit_kv").eval()
    ids = left_padded(1, 64)[0]
    with torch.no_grad():
        want = theirs(ids).logits
        got = ours(ids, past_key_values=lb.from_preset("dense", ours)).logits
    torch.testing.assert_close(got, want)


def test_architecture_without_the_attention_interface():
    config = AutoConfig.for_model("bloom", hidden_size=128, n_head=2, n_layer=1, vocab_size=64)
    for given in (config, AutoModelForCausalLM.from_config(config)):
        with pytest.raises(ValueError, match="BloomForCausalLM does not use transformers' attention interface"):
            lb.from_preset("kivi-2", given)


def test_another_models_layer_count(model):
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    for layers in (1, 3):
        other, _ = tiny_models("llama", num_hidden_layers=layers)
        with pytest.raises(ValueError, match=f"num_hidden_layers={layers}, and the cache was made for 2"):
            next_logits(other, cache)
        assert cache.get_seq_length() == 0


def test_another_models_head_count(model):
    other, _ = tiny_models("llama", num_key_value_heads=1)
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    with pytest.raises(ValueError, match="got num_kv_heads=1, but the cache is for a model with 2"):
        next_logits(other, cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("how", ["data", "tensor"])
def test_head_count_of_distributed_models(model, how, tmp_path):
    """Only heads that tensor parallelism splits may be fewer; another process group excuses nothing."""
    from transformers.distributed import DistributedConfig

    other, _ = tiny_models("llama", num_key_value_heads=1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        if how == "tensor":  # what `from_pretrained(tp_plan="auto")` notes on two ranks
            model.config.distributed_config = DistributedConfig(tp_size=2, tp_plan="auto")
        cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
        if how == "tensor":
            next_logits(other, cache)
            assert cache.layers[0].store.num_heads == 1
            return
        with pytest.raises(ValueError, match="got num_kv_heads=1, but the cache is for a model with 2"):
            next_logits(other, cache)
    finally:
        model.config.__dict__.pop("distributed_config", None)
        torch.distributed.destroy_process_group()


def test_a_cache_of_another_copy_of_the_model():
    ours, theirs = tiny_models("llama")
    for model in (theirs, tiny_models("gemma2")[1]):
        cache = lb.from_preset("kivi-2", ours, **SMALL_PAGES)
        with pytest.raises(
            (AttributeError, TypeError),
            match=r"[Mm]ake the cache from the model that runs",
        ):
            next_logits(model, cache)
        assert cache.get_seq_length() == 0
        next_logits(ours, cache)
