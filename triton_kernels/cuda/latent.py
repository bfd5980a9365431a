"""`Operations` for latents (MLA) by CUDA kernels, with the meaning of `hf_lowbit_kv.storage.reference`.

`latent.cu` attends to content in FP8 with few query rows, and `latent_wide.cu` with many on Hopper GPUs. The latter also
quantizes queries and weights; `eval/benchmarks/snapmla_pipeline.py` is its reference. `latent_dense.cu` attends to
content in the model's dtype.

Triton's kernels (`prompt.py`) serve more than `TOKENS` new tokens, more than `DENSE_ROWS` query rows over content
in the model's dtype, and `read`. If Triton cannot launch kernels (`toolchain.why_triton_cannot_launch`), the reference does.
All other steps are two launches, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from ...formats import Dense, Fp8, core_matrices
from ...storage import reference
from ...storage.layer_spec import LayerSpec
from ...storage.paged_store import PagedStore
from ...storage.step import Operations, StepInputs
from .. import prompt
from ..common import real_tokens
from ..toolchain import why_triton_cannot_launch
from .arguments import address
from .cuda_entry_points import read
from .decode_kernel import aligned, launches
from .modules import properties
from .nvrtc import Module, load

#: largest number of query tokens that the kernels serve
TOKENS = 8
#: query rows (heads x tokens) of a tile; partial results in memory have tiles of this size too
ROWS = 16
#: smallest number of query rows for the wide kernel
WIDE_ROWS = 16
#: the compute capability of the wide kernel
WIDE_CAPABILITY = (9, 0)
#: shapes of the wide kernel, by query rows: stages of 64 tokens in shared memory, and CTAs per multiprocessor
WIDE_SHAPES = {16: (4, 1), 32: (4, 1), 64: (4, 1)}
#: largest shared memory of a CTA on Hopper, in bytes
WIDE_SHARED = 227 * 1024
#: largest number of query rows over content in the model's dtype. The kernel reads the content once for every 16 rows;
#: `prompt.py` unpacks it once for all rows
DENSE_ROWS = 256
#: shapes of `latent_dense.cu`, the fastest first: CTAs per multiprocessor, and stages of 32 tokens
DENSE_SHAPES = ((1, 3), (1, 2))
#: bytes of shared memory that a CTA takes in addition to its request
RESERVED = 1024
#: largest number of splits of a sequence
MAX_SPLITS = 512
#: fixed cost of a CTA (queries, first copies, partial results), in units of a KV tile of `LatentLaunch.tokens` tokens
CTA_COST = 8
THREADS = 128
#: use the conversion instruction if the GPU has one
CONVERT = True
#: with this many query rows (of all sequences) or more, a warp merges a row; otherwise a CTA merges a slice of a row's
#: channels
MERGE_ROWS = 512
RANKS = range(64, 513, 64)
ROPES = (16, 32, 64, 128)


class _Args(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in "q c r mask pool address length paged lost out partial sums order count".split()
        ),
        *((name, ctypes.c_longlong) for name in "q_b q_h q_s c_b c_s r_b r_s mask_b mask_s".split()),
        *((name, ctypes.c_int) for name in "heads tokens pages splits room stores".split()),
        ("scaling", ctypes.c_float),
    ]


def why_not(
    spec: LayerSpec, widths: tuple[int, int] | None, dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """`geometry.why_not` for latents; widths: those of the latent and of its RoPE part."""
    if spec.with_layouts("planar-1", "planar-1").formats not in ((Fp8(), Dense()), (Dense(), Dense())):
        names = " / ".join(repr(fmt.name) for fmt in spec.formats)
        return f"has kernels for latents in formats 'fp8' / 'dense' and 'dense' / 'dense', not in {names}"
    if not spec.direct or spec.sink:
        return f"has kernels for latents without a window, not for sink={spec.sink}, residual={spec.residual}"
    if spec.page_size % 64:
        return f"has kernels for latents in pages of 64, 128 or 256 tokens, not of {spec.page_size}"
    if widths is not None and (widths[0] not in RANKS or widths[1] not in ROPES):
        return (
            f"has kernels for a latent rank of 64 to 512 in steps of 64 and {ROPES} RoPE channels, not for {widths[0]} and "
            f"{widths[1]}"
        )
    if widths is not None and _exact(spec):
        return why_not_dense(*widths, properties(device).shared_memory_per_multiprocessor)
    return None


def _exact(spec: LayerSpec) -> bool:
    """Whether the content is stored in the model's dtype."""
    return isinstance(spec.key_format, Dense)


