"""Functions and constants for several kernels."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import PagedStore

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

#: the maximum over nothing: finite, so that a difference of two maxima is never NaN
LOWEST = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)

#: number of launches since import, by kernel name: tests assert that kernels ran
launches: dict[str, int] = {}
#: default for launches; newer Triton versions require a choice. Attention expects fused multiply-adds, and packing has
#: none to fuse. Reading pages (`read.py`) turns them off, because its last bit must equal the reference's
OPTIONS = {"enable_fp_fusion": True}


def launch(kernel, grid: tuple[int, ...], *args, device: torch.device, **constants) -> None:
    """Launch a kernel on `device`, and count it."""
    name = kernel.fn.__name__
    launches[name] = launches.get(name, 0) + 1
    with on_device(device):
        kernel[grid](*args, **(OPTIONS | constants))


_NO_CHANGE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the current one for a launch. It usually is, and then nothing is set, because the CPU time of launches
    delays a prompt."""
    switch = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if switch else _NO_CHANGE


def format_records(store: PagedStore) -> tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int]]:
    """For the key format and the value format: the record of parameters, uint8 `[H or 1, bytes]`, and the stride from one KV
    head's record to the next. For a format without parameters any uint8 tensor."""
    state = store.state
    nothing = state.pool[0], 0
    if not state.parameters:
        return nothing, nothing
    records = store.spec.by_role(state)
    keys, values = (records.get(role) for role in ("key_format", "value_format"))
    return _with_stride(keys, nothing), _with_stride(values, nothing)


def _with_stride(record: torch.Tensor | None, nothing: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    if record is None:
        return nothing
    return record, record.stride(0) if record.shape[0] > 1 else 0


def real_tokens(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For a padding mask, bool `[B, S]`: the indices of each row's real tokens, in order, int32 `[B, S]`; and their number,
    int32 `[B]`."""
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    return order.to(torch.int32), mask.sum(1, dtype=torch.int32)


def pages_due(spec: LayerSpec, tokens: int, pages: int) -> int:
    """The largest number of pages of a row that `tokens` new tokens fill, up to `pages`: the tail and the new tokens are
    packed, after a partial page."""
    return min((tokens + spec.tail_size) // spec.page_size + (2 if spec.direct else 1), pages)


# Triton's functions of these names also work in kernels. From Python each call takes several microseconds, and a launch
# needs a few of them.


def cdiv(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least `x`; `x` is 1 or more."""
    return 1 << (x - 1).bit_length()


def padded_width(width: int) -> int:
    """The power of two to which a tile of `width` channels is padded; at least 16, the smallest size of a dot."""
    return max(16, next_power_of_2(width))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels may hold inline PTX."""
    return device.type == "cuda" and torch.version.hip is None and not interpreted()


def dot_type(dtype: torch.dtype):
    """Type of the operands of products. The interpreter computes wrongly in bfloat16."""
    return DTYPES[torch.float32 if interpreted() and dtype == torch.bfloat16 else dtype]


def constants(params):
    """The NamedTuple with all its numbers, also in nested tuples, marked as compile-time constants. Without the marks Triton
    3.6 treats numbers inside a constant as run-time values. The interpreter does not support the marks."""

    def mark(x):
        if not isinstance(x, tuple):
            return tl.constexpr(x)
        return type(x)(*map(mark, x)) if hasattr(x, "_fields") else tuple(map(mark, x))

    return params if interpreted() else mark(params)


@triton.jit
def load_plane(rows, stride, rows_valid, j: tl.constexpr, P: tl.constexpr):
    """Plane `j` of dense tokens: pointers `[N]` to their first channels -> `[N, padded]`."""
    keep = rows_valid[:, None]
    if P.width != P.padded:
        keep = keep & (tl.arange(0, P.padded) < P.width)[None, :]
    return tl.load(rows[:, None] + plane_channels(j, P)[None, :] * stride, mask=keep, other=0.0)


@triton.jit
def load_core_matrices(data, token, valid, E: tl.constexpr, P: tl.constexpr):
    """Tokens `token` `[N]` of a page in layout `core-1` (`formats.core_matrices`), E numbers in 16 bytes -> `[N, padded]`."""
    channel = tl.arange(0, P.padded)
    rows = data + (token // 8) * (8 * P.width) + (token % 8) * E
    positions = (channel // E) * (8 * E) + channel % E
    return tl.load(rows[:, None] + positions[None, :], mask=valid[:, None] & (channel < P.width)[None, :], other=0)


@triton.jit
def plane_channels(j: tl.constexpr, P: tl.constexpr):
    """The channels of plane `j`, `[padded]`: neighbours, or, if INTERLEAVED, every `planes`-th channel from `j` on."""
    x = tl.arange(0, P.padded)
    return x * P.planes + j if P.interleaved else j * P.width + x


# The attend kernel works in one of two orientations. T is the axis of a tile of scores along which tokens run. With T =
# 1, tiles are `[M, N]` (query rows by tokens) and accumulators `[M, channels]`. With T = 0 both are transposed. Numbers
# of query rows broadcast by `expand_dims(x, T)`, numbers of tokens or channels by `expand_dims(x, 1 - T)`.


@triton.jit
def as_operand(q, T: tl.constexpr):
    """Queries `[M, channels]` as `query_dot` takes them."""
    return q if T == 1 else tl.trans(q)


@triton.jit
def query_dot(q, k, s, T: tl.constexpr):
    """s + q.k; k: `[channels, N]`, or `[N, channels]` for T = 0."""
    if T == 1:
        return tl.dot(q, k, s, input_precision="ieee")
    else:
        return tl.dot(k, q, s, input_precision="ieee")


@triton.jit
def value_dot(weights, v, acc, T: tl.constexpr):
    """acc + weights.v; v: `[N, channels]`, or `[channels, N]` for T = 0."""
    if T == 1:
        return tl.dot(weights, v, acc, input_precision="ieee")
    else:
        return tl.dot(v, weights, acc, input_precision="ieee")


@triton.jit
def load_tokens(source, index, channel, keep, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr):
    """Unpacked tokens of one row and head as float32, from the tail ring or from the new tokens that are being stored.

    source: `(tail, head_dim, new_tokens, token_stride, channel_stride, order, first, skipped)`. Tokens with an index below
        `first` are in the tail. Token `first` is real token number `skipped` of the new tokens (padding not counted), and
        `order` maps such numbers to positions among the new tokens.
    index: token indices, sink not counted. channel, keep: shapes that broadcast with it.
    """
    tail, head_dim, new_tokens, token_stride, channel_stride, order, first, skipped = source
    number = index - first + skipped
    if HAS_ORDER:
        number = tl.load(order + number, mask=(index >= first) & keep, other=0)
    position = number.to(tl.int64) * token_stride + channel * channel_stride
    x = tl.load(new_tokens + position, mask=keep & (index >= first), other=0.0).to(tl.float32)
    if TAIL > 0:
        old = keep & (index < first)
        y = tl.load(tail + (index % TAIL) * head_dim + channel, mask=old, other=0.0).to(tl.float32)
        x = tl.where(old, y, x)
    return x
