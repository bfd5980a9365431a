"""`Operations` by CUDA kernels, with the meaning of `hf_lowbit_kv.storage.reference`.

A step of one token is one launch, which also transforms queries and keys. A transform by a full matrix is an earlier launch.

Triton's kernels serve many query rows and `read`. They are imported when they are first needed. If Triton cannot launch
kernels (`toolchain.why_triton_cannot_launch`), the decode kernel serves any number of query rows, though slowly, and the
reference serves `read`.

`attend` and `append` never wait for the GPU, so both can be captured in a CUDA graph. Only the first call of a kind
waits, because it loads the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ...storage import reference
from ...storage.layer_spec import LayerSpec
from ...storage.paged_store import PagedStore
from ...storage.reference import restored, transformed_with
from ...storage.step import Operations, StepInputs
from ...storage.transforms import Transform
from ..common import pages_due, real_tokens
from ..config import FUSED_ROWS
from ..toolchain import why_triton_cannot_launch
from .arguments import ProjectArgs, TransformArgs, address, append_args, factors
from .decode_kernel import aligned, attend_variant, check_dtype, count_launch, kernel_for, kernel_transform, launches
from .geometry import (
    APPEND_WARPS,
    PROJECT_COLUMNS,
    PROJECT_ROWS,
    PROJECT_THREADS,
    append_defines,
    project_defines,
    transform_defines,
)
from .modules import attend_macros, expect
from .nvrtc import Module, load


def _launch(module: Module, name: str, grid: tuple[int, int, int], threads: int, *args, shared: int = 0) -> None:
    count_launch(name)
    module.launch(name, grid, threads, *args, shared=shared)


def transform(
    q: torch.Tensor | None, x: torch.Tensor, transform: Transform, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`reference.transform` in one launch, for transforms that kernels can apply (`Transform.fused`)."""
    check_dtype(x)
    (batch, heads, tokens, head_dim), q_heads = x.shape, 0 if q is None else q.shape[1]
    x, q = aligned(x), None if q is None else aligned(q)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    queries = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, fused = batch * (q_heads + heads) * tokens, transform.fused
    if rows == 0:
        return queries, out
    assert fused is not None
    scales = factors(fused, tensors)
    args = TransformArgs(
        *(address(tensor) for tensor in (q, x, queries, out)),
        *(scales.queries, scales.keys),
        *((0, 0, 0) if q is None else q.stride()[:3]),
        *(*x.stride()[:3], rows, scales.stride, q_heads, heads, tokens),
    )
    module = load("transform.cu", transform_defines(head_dim, x.dtype, fused), x.device)
    _launch(module, "transform", (-(-rows // 4), 1, 1), 128, args)
    return queries, out


class CudaOperations(Operations):
    """Operations of layers that store keys and values."""

    launches = launches

    def attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        return self._attend(inputs, store, append=False)[0]

    def step(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """One launch for one token, if `geometry.can_append`."""
        out, unstored = self._attend(inputs, store, append=True)
        if unstored is not None:
            _append(unstored, store)
        return out

    def _attend(self, inputs: StepInputs, store: PagedStore, append: bool) -> tuple[torch.Tensor, StepInputs | None]:
        """The output; and the transformed inputs, or `None` if the kernel has stored it. append: whether it should; not
        every kernel can."""
        if inputs.query_rows > FUSED_ROWS["cuda"] and why_triton_cannot_launch() is None:
            from .. import prompt

            inputs = _transformed(inputs, store)
            return restored(prompt.attend(inputs, store), store, transform), inputs
        kernel = kernel_for(inputs, store, append and inputs.tokens == 1)
        projects = kernel.transform is None and _projects(inputs, store.spec)
        if not store.spec.untransformed:
            inputs = _transformed(inputs, store, keys=kernel.transform is None)
        out, keys = kernel(inputs, early=projects)
        if not kernel.restores:
            out = restored(out, store, transform)
        return out, None if kernel.appends else inputs._replace(k=keys)

    def append(self, inputs: StepInputs, store: PagedStore) -> None:
        _append(transformed_with(transform, inputs._replace(q=None), store), store)

    def read(self, store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read(store, max_length)

    def expect_steps(self, inputs: StepInputs, store: PagedStore, masked: bool) -> None:
        """Compile the kernels that store this prompt, and those of the decode steps, during prefill."""
        k, v = inputs.k, inputs.v
        expect("append.cu", append_defines(store.spec, k.shape[-1], v.shape[-1], k.dtype), k.device)
        fused = kernel_transform(inputs.queries.shape[1] // k.shape[1], store)
        variant = attend_variant(inputs, 1, store, fused, append=True)._replace(mask=masked)
        expect("attend.cu", attend_macros(variant), k.device)


OPERATIONS = CudaOperations()


def read(store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Operations.read`, by Triton's kernels."""
    if why_triton_cannot_launch() is not None:
        return reference.OPERATIONS.read(store, max_length)
    from ..read import read as unpacked

    return unpacked(store, max_length)


def _transformed(inputs: StepInputs, store: PagedStore, keys: bool = True) -> StepInputs:
    """The transformed inputs. keys: whether to transform its queries and keys here; otherwise the attend kernel does."""
    if keys and _projects(inputs, store.spec):
        return _project(inputs, store)
    return transformed_with(transform, inputs, store, keys)


def _projects(inputs: StepInputs, spec: LayerSpec) -> bool:
    """Whether one launch multiplies queries and keys by their matrices, and transforms the values."""
    fused = spec.value_transform.fused
    some_rows = inputs.k.shape[0] * inputs.query_rows > 0
    return spec.key_transform.product and some_rows and fused is not None and not fused.scaled


def _project(inputs: StepInputs, store: PagedStore) -> StepInputs:
    """`reference.transformed`, in one launch."""
    (q, k, v), spec = (inputs.queries, *inputs[1:3]), store.spec
    check_dtype(q)
    (batch, q_heads, tokens, head_dim_k), heads, head_dim_v = q.shape, k.shape[1], v.shape[-1]
    q, k, v, fused = aligned(q), aligned(k), aligned(v), spec.value_transform.fused
    assert fused is not None
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    matrix, queries, *center = store.tensors()["key_transform"]
    score_bias = None
    if spec.key_transform.centered and inputs.shifts_matter:
        score_bias = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    args = ProjectArgs(
        *(address(x) for x in (q, k, v, *outs, queries, matrix, center[0] if center else None, score_bias)),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], matrix.stride(0) if matrix.shape[0] > 1 else 0),
        *(batch, q_heads, heads, tokens),
    )
    rows, slices = batch * tokens, -(-head_dim_k // PROJECT_COLUMNS)
    products = heads * slices * (-(-rows * (q_heads // heads) // PROJECT_ROWS) - (-rows // PROJECT_ROWS))
    blocks = products + (-(-rows * heads // (PROJECT_THREADS // 32)) if fused.rotated else 0)
    module = load("project.cu", project_defines(head_dim_k, head_dim_v, q.dtype, fused), q.device)
    _launch(module, "project", (blocks, 1, 1), PROJECT_THREADS, args)
    return inputs._replace(q=outs[0], k=outs[1], v=outs[2] if fused.rotated else v, score_bias=score_bias)


def _append(inputs: StepInputs, store: PagedStore) -> None:
    """`append` for transformed keys and values."""
    (k, v, mask), state, spec = inputs[1:4], store.state, store.spec
    check_dtype(k)
    batch, heads, tokens, head_dim_k = k.shape
    if tokens == 0:
        return
    k, v = aligned(k), aligned(v)
    module = load("append.cu", append_defines(spec, head_dim_k, v.shape[-1], k.dtype), k.device)
    pages = state.page_address.shape[1]
    order, count = (None, None) if mask is None or tokens == 1 else real_tokens(mask)
    args = append_args(StepInputs(None, k, v, mask), store, order, count)
    rows = batch * heads
    if tokens == 1:
        _launch(module, "append_one", (rows, 1, 1), 32 * APPEND_WARPS, args)
        return
    due = pages_due(spec, tokens, pages)
    _launch(module, "append_pages", (rows, due, 2), 32 * APPEND_WARPS, args)
    if spec.sink or spec.tail_size:
        _launch(module, "append_window", (rows, -(-tokens // 32), 1), 32 * APPEND_WARPS, args)
    _launch(module, "append_counters", (-(-rows // 128), 1, 1), 128, args, ctypes.c_int(rows))
