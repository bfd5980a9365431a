"""A format that exists here alone, to show what adding one takes: a class, and a line in the registry."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from cases import left_padded, tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv import backend, formats


@dataclass(frozen=True, repr=False)
class Sign(formats.Format):
    """One bit a value: its sign, times the mean magnitude of its token."""

    @property
    def name(self) -> str:
        return "sign"

    @classmethod
    def parse(cls, name: str):
        return cls() if re.fullmatch("sign", name) else None

    @property
    def tokenwise(self) -> bool:
        return True

    def arrays(self, head_dim, page_size, dtype):
        return [("codes", torch.uint8, (page_size, head_dim // 8)), ("scale", torch.float16, (page_size, 1))]

    def encode_arrays(self, x, parameters=()):
        bits = (x > 0).unflatten(-1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
        return {"codes": bits.sum(-1, dtype=torch.uint8), "scale": x.float().abs().mean(-1, keepdim=True).half()}

    def decode_arrays(self, arrays, head_dim, parameters=()):
        bits = (arrays["codes"].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return (bits.flatten(-2).float() * 2 - 1) * arrays["scale"].float()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS, Sign])
    formats._parse.cache_clear()
    yield
    formats._parse.cache_clear()


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with")
@pytest.mark.parametrize("options", [{}, {"residual": 0}, {"max_cache_len": 200}, {"num_beams": 2}], ids=str)
def test_a_new_format_generates(registered, options):
    """Attending to its pages gives the tokens that the host's attention gives over the same pages, unpacked."""
    models = tiny_models("llama")
    ids, _ = left_padded(1, 100)
    generate = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options = {"page_size": 32, "residual": 32, **options}
    generate["num_beams"] = options.pop("num_beams", 1)
    caches = [lb.LowBitCache(model, "sign", "dense", **options) for model in models]
    packed, unpacked = (
        model.generate(ids, past_key_values=cache, **generate) for model, cache in zip(models, caches, strict=True)
    )
    assert torch.equal(packed, unpacked)
    cache = caches[0]
    assert cache.nbytes.codes > 0
    assert cache.spec.key_format.bits_per_value(64, 32) == 1 + 16 / 64


def test_a_format_without_kernels_is_refused_where_kernels_are_asked_for(registered):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"format 'sign' has no Triton kernels.*Use backend='torch'"):
        backend.choose_backend("triton", torch.device("cuda"), torch.float16, [Sign()])
