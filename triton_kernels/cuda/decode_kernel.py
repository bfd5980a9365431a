"""Launches `attend.cu` for few query rows, above all decode steps.

A `DecodeKernel` is compiled once for a layer and a shape of inputs. It also fills the kernel's argument, a structure, once.
Each step sets only the fields that change.

Words of this file: a *variant* is what a compilation depends on (`modules.AttendVariant`), a *module* a compiled and loaded
file (`nvrtc.Module`), a *store* a layer's tensors (`PagedStore`), and *append* the storing of new tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...storage.paged_store import LayerState, PagedStore
from ...storage.step import StepInputs
from ...storage.transforms import Fused
from ..config import FUSED_ROWS
from ..determinism import fixed_order
from ..toolchain import why_triton_cannot_launch
from .arguments import AttendArgs, Factors, StepArgs, address, factors, set_layer_fields, tables
from .geometry import Sinks, assign_rows, grid_size
from .modules import AttendVariant, attend_module, properties
from .needs import slices

DTYPES = (torch.float16, torch.bfloat16)
#: the kernel itself transforms queries and keys for up to this many query rows of a KV head. With more rows, each of its row
#: blocks (8 or 16 rows) would transform the keys again
MAX_TRANSFORMED_ROWS = 16
#: largest number of row blocks of a launch (the grid's second axis)
MAX_ROW_BLOCKS = 65535
#: number of launches since import, by kernel name: tests assert that kernels ran
launches: dict[str, int] = {}


def count_launch(kernel: str) -> None:
    """Count a launch."""
    name = f"{kernel}_kernel"
    launches[name] = launches.get(name, 0) + 1


def check_dtype(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"backend='cuda' computes in float16 and bfloat16, not in {x.dtype}; use backend='triton'")


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it whose channels are consecutive and whose tokens start at multiples of 16 bytes."""
    fits = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def counters_for(state: LayerState, count: int) -> torch.Tensor:
    """At least `count` int32 zeros, which every launch resets to zero: the layer's `scratch`. All launches of a layer can
    use it, because they are serial, and captured graphs keep its address. Many query rows need more counters and get a new
    tensor."""
    return state.scratch if count <= state.scratch.numel() else state.scratch.new_zeros(count)


class KernelTransform(NamedTuple):
    """The transform that the kernel applies to queries and keys before it attends."""

    fused: Fused
    factors: Factors


def kernel_transform(rows: int, store: PagedStore) -> KernelTransform | None:
    """The transform that the kernel applies to queries and keys, or `None`. rows: number of query rows of a KV head."""
    spec, fused = store.spec, store.spec.key_transform.fused
    if spec.untransformed or spec.key_transform.identity or fused is None or rows > MAX_TRANSFORMED_ROWS:
        return None
    return KernelTransform(fused, factors(fused, store.tensors()["key_transform"]))


def attend_variant(
    inputs: StepInputs, tokens: int, store: PagedStore, transform: KernelTransform | None, append: bool
) -> AttendVariant:
    """The variant for inputs like these, but with `tokens` tokens. append: whether the kernel should also store the
    tokens."""
    q, k, v, spec = inputs.queries, inputs.k, inputs.v, store.spec
    rows, head_rows = q.shape[1] // k.shape[1] * tokens, k.shape[0] * k.shape[1]
    return AttendVariant(
        spec=spec,
        head_dim_k=k.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        rows=min(rows, 16),
        heads=head_rows,
        mask=inputs.mask is not None,
        sinks=_sinks(inputs),
        softcap=inputs.softcap is not None,
        score_bias=spec.key_transform.centered and inputs.shifts_matter,
        transform=transform and transform.fused,
        ordered=fixed_order(),
        append=append,
        per_head=tables(store).per_head,
        restores=spec.value_transform.own_inverse(v.shape[-1]),
        device=q.device,
    )


def _sinks(inputs: StepInputs) -> Sinks:
    if inputs.sinks is None:
        return Sinks.NONE
    return Sinks.MODEL_DTYPE if inputs.sinks.dtype == inputs.queries.dtype else Sinks.FLOAT32


