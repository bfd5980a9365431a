"""Models whose weights spoil stored keys: the warning, what it says, and where the weights are found."""

import copy
import warnings

import pytest
import torch
from cases import SMALL_PAGES, left_padded, tiny_config
from transformers import AutoModelForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import spoiled_keys
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.packed_layers import packed_sizes

pytestmark = pytest.mark.host
#: layer 1 has the large biases
SPOILED = 1


def model_of(family: str = "qwen2", size: float = 300.0, **changes):
    """A tiny model; the second KV head of one layer has key biases of this size in the slowest RoPE pair."""
    torch.manual_seed(0)
    config = tiny_config(family, num_hidden_layers=3, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lowbit_kv").eval()
    put(model, size)
    return model


@torch.no_grad()
def put(model, size: float) -> None:
    """Make weight rows of norm 1, and set the biases."""
    for module in model.modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        name = next(name for name in spoiled_keys.KEY_PROJECTIONS if hasattr(module, name))
        projection = getattr(module, name)
        projection.weight.div_(projection.weight.norm(dim=1, keepdim=True))
        if module.layer_idx == SPOILED and projection.bias is not None:
            heads, dim = packed_sizes(model)[SPOILED][:2]
            spoiled_keys._of_keys(projection.bias, name, heads, dim)[-1, [dim // 2 - 1, dim - 1]] = size


def made(preset: str, model, **options) -> list[str]:
    """The warnings of making a cache."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        lb.from_preset(preset, model, **{**SMALL_PAGES, **options})
    return [str(each.message) for each in seen]


@pytest.mark.parametrize(
    ("preset", "instead"),
    [
        ("kv8", "Take preset 'int8'"),
        ("kv4-sink", "Take preset 'kivi-4-sink'"),
        ("kv4-hadamard", "Take preset 'kivi-4'"),
    ],
)
def test_it_names_the_layer_and_the_preset_to_take(preset, instead):
    (message,) = made(preset, model_of(), residual=128)
    assert message.startswith("Qwen2ForCausalLM has key biases that are too large for key_format='int")
    assert "in layer 1 (300 times) a bias" in message
    assert instead in message


def test_it_warns_once_for_a_model_and_a_preset():
    """A preset that spoils more must not be silent because another one warned."""
    model, other = model_of(), model_of()
    (eight,), (four,) = made("kv8", model), made("kv4", model)
    assert "key_format='int8-token'" in eight
    assert "key_format='int4-token'" in four
    assert made("kv4", model) == made("kv8", model) == []
    assert made("kv8", other) == [eight]


def test_plain_fp8_is_named_with_the_format_to_take():
    with pytest.warns(UserWarning, match="too large for key_format='fp8'.*Take preset 'fp8'"):
        lb.LowBitCache(model_of(), "fp8", "fp8", sink=0, **SMALL_PAGES)
    with pytest.warns(UserWarning, match="key_format='int8-token-g32'.*Take preset 'int8'"):
        lb.LowBitCache(model_of(), "int8-token-g32", "int2-token", **SMALL_PAGES)


@pytest.mark.parametrize("preset", ["int8", "int6", "int5", "fp8", "kivi-4-sink", "k8v4", "kitty", "dense"])
def test_keys_per_channel_do_not_warn(preset):
    assert made(preset, model_of()) == []


def test_modest_biases_and_none_do_not_warn():
    assert made("kv4", model_of(size=30.0)) == []
    assert made("kv4", model_of("llama")) == []
    assert made("kivi-4", model_of(), per_layer={0: "kv4"}) == [], "layer 0 has none"
    assert len(made("kivi-4", model_of(), per_layer={SPOILED: "kv4"})) == 1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"num_key_value_heads": 4, "hidden_size": 256, "rotary_pct": 1.0}),
        ("phi3", {}),
        ("qwen2", {}),
    ],
)
def test_fused_projections(family, changes):
    """Keys of one token are the model's own, so the slice of the biases is what its attention takes for keys."""
    model = model_of(family, **changes)
    for module in model.modules():
        if hasattr(module, "qkv_proj"):  # transformers makes it without a bias
            module.qkv_proj.bias = torch.nn.Parameter(torch.zeros(module.qkv_proj.out_features))
    put(model, 300.0)
    seen: list[torch.Tensor] = []
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    layer = cache.layers[SPOILED]
    update = layer.update
    layer.update = lambda k, v, *args, **options: (seen.append(k), update(k, v, *args, **options))[1]
    with torch.no_grad():
        model(torch.tensor([[5]]), **as_argument(cache))
    large = (seen[0].abs() > 100).nonzero()[:, 1].unique().tolist()  # position 0 is not rotated
    assert large == [seen[0].shape[1] - 1]
    (message,) = made("kv8", model)
    assert "in layer 1 (300 times)" in message
    assert spoiled_keys.has_key_biases(model)


def test_large_biases_of_queries_and_values_do_not_count():
    model = model_of("gpt_neox", num_key_value_heads=4, hidden_size=256, size=0.0)
    with torch.no_grad():
        parts = model.gpt_neox.layers[SPOILED].attention.query_key_value.bias.view(4, 3, 64)
        parts[:, 0] = parts[:, 2] = 300.0
    assert made("kv8", model) == []


def test_offloaded_biases_are_looked_at():
    from accelerate import cpu_offload

    model = cpu_offload(model_of(), torch.device("cpu"))
    assert model.model.layers[SPOILED].self_attn.k_proj.bias.is_meta
    assert len(made("kv8", model)) == 1


def test_biases_on_meta_are_looked_at_when_they_have_come():
    real = model_of()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(real.config), attn_implementation="lowbit_kv").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = lb.from_preset("kv8", model, **SMALL_PAGES)
    model.load_state_dict(real.state_dict(), assign=True)
    model.model.rotary_emb = real.model.rotary_emb
    with pytest.warns(UserWarning, match="layer 1 .300 times.") as seen, torch.no_grad():
        model(left_padded(1, 40)[0], **as_argument(cache))
    assert len(seen) == 1, [str(each.message) for each in seen]


def test_quantized_weights_count_by_the_usual_size_of_rows():
    model = model_of(size=0.7 * spoiled_keys.LARGE)
    projection = model.model.layers[SPOILED].self_attn.k_proj
    assert made("kv8", model) == []
    packed = model_of(size=0.7 * spoiled_keys.LARGE)
    projection = packed.model.layers[SPOILED].self_attn.k_proj
    projection.weight = torch.nn.Parameter(torch.zeros(7, 3, dtype=torch.uint8), requires_grad=False)
    (message,) = made("kv8", packed)
    assert f"layer 1 ({0.7 * spoiled_keys.LARGE / spoiled_keys.USUAL_ROW:.0f} times)" in message


def test_a_call_of_generate_warns():
    model = model_of()
    with pytest.warns(UserWarning, match="Take preset 'int8'"):
        lb.generate(model, torch.arange(3, 40)[None], "kv8", max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("family", "changes", "norms"),
    [
        ("llama", {}, False),
        ("qwen3", {}, True),
        ("phi3", {}, False),
        ("gpt_neox", {"num_key_value_heads": 4, "hidden_size": 256, "rotary_pct": 1.0}, False),
    ],
)
def test_uneven_channels_are_named(family, changes, norms):
    """In one RoPE pair of one KV head keys are 100 times as large as in others, and queries 100 times as small."""
    model = model_of(family, size=0.0, **changes)
    assert made("kivi-2-hadamard", model) == []
    model = model_of(family, size=0.0, **changes)
    (module,) = (each for index, _, each in spoiled_keys._attention_modules(model) if index == SPOILED)
    heads, dim = packed_sizes(model)[SPOILED][:2]
    pair = [dim // 2 - 1, dim - 1]
    with torch.no_grad():
        if norms:
            module.k_norm.weight[pair], module.q_norm.weight[pair] = 100.0, 0.01
        elif family == "gpt_neox":
            parts = module.query_key_value.weight.view(heads, -1, dim, module.query_key_value.in_features)
            parts[-1, -2, pair] *= 100.0
            parts[-1, :-2, pair] /= 100.0
        else:
            name = "k_proj" if hasattr(module, "k_proj") else "qkv_proj"
            weight = getattr(module, name).weight
            rows = spoiled_keys._of_keys(torch.arange(len(weight)), name, heads, dim)
            weight[rows[-1, pair]] *= 100.0
            queries = module.q_proj.weight if name == "k_proj" else weight[: -2 * heads * dim]
            queries.view(heads, -1, dim, queries.shape[-1])[-1, :, pair] /= 100.0
    (message,) = made("kivi-2-hadamard-sink", model)
    assert "has keys that key_transform='hadamard' spoils: in layer 1 (" in message
    assert "Take preset 'kivi-2-sink', without a rotation" in message
    assert made("kivi-2-sink", model) == []


class PackedWeight(torch.Tensor):
    """Weights whose numbers are packed: like those of torchao, they support few functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.linalg.vector_norm, torch.Tensor.float, torch.Tensor.square):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
@pytest.mark.parametrize("packed", [True, False])
def test_weights_that_cannot_be_looked_at_do_not_warn(name, packed):
    model = model_of("llama")
    module = getattr(model.model.layers[SPOILED].self_attn, name)
    weight = module.weight.detach()
    module.weight = torch.nn.Parameter(weight.as_subclass(PackedWeight) if packed else weight.to("meta"))
    assert made("kivi-2-hadamard", model) == made("kv4", model) == []
