"""Formats and presets that a user adds from outside."""

import dataclasses
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import left_padded, tiny_models
from sign_format import Sign, registries  # noqa: F401  (a fixture)

import hf_lowbit_kv as lb
from hf_lowbit_kv import formats, presets
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.storage.layer_spec import LayerSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-format.md"
KERNELS = SimpleNamespace(__name__="kernels", params=None, encode=None, decode=None)

pytestmark = pytest.mark.usefixtures("registries")


def test_the_example_of_the_page():
    """The page's code, unchanged; its preset writes what a cache of the same formats writes."""
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0], {})
    model = tiny_models("llama")[0]
    ids, _ = left_padded(1, 300)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    written = lb.generate(model, ids, preset="sign-keys", **options)
    cache = lb.LowBitCache(model, "sign", "int4-token", sink=32)
    assert torch.equal(written, model.generate(ids, past_key_values=cache, **options))
    assert "sign-keys" in lb.preset_names()
    assert lb.get_preset("sign-keys-hadamard").transform == "hadamard"
    x = torch.randn(2, 128, 64)
    decoded = lb.parse_format("sign").decode(lb.parse_format("sign").encode(x, torch.float16), 64, 128, torch.float16)
    mean = x.abs().mean(-1, keepdim=True).half().float()
    assert torch.equal(decoded, torch.where(x > 0, mean, -mean))


def test_a_taken_name_is_refused_and_nothing_is_registered():
    lb.register_format(Sign)
    before = list(formats.FORMATS)

    @dataclasses.dataclass(frozen=True, repr=False)
    class Other(Sign):
        pass

    for cls in (Sign, Other):
        with pytest.raises(ValueError, match="format name 'sign' is taken by the registered class Sign"):
            lb.register_format(cls)

    @dataclasses.dataclass(frozen=True, repr=False)
    class Dense(Sign):
        name = "int4-channel"

        @classmethod
        def parse(cls, name):
            return cls() if name == "int4-channel" else None

    with pytest.raises(ValueError, match="format name 'int4-channel' is taken by the registered class Affine"):
        lb.register_format(Dense)
    assert before == formats.FORMATS
    assert isinstance(lb.parse_format("int4-channel"), lb.Affine)


def _named(given: str, parse):
    @dataclasses.dataclass(frozen=True, repr=False)
    class Named(Sign):
        name = given

    Named.parse = classmethod(parse)
    return Named


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (_named("greedy", lambda cls, name: cls()), r"parse\('no such format'\) returned .*must return None"),
        (_named("deaf", lambda cls, name: None), r"parse\('deaf'\) returned None"),
        (_named("a|b", lambda cls, name: cls() if name == "a|b" else None), "may not hold '|'"),
    ],
    ids=["greedy", "deaf", "separator"],
)
def test_bad_classes_are_refused(cls, message):
    before = list(formats.FORMATS)
    with pytest.raises(ValueError, match=message):
        lb.register_format(cls)
    assert before == formats.FORMATS


def _changed(**members):
    @dataclasses.dataclass(frozen=True, repr=False)
    class Changed(Sign):
        name = "changed"

        @classmethod
        def parse(cls, name):
            return cls() if name == "changed" else None

    for name, member in members.items():
        setattr(Changed, name, member)
    return Changed


def _encoded(**arrays):
    """`encode_arrays` of `Sign` with other arrays; None: the array is missing."""

    def encode_arrays(self, x, parameters=()):
        every = Sign.encode_arrays(self, x) | {name: change and change(x) for name, change in arrays.items()}
        return {name: array for name, array in every.items() if array is not None}

    return encode_arrays


def _decoded(name):
    return lambda self, arrays, head_dim, parameters=(): arrays[name]


def _mean_of_all_pages(x):
    return x.mean((0, 2), keepdim=True)[..., :1].expand(len(x), 128, 1)


def _mean_of_the_page(x):
    return x.abs().mean((1, 2), keepdim=True).expand(-1, 128, 1)