class DecodeKernel:
    """The kernel for one shape of inputs of one layer.

    `kernel_for` caches it with the layer. It holds addresses of the layer's tensors, so the layer drops it when tensors
    are replaced.

    Args:
        inputs: an example of that shape.
        append: whether the kernel should also store the token, if it can (one token).

    Attributes:
        appends: whether it stores the token.
        restores: whether it maps outputs back, as the value transform requires.
        transform: the transform that it applies to queries and keys, or `None`.

    Raises:
        ValueError: the kernel does not compute in this dtype, or there are too many tokens.
    """

    def __init__(self, inputs: StepInputs, store: PagedStore, append: bool):
        q, k = inputs.queries, inputs.k
        check_dtype(q)
        (batch, q_heads, tokens, _), heads, head_dim_v = q.shape, k.shape[1], inputs.v.shape[-1]
        state, spec, rows = store.state, store.spec, inputs.query_rows
        self.transform = kernel_transform(rows, store)
        variant = attend_variant(inputs, tokens, store, self.transform, append)
        self.restores = variant.restores
        self._module, shape, self._shared, self.appends = attend_module(variant)
        row_block = 8 * shape.row_tiles
        row_blocks = -(-rows // row_block)
        if row_blocks > MAX_ROW_BLOCKS:
            raise ValueError(
                f"a chunk of {tokens} tokens is too long; allowed here: {MAX_ROW_BLOCKS * row_block // (q_heads // heads)} "
                f"(prefill_chunk_size=...), because {why_triton_cannot_launch()}"
            )
        # no more warp groups than can have work: pages of 128 tokens, window segments of 32 tokens, and a rest of each, for
        # rows of the largest length. Only the GPU knows the lengths of rows
        pages, head_rows = state.page_address.shape[1], batch * heads
        max_warp_groups = head_rows * (pages * spec.page_size // 128 + (spec.sink + spec.tail_size + tokens) // 32 + 2)
        slots = max(properties(q.device).multi_processor_count * shape.warp_groups // row_blocks, 1)
        warp_groups = min(grid_size(slots, head_rows), max_warp_groups)
        self._grid = -(-warp_groups // shape.warp_groups), row_blocks, 1
        self._threads = 32 * shape.warp_groups * shape.warps
        # query rows whose partial results are merged through global memory. A single warp group shares no row with another
        shared_rows = 0 if warp_groups == 1 else row_blocks * (warp_groups + head_rows) * row_block
        self._out_shape = batch, tokens, q_heads, head_dim_v
        self._partial_floats = shared_rows * (head_dim_v + 2 * slices(head_dim_v))
        # a counter for each row block and row, and one of the warp groups that have read the layer's counters
        self._state, self._arrived_index, self._num_counters = state, row_blocks * head_rows, row_blocks * head_rows + 1
        self._strides: tuple | None = None

        args = self._args = StepArgs() if self.appends else AttendArgs()
        set_layer_fields(args, store)
        args.batch, args.heads, args.groups, args.tokens = batch, heads, q_heads // heads, tokens
        args.warp_groups, args.assignment = warp_groups, assign_rows(warp_groups, head_rows).encoded
        if self.transform is not None:
            args.q_scale, args.k_scale, args.scale_h = self.transform.factors
        if isinstance(args, StepArgs):
            self._append_args = args.append
            set_layer_fields(self._append_args, store)
            self._append_args.heads, self._append_args.tokens = heads, tokens

    def __call__(self, inputs: StepInputs, early: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel. Returns the output `[B, S, Hq, D]`, and the new keys as they are stored. early: as for
        `Module.launch`."""
        q, k, v, mask, scaling, softcap, sinks, _, score_bias = inputs
        assert q is not None
        args, strides = self._args, (q.stride(), k.stride(), v.stride(), mask is not None and mask.stride())
        if strides != self._strides or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            q, k, v = aligned(q), aligned(k), aligned(v)
            self._set_strides(q, k, v, mask)
        if sinks is not None:
            sinks = sinks.contiguous() if sinks.dtype == q.dtype else sinks.float().contiguous()
        device, keys = q.device, k
        out = torch.empty(self._out_shape, dtype=q.dtype, device=device)
        partial = torch.empty(self._partial_floats, dtype=torch.float32, device=device)
        counters = counters_for(self._state, self._num_counters)
        if self.transform is not None:
            keys = torch.empty(k.shape, dtype=k.dtype, device=device)
            args.raw_k = k.data_ptr()
        args.q, args.k, args.v, args.out = q.data_ptr(), keys.data_ptr(), v.data_ptr(), out.data_ptr()
        args.mask, args.sinks, args.scaling = address(mask), address(sinks), scaling
        args.softcap = 1.0 if softcap is None else softcap
        args.score_bias = address(score_bias)
        args.partial, args.counters = partial.data_ptr(), counters.data_ptr()
        if isinstance(args, StepArgs):
            append = self._append_args
            append.k, append.v, append.mask = args.k, args.v, args.mask
            args.arrived = args.counters + 4 * self._arrived_index
        count_launch("attend")
        self._module.launch("attend", self._grid, self._threads, args, shared=self._shared, early=early)
        return out, keys

    def _set_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set the strides of these tensors: of sequences, heads and tokens."""
        self._strides = q.stride(), k.stride(), v.stride(), mask is not None and mask.stride()
        args = self._args
        args.q_b, args.q_h, args.q_s = q.stride()[:3]
        args.raw_b, args.raw_h, args.raw_s = k.stride()[:3]
        # the kernel writes transformed keys to a new contiguous tensor
        stored = k.stride()[:3] if self.transform is None else torch.empty(k.shape, device="meta").stride()[:3]
        args.k_b, args.k_h, args.k_s = stored
        args.v_b, args.v_h, args.v_s = v.stride()[:3]
        if mask is not None:
            args.mask_b, args.mask_s = mask.stride()
        if isinstance(args, StepArgs):
            append = self._append_args
            append.k_b, append.k_h, append.k_s = stored
            append.v_b, append.v_h, append.v_s = v.stride()[:3]
            append.mask_b = args.mask_b


def kernel_for(inputs: StepInputs, store: PagedStore, append: bool) -> DecodeKernel:
    """The kernel for inputs of this shape: the kernel that the layer has cached, or a new one. append: see `DecodeKernel`."""
    q, k, v, mask, _, softcap, sinks, *_ = inputs
    assert q is not None
    kind = (
        q.shape,
        q.dtype,
        mask is None,
        None if sinks is None else sinks.dtype,
        softcap is None,
        append,
        fixed_order(),
    )
    if (kernel := store.kernels.get(kind)) is None:
        kernel = DecodeKernel(inputs, store, append)
        # kernels for more query rows are not cached: there would be one per length
        if inputs.query_rows <= FUSED_ROWS["cuda"]:
            store.kernels[kind] = kernel
    return kernel
