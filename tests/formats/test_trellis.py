"""Values on the path of a trellis: levels and chains against the definition, the search against all paths."""

import itertools

import pytest
import torch

from hf_lowbit_kv.formats import fragment, parse_format
from hf_lowbit_kv.formats.static import STEP, Static
from hf_lowbit_kv.formats.trellis import Trellis, levels, path_codes

PAGE = 128


def level_of(codes: list[int], t: int) -> int:
    """4 q + 2 (u_t ^ u_(t-1) ^ u_(t-3)) + u_(t-2)."""
    path = [0, 0, 0, *(code & 1 for code in codes)]
    now = t + 3
    return 4 * (codes[t] >> 1) + 2 * (path[now] ^ path[now - 1] ^ path[now - 3]) + path[now - 2]


def gaussian(head_dim: int, pages: int = 8) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Pages of one KV head, and parameters that suit them."""
    x = torch.randn(pages, 1, PAGE, head_dim, generator=torch.Generator().manual_seed(3))
    return x, (torch.zeros(1, head_dim), torch.full((1, head_dim), STEP[2]))


def round_trip(fmt, x, parameters) -> torch.Tensor:
    arrays = fmt.encode_arrays(x, parameters)
    return fmt.decode_arrays(arrays, x.shape[-1], parameters)


def test_levels():
    codes = torch.randint(4, (20, 13))
    expected = [[level_of(row, t) for t in range(13)] for row in codes.tolist()]
    assert levels(codes).tolist() == expected


def test_the_path_is_the_best_of_all():
    x = 2 * torch.randn(40, 5)
    paths = [[level_of(codes, t) for t in range(5)] for codes in itertools.product(range(4), repeat=5)]
    distances = (x[:, None] - (torch.tensor(paths) - 3.5)).square().sum(-1)
    searched = (levels(path_codes(x)) - 3.5 - x).square().sum(-1)
    assert torch.allclose(searched, distances.amin(1), rtol=1e-5)


def test_far_numbers_stay_finite():
    x, parameters = gaussian(64, pages=1)
    x[..., 5, 7], x[..., 90, 0] = 6e4, -1e30
    assert round_trip(parse_format("trellis-2"), x, parameters).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_chains_follow_a_lanes_words(head_dim):
    """Stored words are decoded word after word: one field at a time, or two fields in turn at 64 channels."""
    fmt, (x, parameters) = Trellis(), gaussian(head_dim, pages=1)
    arrays = fmt.encode_arrays(x, parameters)
    stored = arrays["codes"][0, 0].long()  # [blocks, words / V, lanes, V]
    fields = (stored.permute(2, 0, 1, 3).flatten(1)[..., None] >> 2 * torch.arange(16)) & 3  # [lanes, words, 16]
    together = 2 if head_dim == 64 else 1
    chains = fields.unflatten(-1, (-1, together)).permute(0, 2, 1, 3).flatten(-2)
    of_chains = [[level_of(row, t) for t in range(len(row))] for row in chains.flatten(0, 1).tolist()]
    of_fields = torch.tensor(of_chains).view(chains.shape).unflatten(-1, (-1, together)).permute(0, 2, 1, 3).flatten(-2)

    def placed(bits: torch.Tensor) -> torch.Tensor:
        """Two bits of each level, where the layout has the field: `[page, head_dim]`."""
        words = (bits << 2 * torch.arange(16)).sum(-1).unflatten(1, stored.shape[:2] + stored.shape[3:])
        return fragment.unpack(words.permute(1, 2, 0, 3), 2, "fragment-1t", head_dim)

    expected = placed(of_fields & 3) + 4 * placed(of_fields >> 2)
    scale = torch.stack([arrays["scale"] & 15, arrays["scale"] >> 4], -1).flatten().double() - 8
    decoded = fmt.decode_arrays(arrays, head_dim, parameters)[0, 0].double()
    units = decoded / (STEP[2] * fmt.gain(head_dim).double() * 2 ** (scale / 4)[:, None]) + 3.5
    assert torch.allclose(units, expected.double(), atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_less_error_than_codes_alone(head_dim):
    x, parameters = gaussian(head_dim, pages=40)
    lost = [
        float((round_trip(parse_format(name), x, parameters) - x).square().mean())
        for name in ("trellis-2", "static-2-tn")
    ]
    assert lost[0] < 0.102  # 0.098 and what 16 scales of tokens cost
    assert lost[1] > 0.119


def test_bytes_are_those_of_codes_alone():
    for head_dim in (64, 128):
        assert parse_format("trellis-2").bits_per_value(head_dim) == parse_format("static-2-tn").bits_per_value(
            head_dim
        )


def test_names():
    assert parse_format("trellis-2") == Trellis()
    assert Trellis().name == "trellis-2"
    assert Trellis().with_layout("planar-1") == Trellis()
    assert Trellis().calibrated == Static("2", True)
    with pytest.raises(ValueError, match="are not allowed"):
        Trellis(token_scale=False)
