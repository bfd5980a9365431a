"""Keys and values of one model or adapter are not continued by another. The truth is a whole fresh read."""

import copy

import peft
import pytest
import torch
from cases import tiny_models
from chat_cases import tokenizer_of, words
from generation_cases import GREEDY, SMALL_PAGES

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import filled_by, low_bit_cache
from hf_lowbit_kv.cache.cache_argument import NAME

pytestmark = [
    pytest.mark.host,
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation='sdpa'"),
]
OTHER = "filled by a different model"


@pytest.fixture
def adapted():
    """A model with the adapters `one`, which is active, and `two`."""
    torch.manual_seed(3)
    base = tiny_models("llama")[0]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_adapter("one")
    yield model.eval()
    lb.release(base)


def with_mlp_adapter(model):
    """Only layers outside of attention change: their adapters are compared by name."""
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False)).eval()


def merged_into_base(model):
    """No module has an adapter before, and none after."""
    config = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model, config).eval().merge_and_unload()
    assert merged is model


@torch.no_grad()
def trained(model):
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.01)


@torch.no_grad()
def trained_mlp(model):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.01)


@torch.no_grad()
def trained_norm(model):
    model.model.layers[1].input_layernorm.weight.data.mul_(1.01)


#: changes of a model with adapters
SWITCHES = {
    "another adapter": lambda model: model.set_adapter("two"),
    "two at once": lambda model: model.base_model.set_adapter(["one", "two"]),
    "the base": lambda model: model.base_model.disable_adapter_layers(),
    "another scale": lambda model: [x.scale_layer(0.5) for x in model.modules() if hasattr(x, "scale_layer")],
    "merged": lambda model: model.merge_adapter(),
    "unloaded": lambda model: model.merge_and_unload(),
    "other numbers": lambda model: [x.data.mul_(1.5) for name, x in model.named_parameters() if "lora_B.one" in name],
}
#: changes of a model without
CHANGES = {
    "adapter outside of attention": with_mlp_adapter,
    "merged into it": merged_into_base,
    "trained": trained,
    "MLP": trained_mlp,
    "norm": trained_norm,
}


def ids_of(tokens, seed=0):
    return torch.randint(3, 150, (1, tokens), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, cache):
    return model.generate(ids, max_new_tokens=6, **{NAME: cache}, **GREEDY)


def enabled(model, ids, cache):
    with lb.enable(model, "dense"):
        return plain(model, ids, cache)


def ours(model, ids, cache):
    return lb.generate(model, ids, max_new_tokens=6, past_key_values=cache, **GREEDY)


#: how a held cache is continued; attention under which it is filled and continued; whether it is preallocated
WAYS = {
    "generate": (plain, "lowbit_kv", None),
    "generate, preallocated": (plain, "lowbit_kv", 512),
    "generate, sdpa": (plain, "sdpa", None),
    "enable": (enabled, "lowbit_kv", None),
    "lb.generate": (ours, "lowbit_kv", 512),
}


def check_refused(model, inner, change, way, fork):
    run, attention, length = WAYS[way]
    inner.set_attn_implementation(attention)
    cache = lb.from_preset("dense", inner, max_cache_len=length, **SMALL_PAGES)
    first = run(model, ids_of(80), cache)
    if fork:
        cache = cache.fork()[0]
    longer = torch.cat([first, ids_of(30, 1)], dim=1)
    stored = int(cache.get_seq_length())
    change(model)
    with pytest.raises(ValueError, match=OTHER):
        run(model, longer, cache)
    assert int(cache.get_seq_length()) == stored, "nothing was stored"
    with pytest.raises(ValueError, match=OTHER):
        cache.save_pretrained("nowhere")
    cache.reset()
    want = inner.generate(longer, max_new_tokens=6, **GREEDY)
    assert torch.equal(run(model, longer, cache), want)


@pytest.mark.parametrize("way", WAYS)
def test_held_caches_refuse_another_adapter(way, adapted):
    check_refused(adapted, adapted.base_model.model, SWITCHES["another adapter"], way, fork=way != "enable")


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_of_adapters_is_noticed(switch, adapted):
    check_refused(adapted, adapted.base_model.model, SWITCHES[switch], "generate", False)


