"""FP8 keys with a center for each channel of a page: against the definition, and beside plain FP8 on biased keys."""

import pytest
import torch

from hf_lowbit_kv.formats import Fp8, parse_format

CENTERED = parse_format("fp8-centered")
PAGE, DIM = 128, 64


def biased(dtype: torch.dtype, bias: float = 300.0) -> torch.Tensor:
    """A page `[PAGE, DIM]` of random keys; two channels have a large constant part."""
    x = torch.randn(PAGE, DIM, generator=torch.Generator().manual_seed(0))
    x[:, 5] += bias
    x[:, 6] -= bias / 2
    return x.to(dtype)


def through(fmt, x: torch.Tensor) -> torch.Tensor:
    return fmt.decode(fmt.encode(x), DIM, PAGE, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_page_is_its_center_and_the_rest_in_fp8(dtype):
    x = biased(dtype)
    arrays = CENTERED.split(CENTERED.encode(x), DIM, PAGE, dtype)
    middle = ((x.double().amin(0) + x.double().amax(0)) / 2).half()
    assert torch.equal(arrays["center"], middle)
    rest = x.double() - middle.double()
    scale = rest.abs().amax(-1, keepdim=True) / 448
    assert torch.allclose(arrays["scale"].double(), scale, rtol=1e-6)
    # e4m3 keeps four bits: half a unit of the last is 1 / 16 of a number, and 2^-10 of the scale near 0
    error = (through(CENTERED, x).double() - x.double()).abs()
    assert (error <= rest.abs() / 16 * (1 + 1e-5) + scale * 2**-10).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_costs_nothing(dtype):
    """Errors of products with queries, beside those of plain FP8 and of the same keys without a bias."""
    q = torch.randn(50, DIM, generator=torch.Generator().manual_seed(1)).double()
    x, without = biased(dtype), biased(dtype, bias=0.0)

    def error(fmt, keys: torch.Tensor) -> float:
        scores = q @ (through(fmt, keys).double() - keys.double()).T
        return float((scores - scores.mean(-1, keepdim=True)).square().mean().sqrt())

    assert error(CENTERED, x) < 1.1 * error(Fp8(), without)
    assert error(Fp8(), x) > 4 * error(CENTERED, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_with_nan_or_inf_leaves_the_others_alone(bad):
    x = biased(torch.bfloat16)
    clean = through(CENTERED, x)
    x[7, 3] = x[9, 5] = bad
    found, rest = through(CENTERED, x), [i for i in range(PAGE) if i not in (7, 9)]
    assert found[[7, 9]].isnan().all()
    others = [c for c in range(DIM) if c not in (3, 5)]  # there the range may have ended at these tokens
    assert torch.equal(found[rest][:, others], clean[rest][:, others])
    assert found[rest].isfinite().all()
    x[:, 3] = bad  # nothing else in a channel
    assert CENTERED.split(CENTERED.encode(x), DIM, PAGE, x.dtype)["center"][3] == 0


def test_huge_and_tiny_keys():
    """A center beyond fp16 saturates, and the rest goes into the codes; a center of tiny numbers is 0."""
    x = biased(torch.bfloat16)
    for size in (2.0**100, 2.0**-40):
        found = through(CENTERED, (x.double() * size).bfloat16()) / size
        assert found.isfinite().all()
        assert (found - x).norm() < 0.05 * x.norm()


def test_sizes_and_where_it_serves():
    assert CENTERED.bits_per_value(128) == 8 + 32 / 128 + 16 / 128
    assert not CENTERED.tokenwise
    assert not CENTERED.stores_latents
    assert CENTERED.with_layout("fragment-1").name == "fp8-centered@fragment-1"
    assert CENTERED.with_layout("fragment-1t") == CENTERED
    with pytest.raises(ValueError, match=r"layout='fragment-1t' is not known; allowed"):
        parse_format("fp8-centered@fragment-1t")
    with pytest.raises(ValueError, match=r"granularity='row' is not known; allowed: .*'token', 'block', 'static'"):
        Fp8("row")