WRONG = {
    "encode_arrays returned codes; arrays lists codes, scale": {"encode_arrays": _encoded(scale=None)},
    "encode_arrays returned codes, scale, more; arrays lists codes, scale": {"encode_arrays": _encoded(more=torch.abs)},
    "'scale' with the shape (2, 128); it must be (2, 128, 1)": {"encode_arrays": _encoded(scale=lambda x: x[..., 0])},
    "NaN or infinity": {"encode_arrays": _encoded(scale=lambda x: x[..., :1] * torch.inf)},
    "other bytes when another page": {"encode_arrays": _encoded(scale=_mean_of_all_pages)},
    "is tokenwise, but its array 'scale'": {"encode_arrays": _encoded(scale=_mean_of_the_page)},
    "the shape (2, 128, 1); it must be (2, 128, 64)": {"decode_arrays": _decoded("scale")},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_page_that_does_not_come_back_is_refused(message):
    before = list(formats.FORMATS)
    with pytest.raises(ValueError, match=f"format 'changed'.*{re.escape(message)}"):
        lb.register_format(_changed(**WRONG[message]))
    assert before == formats.FORMATS
    lb.register_format(_changed())


def test_kernels():
    pytest.importorskip("triton")
    from hf_lowbit_kv.triton_kernels import registry

    assert "format 'sign' has no Triton kernels" in registry.why_not([Sign()])
    lb.register_format(Sign, triton=KERNELS)
    assert registry.why_not([Sign()]) is None
    assert registry.kernels(Sign()) is KERNELS
    assert not registry.attends_packed(LayerSpec(Sign(), Sign()))


@pytest.mark.parametrize("kernels", [None, KERNELS], ids=["without", "with"])
def test_on_a_gpu(kernels, nvidia_gpu, monkeypatch):
    """Without kernels the reference serves, and a warning says why; an explicit backend is refused as ever."""
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "_WARNED", set())
    lb.register_format(Sign, triton=kernels)
    setup = choice.LayerSetup(nvidia_gpu, torch.float16, LayerSpec(Sign(), lb.parse_format("int4-token")))
    if kernels is not None:
        assert choice.choose_backend(None, setup) == "triton"
        return
    assert choice.choose_backend(None, setup) == "torch"
    reason = choice.why_slow_reference(None, "torch", setup)
    assert reason == "format 'sign' was registered without kernels"
    with pytest.warns(UserWarning, match="slow PyTorch reference: format 'sign' was registered without kernels"):
        choice.warn_of_reference(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice.warn_of_reference(choice.why_slow_reference(None, "torch", setup))
    assert "slow reference: format 'sign'" in choice.describe_backend(None, "torch", setup)
    with pytest.raises(ValueError, match="has no Triton kernels"):
        choice.choose_backend("triton", setup)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi-2", {}, "preset name 'kivi-2' is taken"),
        ("two words", {}, "name='two words' is not allowed"),
        *((name, {}, f"name='{name}' is not allowed; these names") for name in ("16-bit", "full", "all")),
        ("mine", {"sink": -1}, "sink=-1 is not allowed"),
    ],
)
def test_bad_presets_are_refused(name, options, message):
    before = dict(presets.PRESETS)
    with pytest.raises(ValueError, match=message):
        lb.register_preset(name, **({"key_format": "int4-channel", "value_format": "int4-token"} | options))
    assert before == presets.PRESETS
    assert "mine" not in presets._PLAIN


def test_a_preset_is_known_everywhere():
    preset = lb.register_preset("mine", "int8-channel", "int2-token", sink=16, residual=64)
    assert lb.get_preset("mine") == preset
    assert lb.get_preset("mine-hadamard").spec().sink == 16
    with pytest.raises(ValueError, match="preset name 'mine' is taken"):
        lb.register_preset("mine", "dense", "dense")
    cache = lb.from_preset("mine", tiny_models("llama")[0])
    assert (cache.spec.sink, cache.spec.residual, str(cache.spec.value_format)) == (16, 64, "int2-token")
    assert "hf_lowbit_kv" in sys.modules
