"""What somebody gets wrong in the first hour: each error is a sentence that names the value and what to do."""

import inspect
import shlex
from typing import get_args

import pytest
import torch
import transformers

import hf_lowbit_kv as lb
from hf_lowbit_kv import byte_sizes
from hf_lowbit_kv.backends.choice import BACKENDS
from hf_lowbit_kv.cache import cache_options
from hf_lowbit_kv.cache.preset_cache import PARAMETERS
from hf_lowbit_kv.presets import PRESETS, PresetName

IDS = torch.arange(10)[None]
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16, "intermediate_size": 16}


@pytest.mark.parametrize(
    "make",
    [
        lambda model: lb.from_preset("kivi-2", model, residuals=64),
        lambda model: lb.KIVICache(model, residuals=64),
        lambda model: lb.generate_many(model, [[1, 2]], max_new_tokens=2, cache_options={"residuals": 64}),
        lambda model: lb.enable(model, residuals=64),
    ],
)
def test_an_option_that_does_not_exist(model, make):
    with pytest.raises(TypeError, match=r"^'residuals' is not an option of a cache; did you mean 'residual'\?$"):
        make(model)


@pytest.mark.parametrize("name", ["KIVI-4-SINK", "Kivi-4-Sink"])
def test_a_preset_in_other_letters(name):
    with pytest.raises(ValueError, match="did you mean 'kivi-4-sink'\\? allowed"):
        lb.get_preset(name)


def test_sizes():
    assert byte_sizes.parse_size("24G") == byte_sizes.parse_size("24 gb") == 24 * 10**9
    assert byte_sizes.parse_size("24Gi") == byte_sizes.parse_size("24GiB") == 24 * 2**30
    assert byte_sizes.parse_size("1e9") == byte_sizes.parse_size("1000000000") == 10**9
    with pytest.raises(ValueError, match="memory='24' is not understood: it needs a unit"):
        byte_sizes.parse_size("24", "memory")
    with pytest.raises(ValueError, match="it needs a unit"):
        lb.fits("Qwen/Qwen3-8B", 8192, memory=24)


@pytest.mark.host
@pytest.mark.parametrize("call", ["enable", "generate", "generate_many", "Chat"])
def test_a_model_without_a_head(model, call):
    calls = {
        "enable": lb.enable,
        "generate": lambda body: lb.generate(body, IDS, max_new_tokens=2),
        "generate_many": lambda body: lb.generate_many(body, [[1, 2]], max_new_tokens=2),
        "Chat": lambda body: lb.Chat(body, None),
    }
    bert = transformers.BertModel(transformers.BertConfig(**SIZES))
    for body, name in ((model.model, "LlamaModel"), (bert, "BertModel")):
        with pytest.raises(
            TypeError, match=f"model is a {name}, which has no language-model head .*AutoModelForCausalLM"
        ):
            calls[call](body)


@pytest.mark.host
def test_an_encoder_with_a_head_keeps_no_cache():
    """BERT is a decoder only if its configuration sets the flag; GPT-NeoX is one in any case."""
    with pytest.raises(ValueError, match="with is_decoder=False attends in both directions"):
        lb.from_preset("kivi-2", transformers.BertConfig(**SIZES))
    lb.from_preset("kivi-2", transformers.BertConfig(**SIZES, is_decoder=True))
    assert not transformers.GPTNeoXConfig(**SIZES).is_decoder
    lb.from_preset("kivi-2", transformers.GPTNeoXConfig(**SIZES))


def test_commands_in_messages_can_be_pasted(tmp_path):
    name = "my model; echo $HOME"
    config = transformers.LlamaConfig(**SIZES, name_or_path=name)
    with pytest.raises(ValueError, match="hf-lowbit-kv calibrate") as error:
        lb.from_preset("eigen-2", config)
    command = str(error.value)
    command = command[command.index("hf-lowbit-kv calibrate") :].split(", then")[0]
    assert name in shlex.split(command)


# ---- arguments as transformers spells them: `residual_length` and `nbits` -------------------------------------------


def _kv8(model, **options):
    return lb.from_preset("kv8", model, **options)


@pytest.mark.parametrize(
    "make", [lb.LowBitCache, lb.KIVICache, lb.KittyCache, lb.IntCache, _kv8], ids=lambda f: f.__name__
)
def test_residual_length(make, model):
    assert make(model).spec.residual == 128
    assert make(model, residual_length=64).spec == make(model, residual=64).spec
    assert make(model, residual_length=0).spec.residual == 0
    with pytest.raises(ValueError, match="residual=0 and residual_length=64 are both given"):
        make(model, residual=0, residual_length=64)
    with pytest.raises(ValueError, match="residual=-1 is not allowed"):
        make(model, residual_length=-1)


@pytest.mark.parametrize(
    ("make", "default"), [(lb.KIVICache, 4), (lb.IntCache, 8), (_kv8, 8)], ids=["kivi", "int", "kv8"]
)
def test_nbits(make, default, model):
    bits = lambda cache: (cache.spec.key_format.bits, cache.spec.value_format.bits)  # noqa: E731
    assert bits(make(model)) == (default, default)
    assert bits(make(model, nbits=2)) == (2, 2)
    assert bits(make(model, nbits=2, bits_k=4)) == (4, 2)
    assert bits(make(model, nbits=2, bits_v=4)) == (2, 4)
    if make is not _kv8:
        assert bits(make(model, bits=2, bits_v=4)) == (2, 4)
        with pytest.raises(ValueError, match="bits=4 and nbits=2 are both given"):
            make(model, bits=4, nbits=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda model, **options: lb.from_preset("kivi-2-hadamard-sink", model, **options),
        *(lb.KIVICache, lb.KittyCache, lb.IntCache),
    ],
    ids=["from_preset", "kivi", "kitty", "int"],
)
def test_none_is_the_value_of_the_preset(make, model):
    names = ("sink", "residual", "residual_length", "transform", "value_transform", "key_format", "value_format")
    parameters = ("nbits", "bits_k", "bits_v", "group_size", "boost", "score")
    assert make(model, **dict.fromkeys(names + parameters)).spec == make(model).spec


def test_none_in_cache_options(model):
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "progress": False}
    kept = lb.generate(model, IDS, "kivi-4-sink", cache_options={"sink": None}, **options).past_key_values
    assert kept.spec == lb.get_preset("kivi-4-sink").spec()


def test_classes_of_methods_take_what_from_preset_takes(model):
    """A parameter that only one of both formats has changes that one."""
    assert lb.KittyCache(model, group_size=32).spec == lb.from_preset("kitty", model, group_size=32).spec
    assert lb.KittyCache(model, group_size=32).spec.value_format.name == "int2-token-g32"
    with pytest.raises(ValueError, match=r"boost=0.5 is not allowed: key_format 'int4-channel' .* allowed: bits_k, gr"):
        lb.KIVICache(model, boost=0.5)


# ---- what editors see -------------------------------------------------------------------------------------------------


def test_names_that_editors_offer():
    assert list(get_args(PresetName)) == [name for name in PRESETS if name in get_args(PresetName)]
    assert set(get_args(cache_options.BackendName)) == set(BACKENDS)


def test_typed_options_are_those_of_the_signature():
    """`from_preset` takes what `LowBitCache` takes, and the parameters of formats. What a preset decides is not offered."""
    parameters = set(inspect.signature(lb.LowBitCache).parameters) - {
        "model_or_config",
        "preset",
        "attention_kind",
        "unknown",
    }
    of_formats = {name for side in PARAMETERS.values() for name in side} | {"nbits"}
    assert cache_options.PresetCacheOptions.__optional_keys__ == parameters | of_formats
