"""The constants of a compilation: the macros that tell `attend.cu` and `append.cu` about a layer.

A format contributes two C++ structs for attention (as keys, as values; see `affine_keys.cuh`, `affine_values.cuh`) and
one for packing, and says what these need (`needs.Needs`). Nothing here knows a format by name.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import NamedTuple

import torch

from ...formats import fragment
from ...storage.paged_store import LayerSpec
from ...storage.transforms import Fused, base_order, hadamard
from . import format_structs
from .arguments import AppendArgs, AttendArgs, StepArgs, TransformArgs
from .memory import Memory, memory
from .needs import Needs, slices

#: bytes of shared memory that a block takes beyond what it asks for; bytes that a multiprocessor of an H100 or H200 has
RESERVED, SHARED = 1024 + 512, 228 * 1024
#: with at least this many warps a wide window stays. Only the window bounds their number on an H100, which was measured
#: with wide windows
ENOUGH_WARPS = 6
#: the same for head sizes above 128, whose wide windows take twice as much memory
ENOUGH_WIDE = 8
#: whole rows are dealt out to teams only if at least this part of the teams' time is used
FULL = 0.93
#: warps of a block that stores tokens
APPEND_WARPS = 8


class NoRoomError(ValueError):
    """The GPU's shared memory is too small for a layer."""


class Choice(NamedTuple):
    """How the attend kernel is laid out: tokens of a piece, warps of a team, teams of a block of threads (a
    multiprocessor runs one block), groups of eight query rows; whether at most four rows use every other column;
    whether keys and values of the window take turns in one place."""

    piece: int
    warps: int
    teams: int
    row_tiles: int
    spread: bool = False
    narrow: bool = False


def _sides(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype) -> tuple[Needs, Needs]:
    """The needs of keys and of values."""
    return (
        format_structs.needs(spec.key_format, head_dim_k, spec.page_size, dtype, False),
        format_structs.needs(spec.value_format, head_dim_v, spec.page_size, dtype, True),
    )


