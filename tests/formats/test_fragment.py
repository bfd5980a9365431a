"""Pages in the order in which tensor cores take them: the same numbers, and the words the layout's description names."""

import dataclasses

import pytest
import torch

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.formats import Affine, Boosted, Fp8, fragment, parse_format
from hf_lowbit_kv.storage.layer_spec import LayerSpec

#: 32 channels are a block; 80 channels are two and a half
HEAD_DIMS = [80, 128]


@pytest.mark.parametrize("layout", fragment.LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_layout_changes_no_number(bits, head_dim, layout):
    for page_size, axis, group in (
        (32, "channel", None),
        (64, "token", 32),
        (128, "channel", 32),
        (256, "token", None),
    ):
        if axis == "token" and group and head_dim % group:
            continue
        plain = Affine(bits, axis, group)
        fmt = plain.with_layout(layout)
        x = torch.randn(2, page_size, head_dim).half()
        assert fmt.page_bytes(head_dim, page_size, x.dtype) == plain.page_bytes(head_dim, page_size, x.dtype)
        decoded = [f.decode(f.encode(x), head_dim, page_size, x.dtype) for f in (fmt, plain)]
        assert torch.equal(*decoded)


@pytest.mark.parametrize("page_size", [32, 128])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("ratio", [0, 0.3, 1])
def test_layout_changes_no_boosted_number(ratio, head_dim, page_size):
    plain = Boosted(ratio, "variance")
    fmt = plain.with_layout("fragment-1")
    x = torch.randn(2, page_size, head_dim).half()
    decoded = [f.decode(f.encode(x), head_dim, page_size, x.dtype) for f in (fmt, plain)]
    assert torch.equal(*decoded)
    unused = fmt.columns(head_dim) - plain.boosted(head_dim)
    assert 0 <= unused < 16
    grown = fmt.code_bytes(head_dim, page_size, x.dtype) - plain.code_bytes(head_dim, page_size, x.dtype)
    assert grown == unused * page_size // 4


@pytest.mark.parametrize("layout", fragment.LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layout_changes_no_number_of_fp8(head_dim, layout):
    plain = Fp8()
    fmt = plain.with_layout(layout)
    for page_size in (32, 128):
        x = torch.randn(2, page_size, head_dim).half()
        x[0, 5] = float("inf")
        assert fmt.page_bytes(head_dim, page_size, x.dtype) == plain.page_bytes(head_dim, page_size, x.dtype)
        decoded = [f.decode(f.encode(x), head_dim, page_size, x.dtype).view(torch.int32) for f in (fmt, plain)]
        assert torch.equal(*decoded)
    centered = parse_format("fp8-centered")
    decoded = [
        f.decode(f.encode(x), head_dim, 128, x.dtype).view(torch.int32)
        for f in (centered.with_layout(layout), centered)
    ]
    assert torch.equal(*decoded)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8, "pairs"])
def test_words_are_operands(bits, transposed):
    """Field by field, from the description at the top of `fragment`."""
    bits, pairs = (8, True) if bits == "pairs" else (bits, False)
    head_dim, page_size, generator = 80, 64, torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (page_size, head_dim), dtype=torch.int32, generator=generator)
    words = fragment.pack(codes, bits, fragment.LAYOUTS[transposed], pairs)
    assert words.shape == fragment.shape(bits, head_dim, page_size)
    vector = words.shape[-1]
    for block, c, lane, h, i, e in [(0, 0, 0, 0, 0, 0), (1, 4, 31, 1, 3, 1), (0, 3, 13, 1, 2, 0), (1, 2, 22, 0, 1, 1)]:
        word, bit = {
            2: (0, 16 * e + 8 * (i & 1) + 2 * (i >> 1) + 4 * h),
            4: (h, 16 * e + 8 * (i & 1) + 4 * (i >> 1)),
            8: (2 * h + (i >> 1), 8 * e + 16 * (i & 1) if pairs else 16 * e + 8 * (i & 1)),
        }[bits]
        word += c * bits // 2
        row, column = lane // 4 + 8 * (i & 1), 2 * (lane % 4) + e + 8 * (i >> 1)
        token_at, channel_at = (column, row) if transposed else (row, column)
        (j, x), (jc, xc) = divmod(token_at, 8), divmod(channel_at, 8)
        token = 32 * block + 4 * x + 2 * h + j
        if c < head_dim // 32 * 2:
            channel = c // 2 * 32 + 8 * (xc >> 1) + 4 * (c & 1) + 2 * jc + (xc & 1)
        else:
            channel = head_dim // 32 * 32 + 4 * (xc >> 1) + 2 * jc + (xc & 1)
        found = int(words[block, word // vector, lane, word % vector]) >> bit & (2**bits - 1)
        assert found == int(codes[token, channel])


def test_names():
    fmt = parse_format("int4-channel-g32@fragment-1")
    assert fmt == Affine(4, "channel", 32, "fragment-1")
    assert parse_format(fmt.name) == fmt
    assert dataclasses.replace(fmt, bits=2).name == "int2-channel-g32@fragment-1"
    boosted = parse_format("boosted2-r0.25-random3@fragment-1")
    assert boosted == Boosted(0.25, "random", 3, layout="fragment-1")
    assert parse_format(boosted.name) == boosted
    assert parse_format("fp8@fragment-1t") == Fp8().with_layout("fragment-1t")
    for name in ("fp8-block", "fp8-static"):  # read only token by token
        assert parse_format(name).with_layout("fragment-1") == parse_format(name)
        with pytest.raises(ValueError, match=r"layout='fragment-1'.*allowed"):
            parse_format(f"{name}@fragment-1")
    for name in ("int4-channel", "boosted2-r0.25", "fp8"):
        with pytest.raises(ValueError, match=r"layout='fragment-9'.*allowed"):
            parse_format(f"{name}@fragment-9")


def test_backends_choose_the_layout():
    spec = LayerSpec(parse_format("int4-channel"), parse_format("dense"))
    kitty = choice.storage_spec(LayerSpec(parse_format("boosted2-r0.125"), parse_format("int2-token")), "cuda")
    assert [fmt.layout for fmt in kitty.formats] == [*fragment.LAYOUTS]
    stored = choice.storage_spec(spec, "cuda")
    assert stored.key_format.name == "int4-channel@fragment-1"
    assert stored.value_format == spec.value_format
    assert LayerSpec.parse(stored.key) == stored
    for backend in ("torch", "triton"):
        assert choice.storage_spec(stored, backend) == spec
