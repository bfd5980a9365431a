"""Entry points: `attend`, `append` and `read`, with the signatures and meaning of `hf_lowbit_kv.reference`.

Nothing in `attend` and `append` waits for the device, so both can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ...pages import LayerSpec, LayerState
from ...reference import max_length as row_capacity
from .. import prompt
from ..config import FUSED_ROWS
from ..read import read as read
from .compile import Module, load
from .geometry import Choice, append_defines, attend_defines, choose, grid_size

DTYPES = (torch.float16, torch.bfloat16)
#: launches since import, by kernel name: tests assert that kernels ran
launches: dict[str, int] = {}


class _AttendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v mask sinks pool address sink_k sink_v tail_k tail_v".split()),
        *((name, ctypes.c_void_p) for name in "length paged out partial counters".split()),
        *((name, ctypes.c_longlong) for name in "q_b q_h q_s k_b k_h k_s v_b v_h v_s mask_b mask_s".split()),
        *((name, ctypes.c_int) for name in "batch heads groups tokens pages sink tail".split()),
        *((name, ctypes.c_float) for name in "scaling softcap".split()),
    ]


class _AppendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "k v mask order count pool address sink_k sink_v tail_k tail_v".split()),
        *((name, ctypes.c_void_p) for name in "length paged".split()),
        *((name, ctypes.c_longlong) for name in "k_b k_h k_s v_b v_h v_s mask_b".split()),
        *((name, ctypes.c_int) for name in "heads tokens pages room sink tail residual".split()),
    ]


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


@functools.cache
def _properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


@functools.cache
def _attend_module(
    spec: LayerSpec,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    mask: bool,
    sinks: int,
    softcap: bool,
    device: torch.device,
) -> tuple[Module, Choice, int]:
    """The kernel, how it is laid out, and its shared memory in bytes."""
    properties = _properties(device)
    limits = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    choice = choose(spec, head_dim_k, head_dim_v, dtype, rows, heads, *limits)
    module = load(
        "attend.cu", attend_defines(spec, head_dim_k, head_dim_v, dtype, choice, mask, sinks, softcap), device
    )
    return module, choice, module.integer("shared_bytes")


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counters_for(state: LayerState, count: int) -> torch.Tensor:
    """int32 zeros, which every launch leaves as zeros. One buffer a layer, because launches on one layer follow each
    other. Storing the prompt allocates it, before a compiled step could allocate it inside a graph's memory; where a graph is
    being captured and there is none yet, the graph zeroes its own."""
    key = state.paged.device, state.paged.data_ptr()
    found = _counters.get(key)
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, 16 * state.paged.numel()), dtype=torch.int32, device=state.paged.device)
        if not torch.cuda.is_current_stream_capturing():
            _counters[key] = found
    return found


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
    _check(q)
    if q.shape[1] // k.shape[1] * q.shape[2] > FUSED_ROWS["cuda"]:
        return prompt.attend(q, k, v, mask, state, spec, scaling, softcap, sinks, seen)
    (batch, q_heads, tokens, head_dim_k), heads, head_dim_v = q.shape, k.shape[1], v.shape[-1]
    q, k, v = _rows(q), _rows(k), _rows(v)
    sink_kind = 0
    if sinks is not None:
        sinks = sinks.contiguous() if sinks.dtype == q.dtype else sinks.float().contiguous()
        sink_kind = 1 if sinks.dtype == q.dtype else 2
    groups, device = q_heads // heads, q.device
    rows = groups * tokens
    module, choice, shared = _attend_module(
        *(spec, head_dim_k, head_dim_v, q.dtype, min(rows, 16), batch * heads, mask is not None, sink_kind),
        *(softcap is not None, device),
    )
    row_block = 8 * choice.row_tiles
    row_blocks = -(-rows // row_block)
    pages = state.page_address.shape[1]
    # no more blocks than could have work: what rows hold is known on the device alone
    most = batch * heads * (pages * spec.page_size // 128 + (spec.sink + spec.tail_size + tokens) // 32 + 2)
    slots = max(_properties(device).multi_processor_count * choice.blocks // row_blocks, 1)
    blocks = min(grid_size(slots, batch * heads), most)
    partial = torch.empty(
        row_blocks * (blocks + batch * heads) * row_block * (head_dim_v + 2), dtype=torch.float32, device=device
    )
    counters = _counters_for(state, row_blocks * batch * heads)
    out = torch.empty(batch, tokens, q_heads, head_dim_v, dtype=q.dtype, device=device)
    args = _AttendArgs(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if mask is None else mask.data_ptr()),
        *(0 if sinks is None else sinks.data_ptr(), state.pool[0].data_ptr(), state.page_address.data_ptr()),
        *(state.sink_k.data_ptr(), state.sink_v.data_ptr(), state.tail_k.data_ptr(), state.tail_v.data_ptr()),
        *(state.length.data_ptr(), state.paged.data_ptr(), out.data_ptr(), partial.data_ptr(), counters.data_ptr()),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *((0, 0) if mask is None else mask.stride())),
        *(batch, heads, groups, tokens, pages, spec.sink, spec.tail_size),
        *(scaling, 1.0 if softcap is None else softcap),
    )
    _launch(module, "attend", (blocks, row_blocks, 1), 32 * choice.warps, args, shared=shared)
    return out


def append(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, state: LayerState, spec: LayerSpec) -> None:
    """`reference.append`: store k and v `[B, H, S, D]`; mask bool `[B, S]`, False for padding."""
    _check(k)
    batch, heads, tokens, head_dim_k = k.shape
    if tokens == 0:
        return
    k, v = _rows(k), _rows(v)
    module = load("append.cu", append_defines(spec, head_dim_k, v.shape[-1], k.dtype), k.device)
    pages = state.page_address.shape[1]
    _counters_for(state, 1)
    order = count = None
    if mask is not None and tokens > 1:
        # the places of the tokens that are no padding, in order
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True).to(torch.int32)
        count = mask.sum(1, dtype=torch.int32)
    args = _AppendArgs(
        *(k.data_ptr(), v.data_ptr(), 0 if mask is None else mask.data_ptr()),
        *(0 if order is None else order.data_ptr(), 0 if count is None else count.data_ptr()),
        *(state.pool[0].data_ptr(), state.page_address.data_ptr()),
        *(state.sink_k.data_ptr(), state.sink_v.data_ptr(), state.tail_k.data_ptr(), state.tail_v.data_ptr()),
        *(state.length.data_ptr(), state.paged.data_ptr()),
        *(*k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0)),
        *(heads, tokens, pages, row_capacity(spec, pages), spec.sink, spec.tail_size, spec.residual),
    )
    rows = batch * heads
    if tokens == 1:
        _launch(module, "append_one", (rows, 1, 1), 256, args)
        return
    # at most the tail and the chunk are packed, and an open page may stand before them
    due = min((tokens + spec.tail_size) // spec.page_size + (2 if spec.direct else 1), pages)
    _launch(module, "append_pages", (rows, due, 2), 256, args)
    if spec.sink or spec.tail_size:
        _launch(module, "append_window", (rows, -(-tokens // 32), 1), 256, args)
    _launch(module, "append_counters", (-(-rows // 128), 1, 1), 128, args, ctypes.c_int(rows))
