"""`Operations` by Triton's kernels, with the meaning of `hf_lowbit_kv.storage.reference`.

No function waits for the GPU, so all can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..formats.base import FIELD_ALIGNMENT
from ..storage.layer_spec import LayerSpec
from ..storage.paged_store import PagedStore
from ..storage.reference import restored, transformed_with
from ..storage.step import Operations, StepInputs
from ..storage.transforms import Transform, base_order, hadamard
from . import dense, prompt
from .append import append_counters_kernel, append_one_kernel, append_pages_kernel, append_window_kernel
from .attend import attend_kernel, merge_kernel
from .common import OPTIONS as OPTIONS
from .common import cdiv, constants, dot_type, format_records, next_power_of_2, padded_width, pages_due, real_tokens
from .common import launch as _launch
from .common import launches as launches
from .common import takes_ptx as _takes_ptx
from .config import (
    APPEND_WARPS,
    FUSED_ROWS,
    MERGE_CHANNELS,
    MERGE_SPLITS,
    TAIL_SPLIT,
    TRANSFORM_ROWS,
    attend_config,
    processors,
    split_count,
)
from .read import read as read
from .registry import attends_packed, kernels
from .transform import transform_kernel


class _Sides(NamedTuple):
    """The compile-time constants of a layer's kernels. kp, vp: constants of the two formats."""

    keys: Any
    values: Any
    kp: Any
    vp: Any
    dq: Any
    page_bytes: int
    value_at: int
    #: largest tile of tokens, for keys and for values
    max_block: tuple[int, int]
    #: padded number of channels of a plane of values
    key_width: int
    value_width: int
    #: tokens that packing takes at a time
    encode_rows: tuple[int, int]
    #: whether a side's numbers are gathered from shared memory
    gathers: bool


@functools.cache
def _sides(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype, ptx: bool) -> _Sides:
    part_k, part_v = spec.part_bytes(head_dim_k, head_dim_v, dtype)
    assert part_k % FIELD_ALIGNMENT == 0
    keys, values = kernels(spec.key_format), kernels(spec.value_format)
    kp = keys.params(spec.key_format, head_dim_k, spec.page_size, dtype, ptx)
    vp = values.params(spec.value_format, head_dim_v, spec.page_size, dtype, ptx)
    return _Sides(
        keys=keys,
        values=values,
        kp=constants(kp),
        vp=constants(vp),
        dq=constants(dense.params(None, head_dim_k, spec.page_size, dtype, ptx)),
        page_bytes=part_k + part_v,
        value_at=part_k,
        max_block=(kp.max_block, vp.max_block),
        key_width=kp.padded,
        value_width=vp.padded,
        encode_rows=(kp.encode_rows, vp.encode_rows),
        gathers=attends_packed(spec) and (kp.gathers or vp.gathers),
    )


def _prepare(k, v, spec: LayerSpec) -> _Sides:
    return _sides(spec, k.shape[-1], v.shape[-1], k.dtype, _takes_ptx(k.device))


