"""Formats against closed forms: what may a page's reconstruction differ by."""

import pytest
import torch

from hf_lowbit_kv.formats import Affine, Dense, parse_format

PAGE = 128
AXES_AND_GROUPS = [(axis, group) for axis in ("channel", "token") for group in (None, 32)]


def _roundtrip(fmt, x):
    return fmt.decode(fmt.encode(x), x.shape[-1], x.shape[-2], x.dtype)


def _extent(fmt, x):
    """Range (max - min) of each element's group, straight from the definition, element by element."""
    page, head_dim = x.shape[-2:]
    out = torch.empty_like(x, dtype=torch.float32)
    if fmt.axis == "channel":
        size = fmt.group_size or page
        for start in range(0, page, size):
            part = x[..., start : start + size, :].float()
            out[..., start : start + size, :] = part.amax(-2, keepdim=True) - part.amin(-2, keepdim=True)
    else:
        size = fmt.group_size or head_dim
        for start in range(0, head_dim, size):
            part = x[..., start : start + size].float()
            out[..., start : start + size] = part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)
    return out


@pytest.mark.parametrize("head_dim", [80, 128])  # one that groups do not divide
@pytest.mark.parametrize(("axis", "group"), AXES_AND_GROUPS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_is_at_most_half_a_step(bits, axis, group, head_dim):
    fmt = Affine(bits, axis, group)
    if axis == "token" and group and head_dim % group:
        with pytest.raises(ValueError, match=f"group_size={group}.*does not divide head_dim={head_dim}"):
            fmt.validate(head_dim, PAGE)
        return
    fmt.validate(head_dim, PAGE)
    x = torch.randn(2, 3, PAGE, head_dim) * torch.rand(head_dim) * 4
    error = (_roundtrip(fmt, x) - x).abs()
    extent = _extent(fmt, x)
    # half a step, plus what fp16 rounding of the scale (times all levels) and of the zero point may add
    assert (error <= extent / (2 * fmt.levels) + extent * 2**-11 + x.abs().amax() * 2**-11).all()


def test_every_code_is_used_and_packed_tightly():
    x = torch.arange(16, dtype=torch.float32).repeat(PAGE // 16)[:, None].expand(PAGE, 64)
    fmt = Affine(4, "channel")
    assert torch.equal(_roundtrip(fmt, x), x)
    assert fmt.page_bytes(64, PAGE, torch.float16) == PAGE * 64 // 2 + 2 * 64 * 2


#: from here on float16, in which zero points are stored, holds what bfloat16 does; below, multiples of 2^-24
EXACT = 2.0**-17


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("axis", "group"), AXES_AND_GROUPS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_constant_groups_are_exact(bits, axis, group, dtype):
    fmt = Affine(bits, axis, group)
    shape = (1, 256) if axis == "channel" else (PAGE, 1)
    x = torch.randn(shape)
    x = torch.where(x.abs() < EXACT, EXACT, x).to(dtype).expand(PAGE, 256)
    assert torch.equal(_roundtrip(fmt, x).to(dtype), x)
    tiny = (torch.rand(shape) * EXACT).to(dtype).expand(PAGE, 256)
    assert ((_roundtrip(fmt, tiny) - tiny.float()).abs() <= 2.0**-25).all()
    zeros = torch.zeros(PAGE, 256, dtype=dtype)
    assert torch.equal(_roundtrip(fmt, zeros).to(dtype), zeros)


@pytest.mark.parametrize(("axis", "group"), AXES_AND_GROUPS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_huge_outliers_stay_finite(bits, axis, group):
    x = torch.randn(PAGE, 256).to(torch.bfloat16)
    x[3, 5], x[7, 5], x[9, 200] = 3e38, -3e38, 1e6
    assert _roundtrip(Affine(bits, axis, group), x).isfinite().all()


def test_dense_keeps_every_bit():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, PAGE, 80).to(dtype)
        assert torch.equal(_roundtrip(Dense(), x).to(dtype), x)


@pytest.mark.parametrize("name", ["dense", "int2-channel", "int4-token", "int8-channel-g32", "int2-token-g128"])
def test_names_round_trip(name):
    assert parse_format(name).name == name
    assert parse_format(parse_format(name)) is parse_format(name)


def test_tokenwise_formats_encode_each_token_alone():
    for fmt in (Dense(), Affine(2, "token"), Affine(8, "token", 32)):
        assert fmt.tokenwise
        x = torch.randn(PAGE, 64)
        other = torch.randn(PAGE, 64)
        other[17] = x[17]
        views = [fmt.split(fmt.encode(page), 64, PAGE, torch.float32) for page in (x, other)]
        for name in views[0]:
            assert torch.equal(views[0][name][17], views[1][name][17])


def test_bits_per_value_counts_metadata():
    # 2 bits and two fp16 numbers per channel of 128 tokens; or per token of 64 channels
    assert Affine(2, "channel").bits_per_value(128) == 2 + 32 / 128
    assert Affine(2, "token").bits_per_value(64) == 2 + 32 / 64
    assert Affine(4, "token", 32).bits_per_value(128) == 4 + 32 / 32
    assert Dense().bits_per_value(128, dtype=torch.float16) == 16
