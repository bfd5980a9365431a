"""Vector quantization against closed forms: round trips, packing, and the nearest entry by brute force in float64."""

import pytest
import torch

from hf_lowbit_kv.formats import Codebook, parse_format
from hf_lowbit_kv.formats.codebook import BITS, DIMS, nearest, pack_stream, unpack_stream

PAGE = 64
LAYOUTS = Codebook.layouts


def _random(fmt: Codebook, head_dim: int, heads: int = 3, books: int = 3, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(2, heads, PAGE, head_dim, generator=gen)
    return x, torch.randn(books, fmt.size, fmt.dim, generator=gen).half()


@pytest.mark.parametrize("count", [16, 40])
@pytest.mark.parametrize("bits", BITS)
def test_every_width_unpacks_to_what_was_packed(bits, count):
    codes = torch.randint(0, 2**bits, (5, count * 4), generator=torch.Generator().manual_seed(bits))
    codes[0], codes[1] = 0, 2**bits - 1
    words = pack_stream(codes, bits)
    assert words.shape == (5, count * 4 * bits // 32)  # tight
    assert torch.equal(unpack_stream(words, bits), codes)
    # bit by bit, from the lowest on
    stream = "".join(f"{int(code):0{bits}b}"[::-1] for code in codes[2])
    assert [int(word) & 0xFFFFFFFF for word in words[2]] == [
        int(stream[at : at + 32][::-1], 2) for at in range(0, len(stream), 32)
    ]


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("bits", [3, 4, 7, 8, 12])
@pytest.mark.parametrize("dim", DIMS)
def test_pages_are_tight_and_every_layout_holds_the_same(dim, bits, head_dim):
    fmt = Codebook(dim, bits)
    assert fmt.page_bytes(head_dim, PAGE, torch.float16) == PAGE * head_dim // dim * bits // 8
    codes = torch.randint(0, fmt.size, (2, PAGE, head_dim // dim), generator=torch.Generator().manual_seed(0))
    for layout in LAYOUTS:
        stored = fmt.with_layout(layout)
        if layout != "planar-1" and not fmt.in_lanes(head_dim):
            with pytest.raises(ValueError, match=f"layout='{layout}'.*head_dim={head_dim}"):
                stored.validate(head_dim, PAGE)
            continue
        stored.validate(head_dim, PAGE)
        words = stored._pack(codes)
        (_, dtype, shape), *rest = stored.arrays(head_dim, PAGE, torch.float16)
        assert not rest
        assert (words.dtype, words.shape[1:]) == (dtype, shape)
        assert torch.equal(stored._unpack(words, head_dim), codes)


@pytest.mark.parametrize("books", [1, 3])
@pytest.mark.parametrize("dim", DIMS)
def test_one_entry_for_every_distinct_sub_vector_is_exact(dim, books):
    fmt = Codebook(dim, 8)
    codebook = _random(fmt, 64, books=books)[1]
    codebook[:, 1] = codebook[:, 0] * (1 + 2**-10)  # neighbours in float16
    codebook[:, 2] = 60000.0
    codebook[:, 3] = 60000.0
    codebook[:, 3, -1] = 2.0**-24
    codes = torch.randint(0, fmt.size, (2, 3, PAGE, 64 // dim), generator=torch.Generator().manual_seed(1))
    x = torch.stack([codebook[h % books][codes[:, h]] for h in range(3)], 1).flatten(-2).float()
    for layout in LAYOUTS:
        arrays = fmt.with_layout(layout).encode_arrays(x, (codebook,))
        assert torch.equal(fmt.with_layout(layout).decode_arrays(arrays, 64, (codebook,)), x)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("dim", "bits"), [(2, 3), (4, 8), (8, 10)])
def test_nearest_by_brute_force(dim, bits, outliers):
    fmt = Codebook(dim, bits)
    x, codebook = _random(fmt, 64, seed=2)
    if outliers:
        x[..., ::5] *= 3000.0
    vectors = x.unflatten(-1, (-1, dim))
    distance = (vectors.double().unsqueeze(-2) - codebook.double()[:, None, None]).square().sum(-1)
    found = nearest(vectors, codebook)
    least = distance.amin(-1)
    excess = distance.gather(-1, found[..., None])[..., 0] - least
    assert (excess <= least * (dim + 2) * 2.0**-23).all()  # what rounding to float32 may hide
    assert (found == distance.argmin(-1)).float().mean() > 0.999


def test_equal_distances_and_numbers_that_are_not_finite():
    codebook = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]]).half()
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.5], [-1.0, 0.1]])[None, None]
    assert nearest(x, codebook).flatten().tolist() == [0, 0, 0, 3]
    inf = float("inf")
    bad = torch.tensor([[float("nan"), 0.0], [inf, 0.0], [-inf, inf], [3e38, 0.0]])[None, None]
    assert nearest(bad, codebook).flatten().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["vq-d3b8", "vq-d4b13"])
def test_widths_that_are_not_offered(name):
    with pytest.raises(ValueError, match="not offered; allowed"):
        parse_format(name)
