"""The constants of a compilation: the macros that describe a layer to `attend.cu` and `append.cu`.

A format contributes two C++ structs for attention (as keys, as values; see `affine_keys.cuh`, `affine_values.cuh`) and
one for packing. `needs.Needs` describes the resources that they need. No function in this file depends on a particular
format.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import math
from typing import NamedTuple

import torch

from ...formats import fragment
from ...storage.layer_spec import LayerSpec
from ...storage.transforms import Fused, base_order, hadamard
from . import format_structs
from .arguments import AppendArgs, AttendArgs, StepArgs, TransformArgs
from .memory import Memory, memory
from .needs import Needs, slices

#: bytes of shared memory: taken by a CTA in addition to its request; of a multiprocessor of an H100 or H200
RESERVED, SHARED = 1024 + 512, 228 * 1024
#: keys and values of the window get separate buffers (a wide window) if these leave room for at least this many warps. On an
#: H100 only the window limits the number of warps, and the kernels were measured there with wide windows
ENOUGH_WARPS = 6
#: the same for head sizes above 128, whose wide windows take twice as much memory
ENOUGH_WARPS_WIDE = 8
#: warp groups get whole rows only if this fraction of their time or more is used
MIN_UTILIZATION = 0.93
#: warps of a CTA of `append.cu`
APPEND_WARPS = 8


class NoRoomError(ValueError):
    """The GPU's shared memory is too small for a layer."""


class KernelShape(NamedTuple):
    """The shape of the attend kernel. A multiprocessor runs one CTA."""

    #: tokens of a KV tile
    kv_tile: int
    #: warps per warp group
    warps: int
    #: warp groups per CTA
    warp_groups: int
    #: tiles of eight query rows
    row_tiles: int
    #: whether at most four query rows use every other column
    spread: bool = False
    #: whether keys and values of the full-precision window share one buffer
    narrow: bool = False


class Sinks(enum.IntEnum):
    """The attention sinks of a call (`Sinks` in `outputs.cuh`)."""

    NONE = 0
    MODEL_DTYPE = 1
    FLOAT32 = 2


class Schedule(enum.Enum):
    """How rows (sequence x KV head) are assigned to warp groups (`plan.cuh`)."""

    WORK_RANGES = enum.auto()
    """the work of all rows is cut into equal ranges; rows may have different lengths"""
    ROW_SPLITS = enum.auto()
    """each row has its own warp groups"""
    WHOLE_ROWS = enum.auto()
    """each warp group has its own rows"""


class Assignment(NamedTuple):
    """A schedule, and its count: warp groups per row (`ROW_SPLITS`), or rows per warp group (`WHOLE_ROWS`)."""

    schedule: Schedule
    count: int = 0

    @property
    def encoded(self) -> int:
        """The argument `assignment` of the kernel. `Args` in `common.cuh` decodes it."""
        return -self.count if self.schedule is Schedule.WHOLE_ROWS else self.count


def _sides(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype) -> tuple[Needs, Needs]:
    """The needs of keys and of values."""
    return (
        format_structs.needs(spec.key_format, head_dim_k, spec.page_size, dtype, False),
        format_structs.needs(spec.value_format, head_dim_v, spec.page_size, dtype, True),
    )


