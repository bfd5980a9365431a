"""Kernels of fused pieces (`triton_kernels/fused_*.py`) against float64 formulas: the error is at most twice that of PyTorch's
own operations in the model's dtype, plus a rounding.

Without a GPU the small cases run in Triton's interpreter, in processes of their own (`test_interpreted`).
"""

import kernel_checks as kernels
import pytest
import torch
import torch.nn.functional as F

from hf_lowbit_kv.triton_kernels import common
from hf_lowbit_kv.triton_kernels.fused_kernels import ACTIVATIONS, gated, rms_norm, rotary
from hf_lowbit_kv.triton_kernels.fused_products import gated_product, products

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIXTEEN = DTYPES[:2]
PYTORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(kernels.DEVICE, dtype)


def check(out, plain, exact):
    """`out` beside `plain`, PyTorch's result in the same dtype, and the float64 truth."""
    assert out.dtype == plain.dtype
    assert out.shape == plain.shape
    bound = 2 * (plain.double() - exact).abs().amax() + torch.finfo(out.dtype).eps * exact.abs().amax()
    assert (out.double() - exact).abs().amax() <= bound


def check_norm(dtype, width, rows, offset, eps=1e-5, size=1.0):
    x, weight = size * draw(*rows, width, dtype=dtype), draw(width, dtype=dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    half = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    plain = (half * (offset + weight.float())).to(dtype) if offset else weight * half.to(dtype)
    check(rms_norm(x, weight, eps, offset), plain, exact)


@kernels.needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_small_norm(dtype, offset):
    check_norm(dtype, 96, (2, 1), offset)
    check_norm(dtype, 64, (3, 2, 1), offset, size=1e-3)  # eps decides


@kernels.needs_interpreter
def test_small_norm_of_a_view_and_of_another_dtype():
    x, weight = draw(2, 4, 3, 64, dtype=torch.bfloat16), draw(64)
    out = rms_norm(x.transpose(1, 2), weight, 1e-6)
    want = F.rms_norm(x.double(), (64,), weight.double(), 1e-6).transpose(1, 2)
    assert out.is_contiguous()
    assert (out.double() - want).abs().amax() <= 2**-8 * want.abs().amax()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 128, 2048, 4096, 5120, 16384])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gpu_norm(dtype, width, offset):
    for rows in ((1, 1), (8, 1, 8), (17, 1)):
        check_norm(dtype, width, rows, offset)


def rotated(x, cos, sin, shared):
    """The definition: channels in two halves; those after them are copied."""
    half = cos.shape[-1] if shared else cos.shape[-1] // 2
    if shared:
        cos, sin = (torch.cat([y, y], dim=-1) for y in (cos, sin))
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    other = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    return torch.cat([turned * cos + other * sin, rest], dim=-1)


def check_rotary(dtype, width, turned, shared, batch, heads=(4, 2), tokens=1, rows_differ=True, joined=False):
    if joined:  # as slices of one product
        whole = draw(batch, tokens, sum(heads) * width, dtype=dtype)
        parts = whole.split([heads[0] * width, heads[1] * width], dim=-1)
        q, k = (x.view(batch, tokens, -1, width).transpose(1, 2) for x in parts)
    else:
        q, k = (draw(batch, tokens, n, width, dtype=dtype).transpose(1, 2) for n in heads)
    angle = torch.rand(batch if rows_differ else 1, tokens, turned // 2) * 6
    angle = angle if shared else torch.cat([angle, angle], dim=-1)
    cos, sin = (x.to(kernels.DEVICE, dtype) for x in (angle.cos(), angle.sin()))
    for x, out in zip((q, k), rotary(q, k, cos, sin, shared), strict=True):
        exact = rotated(*(y.double() for y in (x, cos, sin)), shared)
        check(out, rotated(x, cos, sin, shared), exact)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@kernels.needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_small_rotary(dtype, joined):
    check_rotary(dtype, 64, 64, False, 2, joined=joined)
    check_rotary(dtype, 64, 64, True, 2, joined=joined)
    check_rotary(dtype, 96, 24, False, 3, tokens=2, rows_differ=False, joined=joined)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "turned"), [(64, 64), (80, 80), (128, 128), (128, 32), (96, 24), (256, 256)])
def test_gpu_rotary(dtype, width, turned):
    for batch, joined in ((1, False), (8, True), (17, False)):
        check_rotary(dtype, width, turned, False, batch, (32, 8), joined=joined)
        check_rotary(dtype, width, turned, True, batch, (5, 5), tokens=3, rows_differ=False, joined=joined)


