"""Packed bytes of every preset, and of formats that no preset has twice, in both layouts, are what they were:
`golden_bytes.json` holds their hashes."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.presets import PAPER_PRESETS
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs

GOLDEN = json.loads((Path(__file__).parent / "golden_bytes.json").read_text())
HEADS, TOKENS = 2, 420


def numbers(tokens: int, head_dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """`[1, HEADS, tokens, head_dim]` from integers only, so that no library's generator is part of the hashes: channels of
    different sizes, a few outliers, and a token of zeros."""
    index = torch.arange(HEADS * tokens * head_dim, dtype=torch.int64) + seed * 1_000_003
    mixed = (index * 2_654_435_761) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) % 2**32
    x = (mixed.double() / 2**31 - 1).view(1, HEADS, tokens, head_dim)
    x = x * (1 + torch.arange(head_dim) % 7) + (torch.arange(head_dim) % 5 - 2)
    x[..., ::50, 3], x[..., 11, :] = 300.0, 0.0
    return x.to(dtype)


def spec_of(name: str) -> lb.LayerSpec:
    """Of a preset, or of two formats `keys/values`."""
    return lb.LayerSpec(*map(lb.parse_format, name.split("/"))) if "/" in name else lb.get_preset(name).spec()


def digest(preset: str, layout: str, head_dim: int, dtype: torch.dtype) -> str:
    """Of all pages of a layer that a prompt and single tokens were stored in."""
    spec = choice.storage_spec(spec_of(preset), layout)
    parameters = spec.parameters(head_dim, head_dim, HEADS)
    given = {
        name: (numbers(shape[1], 64, 3, kind)[0, :, :, : shape[2]] / 4).contiguous() for name, shape, kind in parameters
    }
    records = spec.records(given, (head_dim, head_dim), HEADS, slice(0, HEADS), torch.device("cpu"))
    store = PagedStore(spec, 1, HEADS, head_dim, head_dim, dtype, "cpu", capacity=TOKENS, parameters=records)
    k, v = (numbers(TOKENS, head_dim, seed, dtype) for seed in (1, 2))
    start = 0
    for stop in (37, 400, *range(401, TOKENS + 1)):
        reference.OPERATIONS.append(StepInputs(None, k[:, :, start:stop], v[:, :, start:stop]), store)
        start = stop
    pages = store.state.pool[0][store.state.page_table[0].long()]
    return hashlib.sha256(pages.numpy().tobytes()).hexdigest()[:16]


def defined(preset: str) -> bool:
    """Whether its bytes are defined to the last bit: a full matrix is multiplied as the device does."""
    return not any(parameter.name.endswith(".matrix") for parameter in spec_of(preset).parameters(64, 64, 1))


NAMES = [name for name in (*lb.preset_names(), *PAPER_PRESETS, "fp8/fp8", "vq-d4b8/vq-d4b8") if defined(name)]


def cases() -> list[tuple[str, str, int, str]]:
    sizes = ((128, "float16"), (64, "bfloat16"), (96, "float16"))
    presets = ((name, layout) for name in NAMES for layout in ("torch", "cuda"))
    return [(*preset, *size) for preset in presets for size in sizes if fits(*preset, size[0])]


def fits(preset: str, layout: str, head_dim: int) -> bool:
    """Whether the layout takes heads of that size."""
    try:
        choice.storage_spec(spec_of(preset), layout).validate(head_dim, head_dim)
    except ValueError:
        return False
    return True


#: they have codebooks of 4096 entries
SLOW = ("vecinfer-3", "vecinfer-1.5")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_packed_bytes_are_what_they_were(name):
    for preset, layout, head_dim, dtype in cases():
        if preset == name:
            key = f"{preset} {layout} {head_dim} {dtype}"
            assert digest(preset, layout, head_dim, getattr(torch, dtype)) == GOLDEN[key], key


def test_every_hash_is_compared():
    assert {f"{a} {b} {c} {d}" for a, b, c, d in cases()} >= set(GOLDEN)
