"""The constants of a compilation: what `attend.cu` and `append.cu` are told of a layer, as macros.

A format contributes two C++ structs for attention (as keys, as values; see `affine_keys.cuh`, `affine_values.cuh`) and one for
packing. The templates know nothing else of it. A new format adds a branch to `_structs`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...formats import Format
from ...formats.affine import Affine
from ...formats.boosted import SCORES, Boosted
from ...formats.codebook import Codebook
from ...formats.dense import Dense
from ...formats.fragment import LAYOUTS
from ...pages import LayerSpec
from ...transforms import Fused, base_order, hadamard

#: bytes of shared memory that a block takes beyond what it asks for, and what a multiprocessor of an H100 or H200 has
RESERVED, SHARED = 1024 + 512, 228 * 1024
#: bytes that copies of a codebook's entry fill, so that no lanes that are served together meet in a bank; and what a
#: codebook may take of shared memory (the largest ones get fewer copies, one at least)
LANES_BYTES, MOST_TABLE = 128, 64 * 1024
#: warps of a block that stores tokens
APPEND_WARPS = 8


class Choice(NamedTuple):
    """How the attend kernel is laid out: tokens of a piece, warps of a team, teams of a block of threads (one a
    multiprocessor), groups of eight query rows, whether four rows at most lie in every other column."""

    piece: int
    warps: int
    teams: int
    row_tiles: int
    spread: bool = False


class _Structs(NamedTuple):
    keys: str
    values: str
    encoder: str
    #: bytes of 32 tokens, and of the metadata of a piece of so many tokens
    codes: int
    meta: Callable[[int], int]
    #: bytes of a codebook in shared memory
    table: int = 0


def _structs(fmt: Format, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> _Structs:
    if isinstance(fmt, Dense):
        names = (f"Dense{name}<{head_dim}>" for name in ("Keys", "Values", "Encoder"))
        return _Structs(*names, 64 * head_dim, lambda piece: 0)
    if isinstance(fmt, Affine):
        if fmt.layout != LAYOUTS[transposed]:
            raise ValueError(
                f"backend='cuda' stores {fmt.name!r} in layout {LAYOUTS[transposed]!r}: see backend.storage_spec"
            )
        channel = fmt.axis == "channel"
        group = fmt.group_size or (page_size if channel else head_dim)
        at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
        arguments = f"{fmt.bits}, {str(channel).lower()}, {group}, {head_dim}, {at['scale']}, {at['zero']}"

        def meta(piece: int) -> int:
            return 4 * head_dim * max(piece // group, 1) if channel else 4 * piece * (head_dim // group)

        return _Structs(
            f"AffineKeys<{arguments}>",
            f"AffineValues<{arguments}>",
            f"AffineEncoder<{arguments}, {str(transposed).lower()}>",
            4 * head_dim * fmt.bits,
            meta,
        )
    if isinstance(fmt, Codebook):
        return _codebook(fmt, head_dim, transposed)
    if isinstance(fmt, Boosted) and not transposed:
        return _boosted(fmt, head_dim, page_size, dtype)
    raise ValueError(f"format {fmt.name!r} has no CUDA kernels for {'values' if transposed else 'keys'}")


def _boosted(fmt: Boosted, head_dim: int, page_size: int, dtype: torch.dtype) -> _Structs:
    count, columns = fmt.boosted(head_dim), fmt.columns(head_dim)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    arguments = f"{columns}, {head_dim}, {at['high']}, {at['scale']}, {at['zero']}, {at['map']}"
    encoder = f"BoostedEncoder<{count}, {arguments}, {SCORES.index(fmt.score)}, {fmt.seed}u>"
    return _Structs(
        f"BoostedKeys<{arguments}>", "", encoder, 8 * (head_dim + columns), lambda piece: 4 * head_dim + columns
    )


def _codebook(fmt: Codebook, head_dim: int, transposed: bool) -> _Structs:
    copies = max(min(LANES_BYTES, MOST_TABLE >> fmt.bits) // (2 * fmt.dim), 1)
    arguments = f"{fmt.dim}, {fmt.bits}"
    return _Structs(
        f"CodebookKeys<{arguments}, {copies}, {head_dim}>",
        f"CodebookValues<{arguments}, {copies}, {head_dim}>",
        f"CodebookEncoder<{arguments}, {head_dim}, {str(transposed).lower()}>",
        4 * head_dim * fmt.bits // fmt.dim,
        lambda piece: 0,
        2 * fmt.dim * copies << fmt.bits,
    )


def _bits(fmt: Format) -> int:
    if isinstance(fmt, Codebook):
        return -(-fmt.bits // fmt.dim)
    return fmt.bits if isinstance(fmt, (Affine, Boosted)) else 16


def _grouped(fmt: Format) -> bool:
    return isinstance(fmt, Affine) and fmt.group_size is not None


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
    """rows: query rows (heads x tokens) of a KV head. heads: KV heads of all sequences. shared: bytes of shared memory of a
    multiprocessor."""
    widest = max(head_dim_k, head_dim_v)
    row_tiles = 2 if rows > 8 and widest <= 128 else 1
    bits = [_bits(fmt) for fmt in spec.formats]
    plain = not any(map(_grouped, spec.formats))
    key = spec.formats[0]
    by_channel = isinstance(key, Affine) and key.axis == "channel"
    # with two tiles of rows, scales and zero points of keys per token leave no registers for more
    long = (row_tiles == 1 or by_channel or isinstance(key, Boosted)) and widest <= 128 and spec.page_size >= 64
    piece = 64 if long and max(bits) <= 4 and plain else 32
    sides = tuple(
        _structs(fmt, dim, spec.page_size, dtype, transposed)
        for fmt, dim, transposed in zip(spec.formats, (head_dim_k, head_dim_v), (False, True), strict=True)
    )
    keys, values = (side.codes * piece // 32 + side.meta(piece) for side in sides)
    pieces = 2 * (keys + values)
    tables = sum(side.table for side in sides)
    if by_channel and (key.group_size or spec.page_size) >= 2 * piece:
        pieces -= 4 * head_dim_k  # `SECOND` in affine_keys.cuh
    value = spec.formats[1]
    # what values' scales are made into: `SCRATCH` in affine_values.cuh
    handed = 12 * piece if isinstance(value, Affine) and value.axis == "token" and not _grouped(value) else 0
    window = 64 * (max(head_dim_k, head_dim_v) if tables else head_dim_k + head_dim_v)  # `WINDOW_BYTES` in warp.cuh
    merge = 8 * row_tiles * (head_dim_v + 3) * 4
    lifted = (by_channel and key.bits == 2) or isinstance(key, Boosted)  # `LIFT` in affine_keys.cuh
    queries = (3 if lifted else 2) * 8 * row_tiles * (head_dim_k * 2 + 16) + 8 * row_tiles * 9 * 4 + 128
    # warps that registers allow
    spread = rows <= 4
    most = 12 if row_tiles == 1 and widest <= 128 and plain and max(bits) < 16 else 8
    best, found = (0.0, 0.0), Choice(piece, 1, 1, row_tiles, spread)
    for warps, teams in itertools.product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3)):
        need = queries + warps * -(-max(pieces + handed, window, merge) // 128) * 128
        if teams * need + RESERVED + tables > shared or (per_head and teams > 1) or warps * teams > most:
            continue
        slots = processors * teams
        even = grid_size(slots, heads) % heads == 0
        # where a team has many rows one after the other, several teams keep each other's gaps busy
        score = (warps * teams + 1.5 * even, -teams if slots >= heads else teams)
        if score > best:
            best, found = score, Choice(piece, warps, teams, row_tiles, spread)
    return found


def can_store(spec: LayerSpec, head_dim_k: int, head_dim_v: int, choice: Choice) -> bool:
    """Whether a team of the attend kernel is to store the token of a step: it has shared memory for a page's metadata, and
    threads for every channel where the format needs them. Not where tokens go straight into pages: encoding one at the end
    of every step takes longer than a launch of its own (docs/log/kernels.md)."""
    widest = max(head_dim_k, head_dim_v)
    window = 64 * (head_dim_k + head_dim_v)
    threads = widest if any(isinstance(fmt, Boosted) for fmt in spec.formats) else 32
    room = 32 * choice.warps >= threads and spec.page_size * widest // 4 <= choice.warps * window
    return room and not spec.direct


def grid_size(slots: int, heads: int) -> int:
    """Teams for `heads` KV heads where `slots` can run at once: a multiple of `heads` where that leaves few idle, because then
    a team's share of the work lies in one head."""
    even = slots // heads * heads
    return even if even >= 0.9 * slots else slots


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
) -> tuple[tuple[str, str], ...]:
    """sinks: 0 none, 1 in the model's dtype, 2 in float32. transform: what this kernel does to queries and keys.
    ordered: pages are dealt out to warps in a fixed order. fused: whether the chunk, one token, is stored as well."""
    keys, values = (
        _structs(fmt, dim, spec.page_size, dtype, transposed)
        for fmt, dim, transposed in zip(spec.formats, (head_dim_k, head_dim_v), (False, True), strict=True)
    )
    return _as_macros(
        _shared_defines(spec, head_dim_k, head_dim_v, dtype)
        | {
            "KEY_FORMAT": keys.keys,
            "VALUE_FORMAT": values.values,
            "PT": choice.piece,
            "WARPS": choice.warps,
            "TEAMS": choice.teams,
            "NT": choice.row_tiles,
            "SPREAD": int(choice.spread),
            "HAS_MASK": int(has_mask),
            "SINKS": sinks,
            "SOFTCAP": int(softcap),
            "ORDERED": int(ordered),
            "FUSED": int(fused),
            "SHARED_TABLES": int(not per_head),
        }
        | ({"KEY_ENCODER": keys.encoder, "VALUE_ENCODER": values.encoder} if fused else {})
        | (_transform_macros(head_dim_k, transform) if transform else {"TRANSFORMED": 0})
    )


@functools.cache
def append_defines(
    spec: LayerSpec, head_dim_k: int, head_dim_v: int, dtype: torch.dtype
) -> tuple[tuple[str, str], ...]:
    keys, values = (
        _structs(fmt, dim, spec.page_size, dtype, transposed).encoder
        for fmt, dim, transposed in zip(spec.formats, (head_dim_k, head_dim_v), (False, True), strict=True)
    )
    return _as_macros(
        _shared_defines(spec, head_dim_k, head_dim_v, dtype)
        | {"KEY_ENCODER": keys, "VALUE_ENCODER": values, "PT": 32, "NT": 1, "SPREAD": 0}
        | {"WARPS": APPEND_WARPS, "TEAMS": 1}
    )


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


@functools.cache
def transform_defines(head_dim: int, dtype: torch.dtype, transform: Fused) -> tuple[tuple[str, str], ...]:
    return _as_macros(
        {"DIM": head_dim, "BF16": int(dtype == torch.bfloat16), "NT": 1, "SPREAD": 0}
        | _transform_macros(head_dim, transform)
    )
