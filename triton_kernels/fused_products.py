"""Products of one input of few rows with two or three weights in one launch, without a copy of the weights.

A decode step multiplies one to sixteen rows, so reading the weights takes all the time. Libraries launch a kernel for
each weight, and small weights (of keys and values) do not fill a GPU. Sums are kept in float32 and added in a fixed
order, so results repeat to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common import cdiv, dot_type, launch
from .fused_kernels import ACTIVATIONS, activated

#: largest number of input rows: the fewest rows that tensor cores multiply
MAX_ROWS = 16


class Tiles(NamedTuple):
    """The tiling of a launch: outputs and inputs of a tile, warps, tiles in flight."""

    outputs: int
    inputs: int
    warps: int
    stages: int


#: tiles for one row, and for several: the fastest of five to seven candidates on one H200, for 4096 inputs
ONE_ROW, MORE_ROWS = Tiles(16, 256, 4, 4), Tiles(16, 128, 2, 6)
#: the same for two weights that are read together
ONE_ROW_GATED, MORE_ROWS_GATED = Tiles(4, 1024, 4, 3), Tiles(32, 256, 4, 3)
#: used if the tiles in flight need more shared memory than a block has (consumer GPUs have 99 KB)
SMALL = Tiles(16, 128, 4, 3)


@triton.jit
def _inputs(x, x_stride, k, rows, K, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """A tile of the input: `[1, inputs]` for one row, else `[ROWS, inputs]`; zeros after the last row."""
    if ROWS == 1:
        if EVEN:
            tile = tl.load(x + k)[None, :]
        else:
            tile = tl.load(x + k, mask=k < K, other=0.0)[None, :]
    else:
        row = tl.arange(0, ROWS)[:, None]
        tile = tl.load(x + row * x_stride + k[None, :], mask=(row < rows) & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _weights(w, w_stride, n, k, N, K, EVEN: tl.constexpr):
    """A tile `[outputs, inputs]` of a weight. It is read only once per step."""
    at = w + n[:, None].to(tl.int64) * w_stride + k[None, :]
    if EVEN:
        tile = tl.load(at, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _start(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    return tl.zeros((BLOCK_N, BLOCK_K), tl.float32) if ROWS == 1 else tl.zeros((ROWS, BLOCK_N), tl.float32)


@triton.jit
def _add(x, w, total, ROWS: tl.constexpr, DOT: tl.constexpr):
    if ROWS == 1:
        total += w.to(tl.float32) * x.to(tl.float32)
    else:
        total = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), total, input_precision="ieee")
    return total


@triton.jit
def _end(total, ROWS: tl.constexpr):
    """Sums `[1 or ROWS, outputs]`."""
    return tl.sum(total, 1)[None, :] if ROWS == 1 else total


@triton.jit
def _store(out, y, n, rows, N, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    keep = (row < rows) & (n < N)[None, :]
    tl.store(out + row.to(tl.int64) * N + n[None, :], y.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def products_kernel(
    x, w0, w1, w2, bias0, bias1, bias2, out0, out1, out2, x_stride, w0_stride, w1_stride, w2_stride, rows, n0, n1, n2,
    K: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[rows, K]`, weights `[n, K]`, biases `[n]` -> out `[rows, n]`. Grid (blocks of all weights). n2 may be 0."""
    block = tl.program_id(0)
    after0 = tl.cdiv(n0, BLOCK_N)
    after1 = after0 + tl.cdiv(n1, BLOCK_N)
    is0, is1 = block < after0, block < after1
    w = tl.where(is0, w0, tl.where(is1, w1, w2))
    w_stride = tl.where(is0, w0_stride, tl.where(is1, w1_stride, w2_stride))
    out = tl.where(is0, out0, tl.where(is1, out1, out2))
    N = tl.where(is0, n0, tl.where(is1, n1, n2))
    block = tl.where(is0, block, tl.where(is1, block - after0, block - after1))
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _start(ROWS, BLOCK_N, BLOCK_K)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        tile = _inputs(x, x_stride, k, rows, K, ROWS, EVEN)
        total = _add(tile, _weights(w, w_stride, n, k, N, K, EVEN), total, ROWS, DOT)
    y = _end(total, ROWS)
    if HAS_BIAS:
        bias = tl.where(is0, bias0, tl.where(is1, bias1, bias2))
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(out, y, n, rows, N, ROWS)