@functools.cache
def choose_shape(
    spec: LayerSpec,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    rows: int,
    heads: int = 1,
    processors: int = 132,
    shared: int = SHARED,
    per_head: bool = False,
) -> KernelShape:
    """Choose the kernel's shape: as many warps as registers and shared memory allow. If a wide window leaves room for few
    warps and a narrow one for more, the window is narrow.

    rows: query rows (heads x tokens) of a KV head. heads: KV heads of all sequences. shared: bytes of shared memory of a
    multiprocessor. per_head: whether each KV head has its own codebook.

    Raises:
        NoRoomError: there is no room even for one warp.
    """
    widest = max(head_dim_k, head_dim_v)
    # wide: queries and sums take so many registers that everything else gets fewer; wider: some of it does
    wide = widest > 192 or head_dim_k + head_dim_v > 320
    wider = head_dim_k + head_dim_v > 256
    row_tiles = 2 if rows > 8 and not wide else 1
    keys, values = sides = _sides(spec, head_dim_k, head_dim_v, dtype)
    bits, plain = max(side.bits for side in sides), not any(side.grouped for side in sides)
    # With two tiles of rows a loop over longer pieces has too many instructions: after another kernel they come from memory.
    long = row_tiles == 1 and not wide and spec.page_size >= 64
    kv_tile = 64 if long and bits <= 4 and plain else 32
    spread = rows <= 4
    # the number of warps that registers allow
    max_warps = 12 if row_tiles == 1 and not wide and plain and bits < (5 if wider else 16) else 8
    tables = keys.table + values.table
    max_warp_groups = 4 if not tables else 1 if per_head else 2

    def best_with(kv_tile: int, narrows: tuple[bool, ...]) -> KernelShape | None:
        best: tuple[float, ...] = (0.0,)
        chosen = None
        for narrow in narrows:
            if chosen is not None and chosen.warps * chosen.warp_groups >= (
                ENOUGH_WARPS_WIDE if wide else ENOUGH_WARPS
            ):
                break
            each = memory(keys, values, head_dim_k, head_dim_v, kv_tile, row_tiles, narrow)
            for warps, warp_groups in itertools.product((1, 2, 3, 4, 6, 8, 12), range(1, max_warp_groups + 1)):
                if (
                    each.cta(warps, warp_groups) + RESERVED > shared
                    or warps * warp_groups > max_warps
                    or warps % slices(widest)
                ):
                    continue
                slots = processors * warp_groups
                even = assign_rows(grid_size(slots, heads), heads).schedule is not Schedule.WORK_RANGES
                # a warp group that stores tokens also packs pages; if a warp group has many rows in sequence, other groups
                # fill its idle time
                packs = 32 * warps >= _packing_threads(sides, widest)
                rounds = math.ceil(heads / slots)
                score = (warps * warp_groups + 1.5 * even, packs, -narrow, -rounds, -warp_groups)
                if score > best:
                    best, chosen = score, KernelShape(kv_tile, warps, warp_groups, row_tiles, spread, narrow)
        return chosen

    chosen = best_with(kv_tile, (True,) if tables else (False, True))
    if chosen is not None and kv_tile == 64 and heads > processors * chosen.warp_groups:
        # Rows queue for warp groups. Smaller KV tiles may leave room for as many warps in more groups, so that all rows run
        # at once. (kivi-4 at 64 x 4k: 8.5 % faster on an H200. If rows would still queue, this was not timed, and nothing
        # changes.)
        smaller_tiles = best_with(32, (chosen.narrow,))
        if (
            smaller_tiles is not None
            and heads <= processors * smaller_tiles.warp_groups
            and smaller_tiles.warps * smaller_tiles.warp_groups == chosen.warps * chosen.warp_groups
        ):
            chosen = smaller_tiles
    if chosen is None:
        required = (
            memory(keys, values, head_dim_k, head_dim_v, kv_tile, row_tiles, True).cta(slices(widest), 1) + RESERVED
        )
        raise NoRoomError(
            f"needs {-(-required // 1024)} KiB of shared memory for keys {spec.key_format.name!r} and values "
            f"{spec.value_format.name!r} at head_dim={head_dim_k}, and this GPU has {shared // 1024} KiB"
        )
    return chosen


