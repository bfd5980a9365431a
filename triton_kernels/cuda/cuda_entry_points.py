"""Entry points: `attend`, `step`, `append` and `read`, with the signatures and meaning of `hf_lowbit_kv.storage.reference`.

A step of one token is one launch, the transform of queries and keys included; a full matrix takes one in front.

Long chunks and `read` are left to Triton's kernels. Where Triton cannot launch any (`toolchain.why_no_launcher`), the kernel
for decoding serves chunks of any length, which it was not made for, and the reference reads.

Nothing in `attend` and `append` waits for the device, so both can be captured in a CUDA graph (once a call of the same kind
has loaded the kernel, which waits).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...machine.determinism import fixed_order
from ...machine.toolchain import why_no_launcher
from ...storage import reference
from ...storage.paged_store import LayerSpec, LayerState
from ...storage.reference import restored, transformed_by
from ...storage.transforms import Fused, Transform
from .. import prompt
from .. import read as unpacking
from ..config import FUSED_ROWS
from .arguments import AttendArgs, Factors, ProjectArgs, StepArgs, TransformArgs, append_args, factors, tables
from .arguments import address as _address
from .geometry import (
    APPEND_WARPS,
    PROJECT_COLUMNS,
    PROJECT_ROWS,
    PROJECT_THREADS,
    append_defines,
    grid_size,
    project_defines,
    transform_defines,
)
from .geometry import why_not as why_not
from .modules import AttendKernel, attend_module, expect, properties
from .nvrtc import Module, load

DTYPES = (torch.float16, torch.bfloat16)
#: query rows of a KV head up to which `attend` transforms queries and keys itself: it does so once for every 8 or 16 of them
TRANSFORM_INSIDE = 16
#: query rows of a KV head, of all sequences, up to which a kernel multiplies them by a matrix (`project.cu`)
PROJECTED_ROWS = 4096
#: blocks of query rows that a launch can have
MAX_ROW_BLOCKS = 65535
#: launches since import, by kernel name: tests assert that kernels ran
launches: dict[str, int] = {}


def _launch(module: Module, name: str, grid: tuple[int, int, int], threads: int, *args, shared: int = 0) -> None:
    counted = f"{name}_kernel"
    launches[counted] = launches.get(counted, 0) + 1
    module.launch(name, grid, threads, *args, shared=shared)


def _check(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"backend='cuda' computes in float16 and bfloat16, not in {x.dtype}; use backend='triton'")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with consecutive channels and tokens that start at multiples of 16 bytes: itself, or a copy."""
    fits = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _counters_for(state: LayerState, count: int) -> torch.Tensor:
    """At least `count` int32 zeros, which every launch leaves as zeros: the layer's own, because launches on one layer follow
    each other, and captured graphs keep the address. Long chunks, which have more blocks of query rows, get others."""
    return state.scratch if count <= state.scratch.numel() else state.scratch.new_zeros(count)