@functools.cache
def choose(
    spec: LayerSpec,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    rows: int,
    heads: int = 1,
    processors: int = 132,
    shared: int = SHARED,
    per_head: bool = False,
) -> Choice:
    """Choose the layout: as many warps as registers and shared memory allow. If a wide window leaves room for few warps
    and a narrow one for more, the window is narrow.

    rows: query rows (heads x tokens) of a KV head. heads: KV heads of all sequences. shared: bytes of shared memory of a
    multiprocessor. per_head: whether each KV head has its own codebook.

    Raises:
        NoRoomError: there is no room even for one warp.
    """
    widest = max(head_dim_k, head_dim_v)
    # whether queries and sums take so many registers that other things get fewer: many of them; some of them, in heads whose keys
    # are wider than their values
    wide = widest > 192 or head_dim_k + head_dim_v > 320
    wider = head_dim_k + head_dim_v > 256
    row_tiles = 2 if rows > 8 and not wide else 1
    keys, values = sides = _sides(spec, head_dim_k, head_dim_v, dtype)
    bits, plain = max(side.bits for side in sides), not any(side.grouped for side in sides)
    # with two tiles of rows, scales and zero points of keys per token leave no registers for more
    long = (row_tiles == 1 or keys.longer and not wider) and not wide and spec.page_size >= 64
    piece = 64 if long and bits <= 4 and plain else 32
    # warps that registers allow
    spread = rows <= 4
    most = 12 if row_tiles == 1 and not wide and plain and bits < (5 if wider else 16) else 8
    tables = keys.table + values.table
    most_teams = 4 if not tables else 1 if per_head else 2

    def best_with(piece: int, narrows: tuple[bool, ...]) -> Choice | None:
        best: tuple[float, ...] = (0.0,)
        chosen = None
        for narrow in narrows:
            if chosen is not None and chosen.warps * chosen.teams >= (ENOUGH_WIDE if wide else ENOUGH_WARPS):
                break
            each = memory(keys, values, head_dim_k, head_dim_v, piece, row_tiles, narrow)
            for warps, teams in itertools.product((1, 2, 3, 4, 6, 8, 12), range(1, most_teams + 1)):
                if each.block(warps, teams) + RESERVED > shared or warps * teams > most or warps % slices(widest):
                    continue
                slots = processors * teams
                even = rows_of_teams(grid_size(slots, heads), heads) != 0
                # a team that stores tokens packs pages, too; of teams that have many rows one after the other, several keep
                # each other's gaps busy
                stores = 32 * warps >= _packing_threads(sides, widest)
                rounds = math.ceil(heads / slots)
                score = (warps * teams + 1.5 * even, stores, -narrow, -rounds, -teams)
                if score > best:
                    best, chosen = score, Choice(piece, warps, teams, row_tiles, spread, narrow)
        return chosen

    chosen = best_with(piece, (True,) if tables else (False, True))
    if chosen is not None and piece == 64 and heads > processors * chosen.teams:
        # Rows wait for each other. Smaller pieces may leave room for as many warps in more teams, so that all rows run at once.
        # (kivi-4 at 64 x 4k: 8.5 % faster on an H200. Where rows would still wait, it was not timed, and nothing changes.)
        other = best_with(32, (chosen.narrow,))
        if (
            other is not None
            and heads <= processors * other.teams
            and other.warps * other.teams == chosen.warps * chosen.teams
        ):
            chosen = other
    if chosen is None:
        least = memory(keys, values, head_dim_k, head_dim_v, piece, row_tiles, True).block(slices(widest), 1) + RESERVED
        raise NoRoomError(
            f"needs {-(-least // 1024)} KiB of shared memory for keys {spec.key_format.name!r} and values "
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
        choose(stored, *widths, dtype, rows=16, shared=shared)
    except NoRoomError as error:  # codebooks are large, and some GPUs have little shared memory
        return str(error)
    return None


def can_store(spec: LayerSpec, head_dim_k: int, head_dim_v: int, choice: Choice) -> bool:
    """Whether a team of the attend kernel stores the token of a step. It needs shared memory for a page's metadata, and
    a thread for every channel if the format asks for that. It does not if tokens go straight into pages: encoding a
    token at the end of every step takes 3 us longer than a second launch (H200)."""
    widest = max(head_dim_k, head_dim_v)
    sides = _sides(spec, head_dim_k, head_dim_v, torch.float16)
    team = _memory(sides, head_dim_k, head_dim_v, choice).team(choice.warps)
    return (
        32 * choice.warps >= _packing_threads(sides, widest)
        and spec.page_size * widest // 4 <= team
        and not spec.direct
    )


def _packing_threads(sides: tuple[Needs, Needs], widest: int) -> int:
    """Threads that pack a page."""
    return widest if any(side.by_thread for side in sides) else 32


def shared_bytes(spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype, choice: Choice) -> int:
    """Shared memory of a block of the attend kernel."""
    sides = _sides(spec, head_dim_k, head_dim_v, dtype)
    return _memory(sides, head_dim_k, head_dim_v, choice).block(choice.warps, choice.teams)


def _memory(sides: tuple[Needs, Needs], head_dim_k: int, head_dim_v: int, choice: Choice) -> Memory:
    return memory(*sides, head_dim_k, head_dim_v, choice.piece, choice.row_tiles, choice.narrow)


def grid_size(slots: int, heads: int) -> int:
    """The number of teams for `heads` KV heads if `slots` teams can run at once. It is a multiple of `heads` if that
    leaves few slots idle, because a team's share then lies in one head."""
    even = slots // heads * heads
    return even if even >= 0.9 * slots else slots


def rows_of_teams(teams: int, heads: int) -> int:
    """How `heads` KV heads of one length are dealt out among `teams`. Positive: this many teams share each head.
    Negative: each team has this many heads. 0: neither divides evenly."""
    if teams % heads == 0:
        return teams // heads
    each = -(-heads // teams)
    return -each if each > 1 and heads >= FULL * each * teams else 0


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
    choice: Choice,
    has_mask: bool,
    sinks: int,
    softcap: bool,
    transform: Fused | None = None,
    ordered: bool = False,
    fused: bool = False,
    per_head: bool = False,
    restores: bool = False,
    lacking: bool = False,
) -> tuple[tuple[str, str], ...]:
    """sinks: 0 none, 1 in the model's dtype, 2 in float32. transform: what this kernel does to queries and keys.
    ordered: pages are dealt out to warps in a fixed order. fused: whether the chunk, one token, is stored as well.
    restores: whether outputs are rotated back. lacking: whether something is added to all scores of a query."""
    keys, values = _sides(spec, head_dim_k, head_dim_v, dtype)
    return _as_macros(
        _shared_defines(spec, head_dim_k, head_dim_v, dtype)
        | {
            "KEY_HEADER": f'"{keys.header}"',
            "VALUE_HEADER": f'"{values.header}"',
            "KEY_FORMAT": keys.struct,
            "VALUE_FORMAT": values.struct,
            "PT": choice.piece,
            "WARPS": choice.warps,
            "TEAMS": choice.teams,
            "NT": choice.row_tiles,
            "SPREAD": int(choice.spread),
            "SLICES": slices(max(head_dim_k, head_dim_v)),
            "NARROW": int(choice.narrow),
            "SHARED_BYTES": shared_bytes(spec, head_dim_k, head_dim_v, dtype, choice),
            "ARGUMENT_BYTES": ctypes.sizeof(StepArgs if fused else AttendArgs),
            "HAS_MASK": int(has_mask),
            "SINKS": sinks,
            "SOFTCAP": int(softcap),
            "LACKING": int(lacking),
            "ORDERED": int(ordered),
            "FUSED": int(fused),
            "SHARED_TABLES": int(not per_head),
            "RESTORED": int(restores),
        }
        | (_encoder_macros(keys, values) if fused else {})
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
        | {"PT": 32, "NT": 1, "SPREAD": 0, "WARPS": APPEND_WARPS, "TEAMS": 1}
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
        "FACTORS": 1 if transform.before else 2 if transform.after else 0,
        "ROTATED": int(transform.rotated),
        "BASE": base,
        "SIGNS": ",".join(str(sum(negative << p for p, negative in enumerate(column))) for column in columns),
        "NORM_BITS": int(torch.tensor(head_dim**-0.5, dtype=torch.float32).view(torch.int32)),
    }


#: of a block of `project.cu`: rows, threads, and columns of the matrix
PROJECT_ROWS, PROJECT_THREADS, PROJECT_COLUMNS = 16, 256, 32


@functools.cache
def project_defines(head_dim_k: int, head_dim_v: int, dtype: torch.dtype, values: Fused) -> tuple[tuple[str, str], ...]:
    """values: what is done to them, without factors."""
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