def why_not(
    spec: LayerSpec, widths: tuple[int, int] | None, dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """Why the kernels cannot serve a layer, or `None` if they can. widths: head_dim of keys and of values; `None`:
    any."""
    if (reason := format_structs.why_not(*spec.formats, widths)) is not None or widths is None:
        return reason
    stored = spec.with_layouts(*fragment.LAYOUTS)
    try:
        stored.validate(*widths)
    except ValueError as error:
        return f"does not take these heads: {error}"
    if dtype is None:
        return None
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    try:
        choose_shape(stored, *widths, dtype, rows=16, shared=shared)
    except NoRoomError as error:  # codebooks are large, and some GPUs have little shared memory
        return str(error)
    return None


def can_append(spec: LayerSpec, head_dim_k: int, head_dim_v: int, shape: KernelShape) -> bool:
    """Whether the attend kernel also stores the token of a step. A warp group needs shared memory for a page's metadata,
    and a thread per channel if the format requires it. False if tokens go straight into pages: encoding a token at the end
    of every step takes 3 us longer than a second launch (H200)."""
    widest = max(head_dim_k, head_dim_v)
    sides = _sides(spec, head_dim_k, head_dim_v, torch.float16)
    warp_group = _memory(sides, head_dim_k, head_dim_v, shape).warp_group(shape.warps)
    return (
        32 * shape.warps >= _packing_threads(sides, widest)
        and spec.page_size * widest // 4 <= warp_group
        and not spec.direct
    )


def _packing_threads(sides: tuple[Needs, Needs], widest: int) -> int:
    """Threads that pack a page."""
    return widest if any(side.by_thread for side in sides) else 32


def shared_bytes(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype, shape: KernelShape) -> int:
    """Bytes of shared memory of a CTA of the attend kernel."""
    sides = _sides(spec, head_dim_k, head_dim_v, dtype)
    return _memory(sides, head_dim_k, head_dim_v, shape).cta(shape.warps, shape.warp_groups)


def _memory(sides: tuple[Needs, Needs], head_dim_k: int, head_dim_v: int, shape: KernelShape) -> Memory:
    return memory(*sides, head_dim_k, head_dim_v, shape.kv_tile, shape.row_tiles, shape.narrow)


def grid_size(slots: int, heads: int) -> int:
    """The number of warp groups for `heads` KV heads if `slots` warp groups can run at once. It is a multiple of `heads` if
    that leaves few slots idle, because then the work of a warp group is in one head."""
    even = slots // heads * heads
    return even if even >= 0.9 * slots else slots


def assign_rows(warp_groups: int, heads: int) -> Assignment:
    """The assignment of `heads` KV heads (of all sequences) of one length to warp groups: `WORK_RANGES` if neither number
    divides the other evenly."""
    if warp_groups % heads == 0:
        return Assignment(Schedule.ROW_SPLITS, warp_groups // heads)
    each = -(-heads // warp_groups)
    if each > 1 and heads >= MIN_UTILIZATION * each * warp_groups:
        return Assignment(Schedule.WHOLE_ROWS, each)
    return Assignment(Schedule.WORK_RANGES)


def _shared_defines(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype) -> dict[str, object]:
    part_k, part_v = spec.part_bytes(head_dim_k, head_dim_v, dtype)
    return {
        "DK": head_dim_k,
        "DV": head_dim_v,
        "PAGE": spec.page_size,
        "PAGE_BYTES": part_k + part_v,
        "VALUE_AT": part_k,
        "BF16": int(dtype == torch.bfloat16),
        "DIRECT": int(spec.direct),
    }


def _as_macros(values: dict[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in values.items())


@functools.cache
def attend_defines(
    spec: LayerSpec,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    shape: KernelShape,
    has_mask: bool,
    sinks: Sinks,
    softcap: bool,
    transform: Fused | None = None,
    ordered: bool = False,
    appends: bool = False,
    per_head: bool = False,
    restores: bool = False,
    score_bias: bool = False,
) -> tuple[tuple[str, str], ...]:
    """The macros of `attend.cu`.

    Args:
        transform: the transform of queries and keys that the kernel applies.
        ordered: whether warps take work tiles in a fixed order.
        appends: whether the kernel also stores the new token.
        restores: whether the kernel rotates outputs back.
        score_bias: whether a number per query is added to all of its scores (`StepInputs.score_bias`).
    """
    keys, values = _sides(spec, head_dim_k, head_dim_v, dtype)
    return _as_macros(
        _shared_defines(spec, head_dim_k, head_dim_v, dtype)
        | {
            "KEY_HEADER": f'"{keys.header}"',
            "VALUE_HEADER": f'"{values.header}"',
            "KEY_FORMAT": keys.struct,
            "VALUE_FORMAT": values.struct,
            "KV_TILE": shape.kv_tile,
            "WARPS": shape.warps,
            "WARP_GROUPS": shape.warp_groups,
            "NT": shape.row_tiles,
            "SPREAD": int(shape.spread),
            "SLICES": slices(max(head_dim_k, head_dim_v)),
            "NARROW": int(shape.narrow),
            "SHARED_BYTES": shared_bytes(spec, head_dim_k, head_dim_v, dtype, shape),
            "ARGUMENT_BYTES": ctypes.sizeof(StepArgs if appends else AttendArgs),
            "HAS_MASK": int(has_mask),
            "SINKS": int(sinks),
            "SOFTCAP": int(softcap),
            "HAS_SCORE_BIAS": int(score_bias),
            "ORDERED": int(ordered),
            "APPENDS": int(appends),
            "SHARED_TABLES": int(not per_head),
            "FOLLOWS": int(spec.key_transform.product),
            "RESTORED": int(restores),
        }
        | (_encoder_macros(keys, values) if appends else {})
        | (_transform_macros(head_dim_k, transform) if transform else {"TRANSFORMED": 0})
    )


@functools.cache
def append_defines(
    spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype
) -> tuple[tuple[str, str], ...]:
    keys, values = _sides(spec, head_dim_k, head_dim_v, dtype)
    return _as_macros(
        _shared_defines(spec, head_dim_k, head_dim_v, dtype)
        | _encoder_macros(keys, values)
        | {"KV_TILE": 32, "NT": 1, "SPREAD": 0, "WARPS": APPEND_WARPS, "WARP_GROUPS": 1}
    )


def _encoder_macros(keys: Needs, values: Needs) -> dict[str, object]:
    return {
        "KEY_ENCODER_HEADER": f'"{keys.encoder_header}"',
        "VALUE_ENCODER_HEADER": f'"{values.encoder_header}"',
        "KEY_ENCODER": keys.encoder,
        "VALUE_ENCODER": values.encoder,
        "APPEND_ARGUMENT_BYTES": ctypes.sizeof(AppendArgs),
    }


def _transform_macros(head_dim: int, transform: Fused) -> dict[str, object]:
    base = base_order(head_dim) if transform.rotated else 1
    columns = (hadamard(base) < 0).T.tolist()
    return {
        "TRANSFORMED": 1,
        "FACTORS": "FACTORS_BEFORE" if transform.before else "FACTORS_AFTER" if transform.after else "NO_FACTORS",
        "ROTATED": int(transform.rotated),
        "BASE": base,
        "SIGNS": ",".join(str(sum(negative << p for p, negative in enumerate(column))) for column in columns),
        "NORM_BITS": int(torch.tensor(head_dim**-0.5, dtype=torch.float32).view(torch.int32)),
    }


#: of a CTA of `project.cu`: rows, threads, and columns of the matrix
PROJECT_ROWS, PROJECT_THREADS, PROJECT_COLUMNS = 16, 256, 32


@functools.cache
def project_defines(head_dim_k: int, head_dim_v: int, dtype: torch.dtype, values: Fused) -> tuple[tuple[str, str], ...]:
    """The macros of `project.cu`. values: their transform, without factors."""
    return _as_macros(
        {"DIM": head_dim_k, "DIM_V": head_dim_v, "BF16": int(dtype == torch.bfloat16), "NT": 1, "SPREAD": 0}
        | {"EACH": PROJECT_ROWS, "THREADS": PROJECT_THREADS, "COLUMNS": PROJECT_COLUMNS}
        | _transform_macros(head_dim_v, values)
    )


@functools.cache
def transform_defines(head_dim: int, dtype: torch.dtype, transform: Fused) -> tuple[tuple[str, str], ...]:
    return _as_macros(
        {"DIM": head_dim, "BF16": int(dtype == torch.bfloat16), "NT": 1, "SPREAD": 0}
        | {"ARGUMENT_BYTES": ctypes.sizeof(TransformArgs)}
        | _transform_macros(head_dim, transform)
    )
