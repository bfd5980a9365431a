"""A calibration belongs to its model's weights: a fine-tune, an adapter, one changed projection are other weights."""

import copy
import importlib.util

import peft
import pytest
import torch
from cases import calibration_of, left_padded, tiny_config, tiny_models
from chat_cases import tokenizer_of
from generation_cases import GREEDY, SMALL_PAGES
from mla_cases import tiny_models as tiny_mla
from transformers.distributed import DistributedConfig
from wrapped_linears import Adapted, Int8Linear

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration_files import calibration_lookup, weight_sums
from hf_lowbit_kv.calibration_files.model_description import describe_model, difference
from hf_lowbit_kv.eval.weight_quantization import SIXTEEN_BITS, WEIGHT_QUANTIZATIONS, load_quantized

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("own_calibrations")]
OPTIONS = {**SMALL_PAGES, "transform": "smooth"}
#: separate projections; with biases; with norms of queries and keys; one projection for all; sliding layers between
FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "gemma3_text"]


def described(model):
    return describe_model(model, packed_sizes(model))


def attention_of(model, index):
    return next(m for m in model.modules() if getattr(m, "layer_idx", None) == index and not hasattr(m, "self_attn"))


@pytest.fixture(scope="module")
def llama():
    return tiny_models("llama")[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_change_of_one_head_in_one_tensor_shows_and_is_named(family):
    model = tiny_models(family)[0]
    before = described(model)
    assert "unread" not in before
    seen = 0
    for index in packed_sizes(model):
        for name, parameter in attention_of(model, index).named_parameters():
            rows = len(parameter) // 4
            for part in range(4):
                changed = parameter[part * rows : (part + 1) * rows]
                kept = changed.clone()
                changed += 0.03 * torch.randn_like(changed) * max(float(kept.square().mean().sqrt()), 0.01)
                assert difference(before, described(model)) == f"{name} of layer {index} has other numbers"
                changed.copy_(kept)
                seen += 1
    assert difference(before, described(model)) is None
    assert seen >= 4 * 2 * len(packed_sizes(model))


@torch.no_grad()
def test_sums_are_those_of_a_loop(llama):
    weight = llama.model.layers[1].self_attn.k_proj.weight.double()
    width, first = weight.shape[1], weight.shape[1] // 3 // 8 * 8
    sums, squares, group = [0.0] * 8, 0.0, len(weight) // 8
    for row in range(len(weight)):
        for column in range(8):
            fraction = ((row * 8 + column + 1) * 2654435769 % 2**32) / 2**32
            term = float(weight[row, first + column]) * (fraction - 1.5 if fraction < 0.5 else fraction + 0.5)
            sums[row // group] += term
            squares += term * term
    assert width > first + 8
    found = described(llama)["weights"]["float32"]["1.k_proj.weight"]
    assert found == pytest.approx([*sums, (squares / 8) ** 0.5], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_the_same_model_and_a_change_of_two_percent_is_not(dtype, llama):
    before, other = described(llama), copy.deepcopy(llama).to(dtype)
    assert difference(before, described(other)) is None
    assert weight_sums.remark(before, described(other)) is None
    with torch.no_grad():
        for layer in other.model.layers:
            weight = layer.self_attn.v_proj.weight
            weight += 0.02 * weight.std() * torch.randn_like(weight)
    assert "v_proj.weight of layer 0" in difference(before, described(other))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}"))
        for name, package in (("torchao-int8", "torchao"), ("torchao-int4", "torchao"), ("bnb-nf4", "bitsandbytes"))
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_below_16_bits_are_dequantized_and_compared(name, family):
    assert name in WEIGHT_QUANTIZATIONS
    model, config = tiny_models(family)[0], tiny_config(family)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name:
                parameter.normal_()
    state = copy.deepcopy(model.state_dict())

    def loaded(name):
        return load_quantized(config, name, torch.device("cpu"), torch.float32, state)

    plain, quantized = described(loaded(SIXTEEN_BITS)), described(loaded(name))
    assert "unread" not in quantized
    assert len(quantized["weights"]) == (2 if family == "qwen2" else 1)  # biases stay in float32
    assert difference(plain, quantized) is None
    assert "compared coarsely: made for float32" in weight_sums.remark(plain, quantized)
    assert difference(quantized, described(loaded(name))) is None
    assert weight_sums.remark(quantized, quantized) is None
    for change in ("k_proj", "v_proj", "q_proj"):
        kept = state[f"model.layers.1.self_attn.{change}.weight"]
        state[f"model.layers.1.self_attn.{change}.weight"] = kept.flip(0)
        assert f"{change}.weight of layer 1" in difference(plain, described(loaded(name)))
        state[f"model.layers.1.self_attn.{change}.weight"] = kept + 0.05 * kept.std() * torch.randn_like(kept)
        if name != "torchao-int8":  # steps of 8 bits are small, and 5 % of 4 bits is less than a step
            assert difference(plain, described(loaded(name))) is None
        assert f"{change}.weight of layer 1" in difference(quantized, described(loaded(name)))
        state[f"model.layers.1.self_attn.{change}.weight"] = kept


@torch.no_grad()
def test_layers_that_evaluate_their_weights(llama):
    """Quantized layers and adapters of other packages, which only say how wide they are."""
    before, model = described(llama), copy.deepcopy(llama)
    attention = model.model.layers[0].self_attn
    attention.k_proj = Int8Linear(attention.k_proj)
    assert weight_sums.remark(before, described(model)) == (
        "weights of attention compared in part: Int8Linear is not read"
    )
    attention.k_proj.in_features = 64
    assert difference(before, described(model)) is None
    assert "compared coarsely: made for float32, the model has Int8Linear" in weight_sums.remark(
        before, described(model)
    )
    attention.v_proj = Adapted(attention.v_proj)
    attention.v_proj.on = False
    assert difference(before, described(model)) is None
    attention.v_proj.on = True
    assert difference(before, described(model)) == "v_proj.weight of layer 0 has other numbers"


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_adapters_count_where_they_are_active(target, llama):
    before, model = described(llama), copy.deepcopy(llama)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=[target], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).train()
    assert "training mode" in weight_sums.remark(before, described(model))
    adapted.eval()
    reason = f"{target}.weight of layer 0 has other numbers"
    assert difference(before, described(model)) == reason
    of_adapter = described(model)
    with adapted.disable_adapter():
        assert difference(before, described(model)) is None
    adapted.merge_adapter()
    assert difference(before, described(model)) == reason
    assert difference(of_adapter, described(model)) is None, "one calibration for the adapter, merged or not"
    adapted.unmerge_adapter()
    model = adapted.merge_and_unload()
    assert difference(before, described(model)) == reason
    assert difference(of_adapter, described(model)) is None
    with pytest.raises(ValueError, match=f"made for other weights .*{reason}.*allow_other_weights=True"):
        lb.from_preset("kivi-2", model, **OPTIONS, calibration=calibration_of(llama))


def test_latent_models_are_compared():
    model = tiny_mla("deepseek_v3")[0]
    before = described(model)
    with torch.no_grad():
        attention_of(model, 0).kv_b_proj.weight[:5] *= 1.5
    assert difference(before, described(model)) == "kv_b_proj.weight of layer 0 has other numbers"


def test_what_cannot_be_compared_is_named(llama, tmp_path):
    def remark(model):
        return lb.from_preset("kivi-2", model, **OPTIONS, calibration=calibration_of(llama)).calibration_remark

    assert remark(llama) is None
    offloaded = copy.deepcopy(llama)
    offloaded.model.layers[1].to("meta")
    assert remark(offloaded) == "weights of attention compared in part: they are offloaded"
    offloaded.model.layers.to("meta")
    assert remark(offloaded) == "weights of attention not compared: they are offloaded"
    assert remark(llama.config) == "weights of attention not compared: only the configuration is known"
    split = copy.deepcopy(llama)
    split.config.distributed_config = DistributedConfig(tp_size=2, tp_plan="auto")
    assert remark(split) == "weights of attention not compared: each process has a shard of them"


def test_files_without_sums_are_taken_with_a_note(llama, tmp_path):
    older = calibration_of(llama)
    del older.model["weights"]
    older.save(tmp_path / "older.safetensors")
    cache = lb.from_preset("kivi-2", llama, **OPTIONS, calibration=tmp_path / "older.safetensors")
    assert "weights of attention not compared: the file has no sums (an older file)" in cache.summary()
    older.save(calibration_lookup.user_file(older.model))
    assert "the file has no sums" in lb.from_preset("kivi-2", llama, **OPTIONS).summary()


@pytest.fixture
def tuned(llama):
    """The same embeddings, other projections."""
    model = copy.deepcopy(llama)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 1.1
    yield model
    lb.release(model)


def many(model, **options):
    return lb.generate_many(model, [[5, 6, 7]], "kivi-2", max_new_tokens=2, progress=False, max_rows=1, **options)


def enabled(model, **options):
    cache_options = options.pop("cache_options")
    with lb.enable(model, "kivi-2", **cache_options, **options):
        model.generate(left_padded(1, 20)[0], max_new_tokens=2, **GREEDY)


def chat(model, **options):
    lb.Chat(model, tokenizer_of(), "kivi-2", max_length=512, **options)


#: public calls that take a calibration
CALLS = {
    "from_preset": lambda model, cache_options, **more: lb.from_preset("kivi-2", model, **cache_options, **more),
    "LowBitCache": lambda model, cache_options, **more: lb.LowBitCache(model, **cache_options, **more),
    "KIVICache": lambda model, cache_options, **more: lb.KIVICache(model, **cache_options, **more),
    "generate": lambda model, **more: lb.generate(model, left_padded(1, 20)[0], "kivi-2", 2, progress=False, **more),
    "generate_many": many,
    "enable": enabled,
    "Chat": chat,
}


@pytest.mark.parametrize(("call", "by_name"), [*((call, True) for call in CALLS), ("from_preset", False)])
def test_other_weights_are_refused_unless_the_caller_accepts_them(call, by_name, llama, tuned, tmp_path):
    calibration, options = calibration_of(llama), {"cache_options": OPTIONS}
    path = tmp_path / "x.safetensors" if by_name else calibration_lookup.user_file(calibration.model)
    calibration.save(path)
    if by_name:
        options["calibration"] = path
    reason = r"(?s)x?.safetensors' was made for other weights.*k_proj.weight of layer 0.*allow_other_weights=True"
    with pytest.raises(ValueError, match=reason):
        CALLS[call](tuned, **options)
    CALLS[call](tuned, **options, allow_other_weights=True)
    with pytest.raises(ValueError, match="allow_other_weights='yes' is not allowed; allowed: True, False"):
        CALLS[call](tuned, **options, allow_other_weights="yes")
    CALLS[call](llama, **options)
    lb.release(llama)


@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_weights_that_change_before_the_first_tokens_of_a_cache(max_cache_len, llama):
    """The cache is made before the model gets an adapter, or other numbers."""
    model = copy.deepcopy(llama)
    options = {**OPTIONS, "calibration": calibration_of(llama), "max_cache_len": max_cache_len}
    cache, accepting = (lb.from_preset("kivi-2", model, **options, allow_other_weights=x) for x in (False, True))

    def written(cache):
        return model.generate(left_padded(1, 20)[0], past_key_values=cache, max_new_tokens=3, **GREEDY)

    want = written(cache)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).eval()
    weight = model.model.layers[0].self_attn.k_proj.base_layer.weight

    def scale(factor):
        with torch.no_grad():
            weight.mul_(factor)

    reason = r"calibration was made for other weights.*k_proj.weight of layer 0.*allow_other_weights=True"
    for change, undo in (
        (lambda: None, adapted.base_model.disable_adapter_layers),
        (lambda: scale(2), lambda: scale(0.5)),
    ):
        change()
        cache.reset()
        for _ in range(2):
            with pytest.raises(ValueError, match=reason):
                written(cache)
            assert int(cache.get_seq_length()) == 0
        accepting.reset()
        written(accepting)
        undo()
        cache.reset()
        assert torch.equal(written(cache), want)
    later = lb.from_preset("kivi-2", model, **options)
    model.to(torch.bfloat16)
    written(later)  # rounded weights are the same model