def _dense_bytes(rank: int, rope: int, stages: int) -> int:
    """Shared memory of a CTA of `latent_dense.cu`: weights and maxima of 16 query rows, and the stages."""
    return 32 * 16 * 2 + 2 * 16 * 4 + stages * 32 * (rank + rope) * 2


def dense_shape(rank: int, rope: int, shared: int) -> tuple[int, int] | None:
    """The first of `DENSE_SHAPES` that fits into a multiprocessor with `shared` bytes of shared memory."""
    fits = (
        (ctas, stages)
        for ctas, stages in DENSE_SHAPES
        if ctas * (_dense_bytes(rank, rope, stages) + RESERVED) <= shared
    )
    return next(fits, None)


def why_not_dense(rank: int, rope: int, shared: int) -> str | None:
    """Why `latent_dense.cu` cannot serve such latents on a multiprocessor with `shared` bytes of shared memory, or
    `None`."""
    if dense_shape(rank, rope, shared) is not None:
        return None
    required = _dense_bytes(rank, rope, DENSE_SHAPES[-1][1]) + RESERVED
    return f"needs {-(-required // 1024)} KiB of shared memory for latents of {rank} + {rope} channels, not {shared // 1024}"


@functools.cache
def defines(spec: LayerSpec, rank: int, rope: int, dtype: torch.dtype, convert: bool) -> tuple[tuple[str, str], ...]:
    """The macros of a compilation. convert: use the conversion instruction.

    Raises:
        ValueError: the pages have a layout that the kernels do not read.
    """
    if spec.formats != spec.with_layouts(core_matrices.LAYOUT, core_matrices.LAYOUT).formats:
        names = " / ".join(repr(fmt.name) for fmt in spec.formats)
        raise ValueError(
            f"backend='cuda' stores latents in layout {core_matrices.LAYOUT!r}, not as {names}: see "
            "backends.choice.storage_spec"
        )
    content = {field.name: field.offset for field in spec.key_format.fields(rank, spec.page_size, dtype)}
    parts = spec.part_bytes(rank, rope, dtype)
    values = {
        "RANK": rank,
        "ROPE": rope,
        "PAGE_TOKENS": spec.page_size,
        "DENSE_CONTENT": int(_exact(spec)),
        "SCALE_AT": content.get("scale", 0),
        "ROPE_AT": parts[0],
        "CONVERT": int(convert),
        "BF16": int(dtype == torch.bfloat16),
        "MAX_TOKENS": TOKENS,
        "MAX_SPLITS": MAX_SPLITS,
        "NT": 2,
        "SPREAD": 0,
    }
    return tuple((name, str(value)) for name, value in values.items())


def converts(device: torch.device) -> bool:
    """Whether e4m3 is converted by the conversion instruction."""
    return CONVERT and torch.cuda.get_device_capability(device) >= (8, 9)


class LatentLaunch(NamedTuple):
    """The launch of a step's attention."""

    module: Module
    kernel: str
    threads: int
    shared: int
    rows: int
    """query rows per CTA"""
    ctas: int
    """CTAs per multiprocessor"""
    tokens: int
    """smallest number of tokens of a split"""


def why_not_wide(rank: int, rows: int, device: torch.device) -> str | None:
    """Why the wide kernel cannot attend for `rows` query rows (heads x tokens), or `None`."""
    if (capability := torch.cuda.get_device_capability(device)) != WIDE_CAPABILITY:
        return f"needs compute capability {WIDE_CAPABILITY}, not {capability}"
    if rank % 128:
        return f"needs a latent rank that is a multiple of 128, not {rank}"
    return None if rows >= WIDE_ROWS else f"is for {WIDE_ROWS} query rows and more, not for {rows}"