@pytest.mark.parametrize(
    ("change", "way"),
    [*((change, "generate") for change in CHANGES), *(("trained", way) for way in WAYS if way != "generate")],
)
def test_held_caches_refuse_other_weights(change, way):
    model = tiny_models("llama")[0]
    check_refused(model, model, CHANGES[change], way, False)
    lb.release(model)


def test_another_output_embedding_goes_on():
    """Keys and values do not depend on it."""
    model, _ = tiny_models("llama", tie_word_embeddings=False)
    cache, stock = lb.from_preset("dense", model), copy.deepcopy(model)
    text = plain(model, ids_of(40), cache)
    for each in (model, stock):
        each.lm_head.weight.data.mul_(-1)
    text = torch.cat([text, ids_of(5, 1)], 1)
    assert torch.equal(plain(model, text, cache), plain(stock, text, lb.from_preset("dense", stock)))


def test_the_same_adapter_goes_on(adapted):
    """Also after it was away in between, and with one more that is not active."""
    inner = adapted.base_model.model
    cache = lb.from_preset("dense", inner, **SMALL_PAGES)
    first = plain(adapted, ids_of(80), cache)
    adapted.set_adapter("two")
    adapted.add_adapter("three", adapted.peft_config["two"])
    adapted.set_adapter("one")
    longer = torch.cat([first, ids_of(30, 1)], dim=1)
    assert torch.equal(plain(adapted, longer, cache), inner.generate(longer, max_new_tokens=6, **GREEDY))


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_recurrent_layers_have_read_nothing_of_a_refused_prompt(family):
    """They come before the first layer that stores tokens, and the conversation continues under the first adapter."""
    inner = copy.deepcopy(tiny_models(family)[0])
    config = peft.LoraConfig(target_modules=["k_proj", "in_proj", "in_proj_qkvz"], init_lora_weights=False)
    model = peft.get_peft_model(inner, config, adapter_name="one").eval()
    model.add_adapter("two", config)
    cache = lb.from_preset("dense", inner, **SMALL_PAGES)
    longer = torch.cat([plain(model, ids_of(80), cache), ids_of(30, 1)], dim=1)
    model.set_adapter("two")
    with pytest.raises(ValueError, match=OTHER):
        plain(model, longer, cache)
    model.set_adapter("one")
    assert torch.equal(plain(model, longer, cache), inner.generate(longer, max_new_tokens=6, **GREEDY))
    lb.release(inner)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_chat_reads_its_text_again_under_another_adapter(family):
    """Gemma 3 has sliding layers, which cannot be cropped."""
    torch.manual_seed(5)
    base = tiny_models(family)[0]
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    chat = lb.Chat(
        model, tokenizer_of(), "dense", max_length=1024, max_new_tokens=6, cache_options=SMALL_PAGES, **GREEDY
    )
    answers = []
    for turn, adapter in enumerate(["one", "one", "two", "one", "two", None]):
        model.set_adapter(adapter) if adapter else model.merge_adapter()
        answers.append(chat.send(words(60, turn)))
        text = chat.tokenizer.apply_chat_template(
            chat.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        fresh = base.generate(**text, max_new_tokens=6, **GREEDY)[0, text["input_ids"].shape[1] :]
        assert chat.tokenizer.decode(fresh, skip_special_tokens=True) == answers[-1], turn
    assert len(set(answers)) > 1
    model.unmerge_adapter()
    with pytest.raises(ValueError, match=OTHER):
        chat.save("nowhere")
    lb.release(base)


# ---- other models -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def another(seed=9):
    """A llama of the same shape."""
    model = tiny_models("llama")[0]
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def qwen3_of(llama):
    """A qwen3 with the projections of this llama."""
    model = tiny_models("qwen3")[0]
    model.load_state_dict(llama.state_dict(), strict=False)
    return model


@pytest.mark.parametrize(
    ("kind", "way", "made_from"),
    [
        *(("llama", way, "its model") for way in ("generate", "enable", "lb.generate")),
        *((kind, "generate", "its model") for kind in ("qwen3", "qwen3 of the same weights")),
        *(("llama", "generate", source) for source in ("a configuration", "the other model")),
    ],
)
def test_another_model_of_the_same_shape_does_not_go_on(kind, way, made_from):
    model = tiny_models("llama")[0]
    other = {"llama": another, "qwen3": lambda: tiny_models("qwen3")[0]}.get(kind, lambda: qwen3_of(model))()
    run, _, length = WAYS[way]
    source = {"its model": model, "a configuration": model.config, "the other model": other}[made_from]
    cache = lb.from_preset("dense", source, max_cache_len=length, **SMALL_PAGES)
    longer = torch.cat([run(model, ids_of(80), cache), ids_of(30, 1)], dim=1)
    stored = int(cache.get_seq_length())
    with pytest.raises(ValueError, match=OTHER):
        run(other, longer, cache)
    assert int(cache.get_seq_length()) == stored
    if made_from == "the other model":
        with pytest.raises(ValueError, match=OTHER):
            cache.save_pretrained("nowhere")
    want = model.generate(longer, max_new_tokens=6, **GREEDY)
    assert torch.equal(run(model, longer, cache), want), "the model that filled it goes on"
    cache.reset()
    assert run(other, longer, cache).shape == want.shape, "an empty cache takes any model of its shape"
    for each in (model, other):
        lb.release(each)


@pytest.mark.parametrize("way", ["generate", "enable", "lb.generate"])
def test_a_copy_of_the_model_goes_on(way):
    model = tiny_models("llama")[0]
    run, _, length = WAYS[way]
    cache = lb.from_preset("dense", model, max_cache_len=length, **SMALL_PAGES)
    longer = torch.cat([run(model, ids_of(80), cache), ids_of(30, 1)], dim=1)
    twin = copy.deepcopy(model)
    want = model.generate(longer, max_new_tokens=6, **GREEDY)
    both = copy.deepcopy((model, cache))
    assert torch.equal(run(twin, longer, cache), want)
    assert torch.equal(run(*both[:1], longer, both[1]), want)
    for each in (model, twin, both[0]):
        lb.release(each)


def test_restored_contents_belong_to_the_model_that_restored_them(adapted, tmp_path):
    inner = adapted.base_model.model
    cache = lb.from_preset("dense", inner, **SMALL_PAGES)
    longer = torch.cat([plain(adapted, ids_of(80), cache), ids_of(30, 1)], dim=1)
    cache.save_pretrained(tmp_path)
    restored = lb.LowBitCache.from_pretrained(tmp_path, adapted)
    adapted.set_adapter("two")
    with pytest.raises(ValueError, match=OTHER):
        plain(adapted, longer, restored)
    adapted.set_adapter("one")
    assert torch.equal(plain(adapted, longer, restored), plain(adapted, longer, cache))


def test_offloaded_weights_are_not_compared():
    model = tiny_models("llama")[0]
    snapshot = filled_by.snapshot_of(model, [0, 1])
    model.model.layers[1].to("meta")
    assert snapshot.difference(filled_by.snapshot_of(model, [0, 1])) is None
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    assert snapshot.difference(filled_by.snapshot_of(model, [0, 1])) == "k_proj.weight of layer 0 has other numbers"


def test_decode_steps_do_not_look(monkeypatch):
    model, snapshots = tiny_models("llama")[0], []
    monkeypatch.setattr(low_bit_cache, "snapshot_of", lambda *args: snapshots.append(1) or filled_by.snapshot_of(*args))
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    first = plain(model, ids_of(80), cache)
    assert len(snapshots) == 1
    plain(model, torch.cat([first, ids_of(30, 1)], dim=1), cache)
    assert len(snapshots) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_another_dtype_is_named(dtype):
    model = tiny_models("llama")[0]
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    first = plain(model, ids_of(80), cache)
    model.to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"{OTHER}: \S+ of layer 0 was float32, and is {name}\. "):
        plain(model, torch.cat([first, ids_of(30, 1)], dim=1), cache)
    assert int(cache.get_seq_length()) == 85