def test_accepted_weights_are_named_and_those_that_fit_come_first(llama, tuned):
    def used(**options):
        cache = lb.from_preset("kivi-2", tuned, **OPTIONS, **options)
        return float(cache.packed_layers[0].parameters["key_transform.factors"][0, 0]), cache.calibration_remark

    first, second = (calibration_of(model, n) for model, n in ((llama, 2), (tuned, 4)))
    places = [calibration_lookup.user_file(each.model) for each in (first, second)]
    assert places[0] != places[1], "a fine-tune has a file of its own"
    first.save(places[0])
    assert used(allow_other_weights=True) == (1, "made for other weights (k_proj.weight of layer 0 has other numbers)")
    second.save(places[1])
    assert used(allow_other_weights=True) == used() == (2, None)


def test_other_embeddings_are_accepted_only_by_name(llama):
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.embed_tokens.weight += 0.1
    calibration = calibration_of(llama)
    calibration.save(calibration_lookup.user_file(calibration.model))
    with pytest.raises(ValueError, match="needs a calibration"):
        lb.from_preset("kivi-2", other, **OPTIONS, allow_other_weights=True)
    with pytest.raises(ValueError, match=r"other weights .*embedding"):
        lb.from_preset("kivi-2", other, **OPTIONS, calibration=calibration)
    lb.from_preset("kivi-2", other, **OPTIONS, calibration=calibration, allow_other_weights=True)
    small = tiny_models("llama", num_hidden_layers=1)[0]
    with pytest.raises(ValueError, match="made for another model"):
        lb.from_preset("kivi-2", small, **OPTIONS, calibration=calibration, allow_other_weights=True)


def test_calibrations_of_other_weights_are_not_joined(llama, tuned):
    with pytest.raises(ValueError, match=r"cannot be merged: k_proj\.weight of layer 0"):
        calibration_of(llama).merged(calibration_of(tuned))


def test_a_saved_cache_with_an_accepted_calibration_is_loaded(llama, tuned, tmp_path):
    calibration_of(llama).save(tmp_path / "x.safetensors")
    cache = lb.from_preset("kivi-2", tuned, **OPTIONS, calibration=tmp_path / "x.safetensors", allow_other_weights=True)
    tuned.generate(left_padded(1, 50)[0], past_key_values=cache, max_new_tokens=2, **GREEDY)
    cache.save_pretrained(tmp_path / "cache")
    lb.LowBitCache.from_pretrained(tmp_path / "cache", tuned, calibration=tmp_path / "x.safetensors")