@functools.cache
def _chained(device: torch.device) -> bool:
    """Whether kernels of a step are launched before the previous kernel has ended (programmatic dependent launch, sm90 and
    later). A kernel launched in this way begins by waiting for the previous kernel, and thereby for all earlier ones."""
    return _takes_ptx(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _signs(base: int, device: torch.device) -> torch.Tensor:
    """The base matrix from which a Hadamard matrix is built, float32 `[base, base]`."""
    return hadamard(base).to(device, torch.float32)


def transform(
    q: torch.Tensor | None, x: torch.Tensor, transform: Transform, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`reference.transform` in one launch, for transforms that kernels apply (`Transform.fused`). Queries `[B, Hq, S,
    D]` (or `None`) get the counterpart, keys or values `x` `[B, H, S, D]` the transform itself. tensors: the
    transform's tensors."""
    (batch, heads, tokens, head_dim), q_heads = x.shape, 0 if q is None else q.shape[1]
    out = x.new_empty(x.shape)
    queries = None if q is None else q.new_empty(q.shape)
    rows = batch * (q_heads + heads) * tokens
    if rows == 0:
        return queries, out
    fused = transform.fused
    assert fused is not None
    base = base_order(head_dim) if fused.rotated else 1
    scales = (tensors[1], tensors[0]) if fused.scaled else (x, x)
    _launch(
        transform_kernel,
        (cdiv(rows, TRANSFORM_ROWS),),
        *(x if q is None else q, x, out if queries is None else queries, out, *scales),
        *(_signs(base, x.device), *(x if q is None else q).stride(), *x.stride(), q_heads, heads, tokens, rows),
        tensors[0].stride(0) if fused.scaled and tensors[0].shape[0] > 1 else 0,
        device=x.device,
        D=head_dim,
        PADDED=next_power_of_2(head_dim),
        ROWS=TRANSFORM_ROWS,
        BASE=base,
        BLOCKS_LOG2=(head_dim // base).bit_length() - 1,
        NORM=head_dim**-0.5,
        BEFORE=fused.before,
        ROTATED=fused.rotated,
        AFTER=fused.after,
        PTX=_takes_ptx(x.device),
        num_warps=TRANSFORM_ROWS,
    )
    return queries, out


class TritonOperations(Operations):
    """Operations by Triton's kernels. One launch transforms queries and keys, and one transforms values. PyTorch
    applies transforms that kernels do not."""

    launches = launches

    def attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        return restored(_attend(transformed_with(transform, inputs, store), store), store, transform)

    def append(self, inputs: StepInputs, store: PagedStore) -> None:
        _append(transformed_with(transform, inputs._replace(q=None), store), store)

    def step(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """Tokens are transformed once. The attend kernel is not launched before the end of the transform's kernel
        (`_chained`), because that was up to 9 % slower."""
        inputs = transformed_with(transform, inputs, store)
        out = _attend(inputs, store)
        _append(inputs, store)
        return restored(out, store, transform)

    def read(self, store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read(store, max_length)


OPERATIONS = TritonOperations()


def _attend(inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """`attend` for inputs that are already transformed."""
    q, k, v, mask, scaling, softcap, sinks, _, score_bias = inputs.queries, *inputs[1:]
    state, spec = store.state, store.spec
    (batch, q_heads, tokens, head_dim_k), heads, head_dim_v = q.shape, k.shape[1], v.shape[-1]
    groups, pages = q_heads // heads, state.page_address.shape[1]
    rows = groups * tokens
    if rows > FUSED_ROWS["triton"] or not attends_packed(spec):
        return prompt.attend(inputs, store)
    sides = _prepare(k, v, spec)
    (record_k, stride_k), (record_v, stride_v) = format_records(store)
    widths = max(head_dim_k, head_dim_v), sides.key_width, sides.value_width
    config = attend_config(rows, *widths, q.dtype == torch.float32, sides.gathers)
    blocks = cdiv(rows, config.block_m)
    programs, chained = batch * heads * blocks, _chained(q.device)
    splits = split_count(programs, pages, config.programs * processors(q.device))
    window_splits = 1 + cdiv(spec.tail_size, TAIL_SPLIT)
    all_splits = splits + window_splits if splits > 1 else 1
    out = q.new_empty(batch, tokens, q_heads, head_dim_v)
    partial, lse = out, out
    if splits > 1:
        partial = q.new_empty(batch * heads, all_splits, rows, head_dim_v, dtype=torch.float32)
        lse = q.new_empty(batch * heads, all_splits, rows, dtype=torch.float32)
    _launch(
        attend_kernel,
        (batch * heads, all_splits, blocks),
        *(q, k, v, q if mask is None else mask.view(torch.uint8), q if sinks is None else sinks),
        q if score_bias is None else score_bias,
        *(state.pool[0], state.page_address, state.sink_k, state.sink_v, state.tail_k, state.tail_v),
        *(state.length, state.paged, partial, lse, *q.stride(), *k.stride(), *v.stride()),
        *((0, 0) if mask is None else mask.stride()),
        *(record_k, record_v, stride_k, stride_v),
        *(heads, tokens, pages, splits, scaling, 1.0 if softcap is None else softcap),
        device=q.device,
        PREPARE=sides.keys.prepare,
        FETCH_K=sides.keys.fetch,
        FETCH_V=sides.values.fetch,
        SCORES=sides.keys.scores,
        WEIGH=sides.values.weigh,
        ADD=sides.values.add,
        KP=sides.kp,
        VP=sides.vp,
        DQ=sides.dq,
        DV=head_dim_v,
        GROUPS=groups,
        SINK=spec.sink,
        TAIL=spec.tail_size,
        PAGE=spec.page_size,
        PAGE_BYTES=sides.page_bytes,
        VALUE_AT=sides.value_at,
        OPEN_PAGES=spec.direct,
        SPLIT=splits > 1,
        HAS_MASK=mask is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCORE_BIAS=score_bias is not None,
        HAS_SOFTCAP=softcap is not None,
        DOT=dot_type(q.dtype),
        BLOCK_M=config.block_m,
        BLOCK_N=min(config.block_n, *sides.max_block, spec.page_size),
        WINDOW_N=config.window_n,
        WINDOW_SPLITS=window_splits,
        TAIL_SPLIT=TAIL_SPLIT,
        DEFER=config.block_m <= 16 and config.num_warps > 1,
        T=0 if config.swapped else 1,
        PDL=chained,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.registers,
    )
    if splits > 1:
        _launch(
            merge_kernel,
            (batch * heads, rows, cdiv(head_dim_v, MERGE_CHANNELS)),
            *(partial, lse, q if sinks is None else sinks, out, heads, rows, all_splits),
            device=q.device,
            DV=head_dim_v,
            GROUPS=groups,
            HAS_SINKS=sinks is not None,
            BLOCK=min(next_power_of_2(all_splits), MERGE_SPLITS),
            CHANNELS=MERGE_CHANNELS,
            PDL=chained,
            num_warps=4,
            launch_pdl=chained,
        )
    return out


def _append(inputs: StepInputs, store: PagedStore) -> None:
    """`append` for keys and values that are already transformed."""
    (k, v, mask), state, spec = inputs[1:4], store.state, store.spec
    batch, heads, tokens, _ = k.shape
    if tokens == 0:
        return
    sides = _prepare(k, v, spec)
    pages = state.page_address.shape[1]
    room = spec.room(pages)
    common = {
        "SINK": spec.sink,
        "RESIDUAL": spec.residual,
        "PAGE": spec.page_size,
        "DIRECT": spec.direct,
    }
    dims = {"DK": k.shape[-1], "DV": v.shape[-1]}
    padded = {"DK_PADDED": padded_width(k.shape[-1]), "DV_PADDED": padded_width(v.shape[-1])}
    encoding = {
        "ENCODE_K": sides.keys.encode,
        "ENCODE_V": sides.values.encode,
        "KP": sides.kp,
        "VP": sides.vp,
        "PAGE_BYTES": sides.page_bytes,
        "VALUE_AT": sides.value_at,
        "ROWS_K": 1 if spec.direct and tokens == 1 else sides.encode_rows[0],
        "ROWS_V": 1 if spec.direct and tokens == 1 else sides.encode_rows[1],
    }
    window = (state.sink_k, state.sink_v, state.tail_k, state.tail_v)
    (record_k, stride_k), (record_v, stride_v) = format_records(store)
    record_strides = stride_k, stride_v
    if tokens == 1:
        _launch(
            append_one_kernel,
            (batch * heads,),
            *(k, v, k if mask is None else mask.view(torch.uint8), state.pool[0], state.page_address, *window),
            *(state.length, state.paged, state.lost, record_k, record_v, *_strides(k, 0, 1, 3), *_strides(v, 0, 1, 3)),
            *(0 if mask is None else mask.stride(0), heads, pages, room, *record_strides),
            device=k.device,
            HAS_MASK=mask is not None,
            TAIL=spec.tail_size,
            PDL=_chained(k.device),
            num_warps=4 if spec.direct else APPEND_WARPS,
            launch_pdl=_chained(k.device),
            **(common | dims | padded | encoding),
        )
        return
    order, count = (k, state.length) if mask is None else real_tokens(mask)
    due = pages_due(spec, tokens, pages)
    _launch(
        append_pages_kernel,
        (batch * heads, due),
        *(k, v, order, count, state.pool[0], state.page_address, state.tail_k, state.tail_v, state.length, state.paged),
        *(record_k, record_v, *k.stride(), *v.stride(), heads, tokens, pages, room, *record_strides),
        device=k.device,
        HAS_ORDER=mask is not None,
        TAIL=spec.tail_size,
        num_warps=8,
        **(common | dims | encoding),
    )
    if spec.sink or spec.tail_size:
        _launch(
            append_window_kernel,
            (batch * heads, cdiv(tokens, 32)),
            *(k, v, order, count, *window, state.length, state.paged, *k.stride(), *v.stride(), heads, tokens, room),
            device=k.device,
            HAS_ORDER=mask is not None,
            TAIL=spec.tail_size,
            BLOCK=32,
            **(common | dims | padded),
        )
    _launch(
        append_counters_kernel,
        (batch * heads,),
        *(state.length, state.paged, state.lost, count, heads, tokens, room),
        device=k.device,
        HAS_ORDER=mask is not None,
        num_warps=1,
        **common,
    )


def _strides(x: torch.Tensor, *axes: int) -> tuple[int, ...]:
    return tuple(x.stride(axis) for axis in axes)