@triton.jit(do_not_specialize=["rows"])
def gated_product_kernel(
    x, w_gate, w_up, bias_gate, bias_up, out, x_stride, gate_stride, up_stride, rows, N,
    K: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[rows, K]`, weights `[N, K]` -> activation(x w_gate^T) * (x w_up^T), `[rows, N]`. Grid (N / BLOCK_N)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate, up = _start(ROWS, BLOCK_N, BLOCK_K), _start(ROWS, BLOCK_N, BLOCK_K)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        tile = _inputs(x, x_stride, k, rows, K, ROWS, EVEN)
        gate = _add(tile, _weights(w_gate, gate_stride, n, k, N, K, EVEN), gate, ROWS, DOT)
        up = _add(tile, _weights(w_up, up_stride, n, k, N, K, EVEN), up, ROWS, DOT)
    g, u = _end(gate, ROWS), _end(up, ROWS)
    if HAS_BIAS:
        g += tl.load(bias_gate + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        u += tl.load(bias_up + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(out, activated(g, ACTIVATION) * u, n, rows, N, ROWS)


def products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """`x @ weight.T + bias` for two or three weights.

    Args:
        x: `[..., K]`, at most `MAX_ROWS` rows in all.
        weights: `[n, K]`, their last dimension dense.
        biases: `[n]`, for all weights or for none. All have one device and one dtype, float16 or bfloat16.

    Returns:
        For each weight `[..., n]`, contiguous.
    """
    flat = _rows(x)
    tiles = _fitting(ONE_ROW if len(flat) == 1 else MORE_ROWS, 1, flat)
    outs = [x.new_empty(*x.shape[:-1], len(weight)) for weight in weights]
    sizes = [len(weight) for weight in weights]
    three = [(*of_kind, *of_kind[-1:])[:3] for of_kind in (weights, biases or weights, outs)]
    launch(
        *(products_kernel, (sum(cdiv(n, tiles.outputs) for n in sizes),), flat),
        *(tensor for of_kind in three for tensor in of_kind),
        *(flat.stride(0), *(weight.stride(0) for weight in three[0]), len(flat), *(*sizes, 0)[:3]),
        device=x.device,
        **_constants(flat, biases, tiles),
    )
    return tuple(outs)


def gated_product(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    biases: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """`activation(x @ gate.T) * (x @ up.T)`, rounded once at the end.

    Args:
        x, biases: as for `products`.
        weights: the gate's and the other one's, `[N, K]` each.
        activation: one of `fused_kernels.ACTIVATIONS`.

    Returns:
        `[..., N]`, contiguous.
    """
    flat = _rows(x)
    gate, up = weights
    tiles = _fitting(ONE_ROW_GATED if len(flat) == 1 else MORE_ROWS_GATED, 2, flat)
    out = x.new_empty(*x.shape[:-1], len(gate))
    launch(
        *(gated_product_kernel, (cdiv(len(gate), tiles.outputs),), flat, gate, up, *(biases or weights), out),
        *(flat.stride(0), gate.stride(0), up.stride(0), len(flat), len(gate)),
        device=x.device,
        ACTIVATION=ACTIVATIONS.index(activation),
        **_constants(flat, biases, tiles),
    )
    return out


def _fitting(tiles: Tiles, weights: int, flat: torch.Tensor) -> Tiles:
    """These tiles, or `SMALL` if they do not fit into shared memory."""
    if flat.device.type != "cuda":
        return tiles
    rows = 1 if len(flat) == 1 else MAX_ROWS
    # Triton keeps one tile fewer than are in flight
    needed = (tiles.stages - 1) * (weights * tiles.outputs + rows) * tiles.inputs * flat.element_size()
    properties = torch.cuda.get_device_properties(flat.device)
    return tiles if needed <= getattr(properties, "shared_memory_per_block_optin", 2**16) else SMALL


def _rows(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _constants(flat: torch.Tensor, biases: Sequence[torch.Tensor] | None, tiles: Tiles) -> dict:
    return {
        "K": flat.shape[1],
        "ROWS": 1 if len(flat) == 1 else MAX_ROWS,
        "HAS_BIAS": biases is not None,
        "EVEN": flat.shape[1] % tiles.inputs == 0,
        "DOT": dot_type(flat.dtype),
        "BLOCK_N": tiles.outputs,
        "BLOCK_K": tiles.inputs,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }
