"""A format that exists only in tests, and the registries as they were before a test added to them."""

import re
from dataclasses import dataclass

import pytest
import torch

from hf_lowbit_kv import formats, presets
from hf_lowbit_kv.formats import registered as formats_registered
from hf_lowbit_kv.storage.layer_spec import LayerSpec


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
def registries(monkeypatch):
    """What is registered is forgotten afterwards."""
    monkeypatch.setattr(formats, "FORMATS", list(formats.FORMATS))
    monkeypatch.setattr(formats_registered, "TRITON_MODULES", {})
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))
    monkeypatch.setattr(presets, "_PLAIN", dict(presets._PLAIN))
    yield
    formats.forget_names()
    LayerSpec.parse.cache_clear()