def transform(
    q: torch.Tensor | None, x: torch.Tensor, how: Transform, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`reference.transform`, of what kernels can apply (`Transform.fused`), in one launch."""
    _check(x)
    (batch, heads, tokens, head_dim), q_heads = x.shape, 0 if q is None else q.shape[1]
    x, q = _rows(x), None if q is None else _rows(q)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    queries = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, fused = batch * (q_heads + heads) * tokens, how.fused
    if rows == 0:
        return queries, out
    assert fused is not None
    scales = factors(fused, tensors)
    args = TransformArgs(
        *(_address(tensor) for tensor in (q, x, queries, out)),
        *(scales.queries, scales.keys),
        *((0, 0, 0) if q is None else q.stride()[:3]),
        *(*x.stride()[:3], rows, scales.stride, q_heads, heads, tokens),
    )
    module = load("transform.cu", transform_defines(head_dim, x.dtype, fused), x.device)
    _launch(module, "transform", (-(-rows // 4), 1, 1), 128, args)
    return queries, out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    state: LayerState,
    spec: LayerSpec,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seen: int | None = None,
) -> torch.Tensor:
    """`reference.attend`: q `[B, Hq, S, D]`, k and v `[B, H, S, D]`, mask bool `[B, S]` -> `[B, S, Hq, Dv]`."""
    q, k, v, inside = _prepared(q, k, v, state, spec)
    return _attend(q, k, v, mask, state, spec, inside, scaling, softcap, sinks, seen)[0]


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    state: LayerState,
    spec: LayerSpec,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seen: int | None = None,
) -> torch.Tensor:
    """`reference.step`. One launch for one token, where `geometry.can_store` says so."""
    q, k, v, inside = _prepared(q, k, v, state, spec)
    store = k.shape[2] == 1
    out, keys, stored = _attend(q, k, v, mask, state, spec, inside, scaling, softcap, sinks, seen, store)
    if not stored:
        _append(keys, v, mask, state, spec)
    return out


def append(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, state: LayerState, spec: LayerSpec) -> None:
    """`reference.append`: store k and v `[B, H, S, D]`; mask bool `[B, S]`, False for padding."""
    _, k, v = transformed_by(transform, None, k, v, state, spec)
    _append(k, v, mask, state, spec)


class _Inside(NamedTuple):
    """What the attend kernel is to do to queries and keys."""

    fused: Fused
    factors: Factors


def _inside(rows: int, state: LayerState, spec: LayerSpec) -> _Inside | None:
    """What the attend kernel does to queries and keys, where a KV head has so many query rows; `None`: nothing."""
    fused = spec.key_transform.fused
    if spec.untransformed or spec.key_transform.identity or fused is None or rows > TRANSFORM_INSIDE:
        return None
    return _Inside(fused, factors(fused, spec.tensors(state)["key_transform"]))


def _prepared(q, k, v, state: LayerState, spec: LayerSpec):
    """Queries, keys and values, transformed but for what the attend kernel does itself, which is the fourth."""
    if spec.untransformed:
        return q, k, v, None
    if _projects(q, k, spec):
        return *_project(q, k, v, state, spec), None
    inside = _inside(q.shape[1] // k.shape[1] * q.shape[2], state, spec)
    return *transformed_by(transform, q, k, v, state, spec, keys=inside is None), inside


def _projects(q: torch.Tensor, k: torch.Tensor, spec: LayerSpec) -> bool:
    """Whether one launch multiplies queries and keys by their matrices, and transforms the values."""
    fused = spec.value_transform.fused
    few = 0 < k.shape[0] * q.shape[1] // k.shape[1] * q.shape[2] <= PROJECTED_ROWS
    return spec.key_transform.product and few and fused is not None and not fused.scaled


def _project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: LayerState, spec: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.transformed`, in one launch."""
    _check(q)
    (batch, q_heads, tokens, head_dim_k), heads, head_dim_v = q.shape, k.shape[1], v.shape[-1]
    q, k, v, fused = _rows(q), _rows(k), _rows(v), spec.value_transform.fused
    assert fused is not None
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    matrix, queries = spec.tensors(state)["key_transform"]
    args = ProjectArgs(
        *(x.data_ptr() for x in (q, k, v, *outs, queries, matrix)),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], matrix.stride(0) if matrix.shape[0] > 1 else 0),
        *(batch, q_heads, heads, tokens),
    )
    rows, slices = batch * tokens, -(-head_dim_k // PROJECT_COLUMNS)
    products = heads * slices * (-(-rows * (q_heads // heads) // PROJECT_ROWS) - (-rows // PROJECT_ROWS))
    blocks = products + (-(-rows * heads // (PROJECT_THREADS // 32)) if fused.rotated else 0)
    module = load("project.cu", project_defines(head_dim_k, head_dim_v, q.dtype, fused), q.device)
    _launch(module, "project", (blocks, 1, 1), PROJECT_THREADS, args)
    return outs[0], outs[1], outs[2] if fused.rotated else v


def _kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: int,
    mask: torch.Tensor | None,
    state: LayerState,
    spec: LayerSpec,
    inside: _Inside | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    store: bool,
) -> AttendKernel:
    """The kernel that attends to chunks of `tokens` tokens of such queries, keys and values."""
    rows, heads = q.shape[1] // k.shape[1] * tokens, k.shape[0] * k.shape[1]
    sink_kind = 0 if sinks is None else 1 if sinks.dtype == q.dtype else 2
    return AttendKernel(
        *(spec, k.shape[-1], v.shape[-1], q.dtype, min(rows, 16), heads, mask is not None, sink_kind),
        *(softcap is not None, inside and inside.fused, fixed_order(), store),
        *(tables(state, spec).per_head, spec.value_transform.own_inverse(v.shape[-1]), q.device),
    )


def expect_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: LayerState,
    spec: LayerSpec,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Compile what the steps of one token behind this prompt launch, while the prompt is read. Arguments as for `step`."""
    inside = _inside(q.shape[1] // k.shape[1], state, spec)
    expect(_kernel(q, k, v, 1, None, state, spec, inside, softcap, sinks, store=True))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    state: LayerState,
    spec: LayerSpec,
    inside: _Inside | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    seen: int | None,
    store: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The output as the model wants it, the chunk's keys as they are attended to and stored, and whether the chunk has been
    stored: where `store` asks for it and the kernel can."""
    _check(q)
    if q.shape[1] // k.shape[1] * q.shape[2] > FUSED_ROWS["cuda"] and why_no_launcher() is None:
        out = prompt.attend(q, k, v, mask, state, spec, scaling, softcap, sinks, seen)
        return restored(out, state, spec), k, False
    (batch, q_heads, tokens, _), heads, head_dim_v = q.shape, k.shape[1], v.shape[-1]
    q, k, v = _rows(q), _rows(k), _rows(v)
    if sinks is not None:
        sinks = sinks.contiguous() if sinks.dtype == q.dtype else sinks.float().contiguous()
    groups, device = q_heads // heads, q.device
    rows = groups * tokens
    records, kernel = tables(state, spec), _kernel(q, k, v, tokens, mask, state, spec, inside, softcap, sinks, store)
    module, choice, shared, fused = attend_module(kernel)
    row_block = 8 * choice.row_tiles
    row_blocks = -(-rows // row_block)
    pages = state.page_address.shape[1]
    if row_blocks > MAX_ROW_BLOCKS:
        raise ValueError(
            f"a chunk of {tokens} tokens is too long; allowed here: {MAX_ROW_BLOCKS * row_block // groups} "
            f"(prefill_chunk_size=...), because {why_no_launcher()}"
        )
    # no more teams than could have work: what rows hold is known on the device alone
    most = batch * heads * (pages * spec.page_size // 128 + (spec.sink + spec.tail_size + tokens) // 32 + 2)
    slots = max(properties(device).multi_processor_count * choice.teams // row_blocks, 1)
    teams = min(grid_size(slots, batch * heads), most)
    split = 0 if teams % (batch * heads) else teams // (batch * heads)
    shared_rows = 0 if teams == 1 else row_blocks * (teams + batch * heads) * row_block  # a team alone shares no row
    partial = torch.empty(shared_rows * (head_dim_v + 2), dtype=torch.float32, device=device)
    counters = _counters_for(state, row_blocks * batch * heads + 1)
    out = torch.empty(batch, tokens, q_heads, head_dim_v, dtype=q.dtype, device=device)
    raw_k, keys = k, k if inside is None else torch.empty(k.shape, dtype=k.dtype, device=device)
    args: tuple = (
        *(q.data_ptr(), keys.data_ptr(), v.data_ptr(), _address(mask)),
        *(_address(sinks), state.pool[0].data_ptr(), state.page_address.data_ptr()),
        *(state.sink_k.data_ptr(), state.sink_v.data_ptr(), state.tail_k.data_ptr(), state.tail_v.data_ptr()),
        *(state.length.data_ptr(), state.paged.data_ptr(), out.data_ptr(), partial.data_ptr(), counters.data_ptr()),
        *(*q.stride()[:3], *keys.stride()[:3], *v.stride()[:3], *((0, 0) if mask is None else mask.stride())),
        *(batch, heads, groups, tokens, pages, spec.sink, spec.tail_size, teams, split),
        *(scaling, 1.0 if softcap is None else softcap),
        *((0, 0, 0) if inside is None else (raw_k.data_ptr(), *inside.factors[:2])),
        *(*raw_k.stride()[:3], 0 if inside is None else inside.factors.stride),
        *records,
    )
    if fused:
        arrived = counters.data_ptr() + 4 * row_blocks * batch * heads
        args = *args, append_args(keys, v, mask, None, None, state, spec), arrived
    grid = -(-teams // choice.teams), row_blocks, 1
    kind = StepArgs if fused else AttendArgs
    _launch(module, "attend", grid, 32 * choice.teams * choice.warps, kind(*args), shared=shared)
    return out if kernel.restores else restored(out, state, spec), keys, fused


def read(state: LayerState, spec: LayerSpec, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.read`."""
    by = unpacking if why_no_launcher() is None else reference
    return by.read(state, spec, max_length)


def _append(k, v, mask, state: LayerState, spec: LayerSpec) -> None:
    """`append` of keys and values as they are stored."""
    _check(k)
    batch, heads, tokens, head_dim_k = k.shape
    if tokens == 0:
        return
    k, v = _rows(k), _rows(v)
    module = load("append.cu", append_defines(spec, head_dim_k, v.shape[-1], k.dtype), k.device)
    pages = state.page_address.shape[1]
    order = count = None
    if mask is not None and tokens > 1:
        # the places of the tokens that are no padding, in order
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True).to(torch.int32)
        count = mask.sum(1, dtype=torch.int32)
    args = append_args(k, v, mask, order, count, state, spec)
    rows = batch * heads
    if tokens == 1:
        _launch(module, "append_one", (rows, 1, 1), 32 * APPEND_WARPS, args)
        return
    # at most the tail and the chunk are packed, and an open page may stand before them
    due = min((tokens + spec.tail_size) // spec.page_size + (2 if spec.direct else 1), pages)
    _launch(module, "append_pages", (rows, due, 2), 32 * APPEND_WARPS, args)
    if spec.sink or spec.tail_size:
        _launch(module, "append_window", (rows, -(-tokens // 32), 1), 32 * APPEND_WARPS, args)
    _launch(module, "append_counters", (-(-rows // 128), 1, 1), 128, args, ctypes.c_int(rows))