def plan(spec: LayerSpec, rank: int, rope: int, dtype: torch.dtype, rows: int, device: torch.device) -> LatentLaunch:
    """The compiled kernel that attends for `rows` query rows."""
    if _exact(spec):
        module, shared = _module(spec, rank, rope, dtype, device)
        ctas, _ = _dense_shape(rank, rope, device)
        return LatentLaunch(module, "latent_dense_attend", THREADS, shared, ROWS, ctas, tokens=128)
    if why_not_wide(rank, rows, device) is not None:
        module, shared = _module(spec, rank, rope, dtype, device)
        return LatentLaunch(module, "latent_attend", THREADS, shared, ROWS, ctas=2, tokens=128)
    columns = min(64, max(16, 1 << (rows - 1).bit_length()))
    stages, ctas = WIDE_SHAPES[columns]
    return _wide_plan(spec, rank, rope, dtype, columns, wide_stages(rank, rope, columns, stages), ctas, device)


def wide_stages(rank: int, rope: int, columns: int, max_stages: int) -> int:
    """The number of stages, `max_stages` at most, that fit into shared memory with queries, weights and per-column data."""
    fixed = columns * (rank + 2 * rope + 8 * 16 + 14 * 4) + 8 * max_stages
    return min(max_stages, (WIDE_SHARED - fixed) // (64 * (rank + 2 * rope + 4)))


@functools.cache
def _wide_plan(
    spec: LayerSpec,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    columns: int,
    stages: int,
    ctas: int,
    device: torch.device,
) -> LatentLaunch:
    shape_macros = ("COLUMNS", str(columns)), ("STAGES", str(stages)), ("CTAS", str(ctas))
    module = load(
        "latent_wide.cu", (*defines(spec, rank, rope, dtype, True), *shape_macros), device, arch_specific=True
    )
    shared = module.integer("latent_wide_shared_bytes")
    return LatentLaunch(module, "latent_wide_attend", 256, shared, columns, ctas, tokens=128)


@functools.cache
def _module(spec: LayerSpec, rank: int, rope: int, dtype: torch.dtype, device: torch.device) -> tuple[Module, int]:
    """The module with the kernels that store, merge, and attend with few query rows; the shared memory of its attend
    kernel, in bytes."""
    if _exact(spec):
        ctas, stages = _dense_shape(rank, rope, device)
        shape_macros = ("CTAS", str(ctas)), ("STAGES", str(stages))
        module = load("latent_dense.cu", (*defines(spec, rank, rope, dtype, converts(device)), *shape_macros), device)
        return module, module.integer("latent_dense_shared_bytes")
    module = load("latent.cu", defines(spec, rank, rope, dtype, converts(device)), device)
    return module, module.integer("latent_shared_bytes")


def _dense_shape(rank: int, rope: int, device: torch.device) -> tuple[int, int]:
    dense_sizes = dense_shape(rank, rope, shared := properties(device).shared_memory_per_multiprocessor)
    if dense_sizes is None:
        raise ValueError(f"backend='cuda' {why_not_dense(rank, rope, shared)}")
    return dense_sizes


def _launch(
    module: Module,
    name: str,
    grid: tuple[int, int, int],
    args: _Args,
    *more_args,
    threads: int = THREADS,
    shared: int = 0,
) -> None:
    launches[name] = launches.get(name, 0) + 1
    module.launch(name, grid, threads, args, *more_args, shared=shared)


class CudaLatentOperations(Operations):
    """Operations of layers that store latents. k is the new tokens' content `[B, 1, S, rank]`, v their RoPE part `[B, 1, S,
    rope]`, and q are absorbed queries `[B, Hq, S, rank + rope]`."""

    launches = launches

    def attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        return _step(inputs, store, storing=False)

    def step(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """In two launches."""
        return _step(inputs, store, storing=True)

    def append(self, inputs: StepInputs, store: PagedStore) -> None:
        _append(inputs, store)

    def read(self, store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read(store, max_length)


OPERATIONS = CudaLatentOperations()


def _step(inputs: StepInputs, store: PagedStore, storing: bool) -> torch.Tensor:
    state, spec = store.state, store.spec
    q, k, v, mask, scaling, softcap, sinks, *_ = inputs
    assert q is not None
    (batch, heads, tokens, _), rank, rope = q.shape, k.shape[-1], v.shape[-1]
    too_many_rows = _exact(spec) and heads * tokens > DENSE_ROWS
    if tokens > TOKENS or too_many_rows or softcap is not None or sinks is not None:
        out = (prompt.attend if why_triton_cannot_launch() is None else reference.OPERATIONS.attend)(inputs, store)
        if storing:
            _append(inputs, store)
        return out
    q, k, v, device = aligned(q), aligned(k), aligned(v), q.device
    rows, pages = heads * tokens, state.page_address.shape[1]
    chosen = plan(spec, rank, rope, q.dtype, rows, device)
    tiles, row_blocks = -(-rows // ROWS), -(-rows // chosen.rows)
    splits = split_count(chosen, properties(device).multi_processor_count, batch * row_blocks, pages * spec.page_size)
    partial = torch.empty(batch * tiles * splits * ROWS * rank, dtype=torch.float32, device=device)
    sums = torch.empty(batch * tiles * splits * 2 * ROWS, dtype=torch.float32, device=device)
    out = torch.empty(batch, tokens, heads, rank, dtype=q.dtype, device=device)
    stored = state.pool[0], state.page_address, state.length, state.paged, state.lost
    args = _Args(
        *(address(x) for x in (q, k, v, mask, *stored, out, partial, sums, None, None)),
        *(*q.stride()[:3], k.stride(0), k.stride(2), v.stride(0), v.stride(2)),
        *((0, 0) if mask is None else mask.stride()),
        *(heads, tokens, pages, splits, spec.room(pages), int(storing), scaling),
    )
    _launch(
        chosen.module, chosen.kernel, (splits, batch, row_blocks), args, threads=chosen.threads, shared=chosen.shared
    )
    module, _ = _module(spec, rank, rope, q.dtype, device)
    if rank % 128 == 0 and batch * rows >= MERGE_ROWS:
        _launch(module, "latent_merge_rows", (-(-rows // 4) + int(storing), batch, 1), args)
    else:
        slices = rank // (128 if rank % 128 == 0 else 64)  # `SLICE` in latent_merge.cuh
        _launch(module, "latent_merge", (rows + int(storing), batch, slices), args)
    return out


def split_count(chosen: LatentLaunch, processors: int, programs: int, tokens: int) -> int:
    """The number of splits of each of `programs` (sequences x row blocks)."""
    return _splits(processors * chosen.ctas, programs, max(tokens // chosen.tokens, 1))


@functools.lru_cache(4096)
def _splits(slots: int, programs: int, kv_tiles: int) -> int:
    """The number of splits with which all programs finish soonest, if `slots` CTAs run at a time and a program has
    `kv_tiles` KV tiles. A last wave of few CTAs leaves most of the GPU idle, but every CTA has a fixed cost."""

    def time(splits: int) -> int:
        return -(-programs * splits // slots) * (-(-kv_tiles // splits) + CTA_COST)

    return min(range(1, min(kv_tiles, MAX_SPLITS) + 1), key=time)


def _append(inputs: StepInputs, store: PagedStore) -> None:
    (k, v, mask), state, spec = inputs[1:4], store.state, store.spec
    batch, _, tokens, rank = k.shape
    if tokens == 0:
        return
    k, v = aligned(k), aligned(v)
    module, _ = _module(spec, rank, v.shape[-1], k.dtype, k.device)
    order, count = (None, None) if mask is None else real_tokens(mask)
    pages = state.page_address.shape[1]
    stored = state.pool[0], state.page_address, state.length, state.paged, state.lost
    args = _Args(
        *(address(x) for x in (None, k, v, None, *stored, None, None, None, order, count)),
        *(0, 0, 0, k.stride(0), k.stride(2), v.stride(0), v.stride(2), 0, 0),
        *(1, tokens, pages, 1, spec.room(pages), 1, 1.0),
    )
    _launch(module, "latent_append", (tokens, batch, 1), args)
    _launch(module, "latent_append_counters", (-(-batch // THREADS), 1, 1), args, ctypes.c_int(batch))