def check_gate(dtype, width, rows, activation, joined):
    both = draw(*rows, 2 * width, dtype=dtype) * 3
    gate, up = both.chunk(2, dim=-1) if joined else (x.contiguous() for x in both.chunk(2, dim=-1))
    act = PYTORCH[activation]
    check(gated(gate, up, activation), act(gate) * up, act(gate.double()) * up.double())


@kernels.needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_gate(dtype, activation):
    check_gate(dtype, 50, (2, 1), activation, joined=False)
    check_gate(dtype, 1030, (3, 1), activation, joined=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_gate(dtype, activation):
    for width, rows in ((14336, (1, 1)), (14336, (8, 1)), (2730, (17, 1)), (1, (2, 1))):
        for joined in (False, True):
            check_gate(dtype, width, rows, activation, joined)


def check_products(dtype, inputs, outputs, rows, biased, heavy=False):
    x = draw(rows, 1, inputs, dtype=dtype)
    weights = [draw(n, inputs, dtype=dtype) / inputs**0.5 for n in outputs]
    biases = [draw(n, dtype=dtype) for n in outputs] if biased else None
    if heavy:
        x[..., -1] = 100.0
    found = products(x, weights, biases)
    assert len(found) == len(weights)
    for i, (out, weight) in enumerate(zip(found, weights, strict=True)):
        bias = biases[i] if biases else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        check(out, F.linear(x, weight, bias), exact)
        assert out.is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(found, products(x, weights, biases), strict=True))


def check_gated_product(dtype, inputs, width, rows, activation, biased):
    x = draw(rows, 1, inputs, dtype=dtype)
    weights = tuple(2 * draw(width, inputs, dtype=dtype) / inputs**0.5 for _ in "gu")
    biases = [draw(width, dtype=dtype) for _ in "gu"] if biased else [None, None]
    act = PYTORCH[activation]
    plain = act(F.linear(x, weights[0], biases[0])) * F.linear(x, weights[1], biases[1])
    gate, up = (
        F.linear(x.double(), w.double(), None if b is None else b.double())
        for w, b in zip(weights, biases, strict=True)
    )
    out = gated_product(x, weights, activation, biases if biased else None)
    check(out, plain, act(gate) * up)


def _biased_rows(*rows: int) -> list:
    """With a bias in one dtype and without in the other; the rest is slow."""
    return [
        *((biased, n, dtype) for n in rows for biased, dtype in ((True, torch.float16), (False, torch.bfloat16))),
        *(
            pytest.param(biased, n, dtype, marks=pytest.mark.slow)
            for n in rows
            for biased, dtype in ((True, torch.bfloat16), (False, torch.float16))
        ),
    ]


@kernels.needs_interpreter
@pytest.mark.parametrize(("biased", "rows", "dtype"), _biased_rows(1, 3, 16), ids=str)
def test_small_products(dtype, rows, biased):
    check_products(dtype, 600, (40, 17, 1), rows, biased)
    check_products(dtype, 512, (32, 16), rows, biased, heavy=True)


@kernels.needs_interpreter
@pytest.mark.parametrize(("biased", "rows", "dtype"), _biased_rows(1, 3), ids=str)
def test_small_gated_product(dtype, rows, biased):
    for activation in ACTIVATIONS:
        check_gated_product(dtype, 600, 40, rows, activation, biased)
    check_gated_product(dtype, 512, 17, rows, "silu", biased)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_gpu_products(dtype, biased):
    for rows in (1, 2, 8, 16):
        check_products(dtype, 4096, (4096, 1024, 1024), rows, biased, heavy=rows == 2)
        check_products(dtype, 2880, (4096, 512), rows, biased)
        check_products(dtype, 1000, (40, 17, 1), rows, biased)
        check_gated_product(dtype, 4096, 14336, rows, "silu", biased)
        check_gated_product(dtype, 3072, 257, rows, "gelu_tanh", biased)


@kernels.needs_interpreter
def test_small_launches():
    """One each."""
    before = dict(common.launches)
    x, weight = draw(2, 1, 64, dtype=torch.float16), draw(32, 64, dtype=torch.float16)
    products(x, [weight] * 3)
    gated_product(x, (weight, weight), "silu")
    rms_norm(x, weight[0], 1e-6)
    names = ("products_kernel", "gated_product_kernel", "rms_norm_kernel")
    assert [common.launches[name] - before.get(name, 0) for name in names] == [1, 1, 1]
