"""The structs of each page format in the CUDA kernels, and the resources that they need. A new format is one function and
one line in `KERNELS`.

`Needs` also names the format's C++ files. Kernels include them by macros, so no other source depends on a format.
Importing this needs neither a GPU nor a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...formats import Format
from ...formats.affine import Affine
from ...formats.boosted import SCORES, Boosted
from ...formats.codebook import Codebook
from ...formats.dense import Dense
from ...formats.fp8 import Fp8
from ...formats.fp8_centered import Fp8Centered
from ...formats.fragment import LAYOUTS
from ...formats.static import Static, words
from .needs import WIDEST, Needs, slices

#: bytes that the replicas of a codebook entry fill, so that lanes of one memory transaction have no bank conflict; largest
#: size of a codebook in shared memory, in bytes (large codebooks get fewer replicas, at least one)
LANES_BYTES, MAX_TABLE = 128, 64 * 1024


class Kernels(NamedTuple):
    """The kernels of one class of formats.

    Attributes:
        needs: a function of the format, head_dim, page_size, the byte at which each array of a page begins, and whether the
            page holds values (their order of bytes is transposed).
        keys, values: whether the format is supported for them.
        covers: whether a format of the class is supported.
        divides: whether a head of more than `needs.WIDEST` channels can be divided among warps; a function of the format,
            head_dim, and whether the page holds values.
    """

    needs: Callable[[Any, int, int, Mapping[str, int], bool], Needs]
    keys: bool = True
    values: bool = True
    covers: Callable[[Any], bool] = lambda fmt: True
    divides: Callable[[Any, int, bool], bool] = lambda fmt, head_dim, transposed: True


def _affine(fmt: Affine, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    fmt.validate(head_dim, page_size)
    channel = fmt.axis == "channel"
    group = fmt.group_size or (page_size if channel else head_dim)
    own = head_dim // slices(head_dim)
    form, offsets = f"{fmt.bits}, {_lower(channel)}, {group}", f"{at['scale']}, {at['zero']}"

    def meta(kv_tile: int) -> int:
        return 4 * own * max(kv_tile // group, 1) if channel else 4 * kv_tile * (head_dim // group)

    return Needs(
        "affine_values.cuh" if transposed else "affine_keys.cuh",
        f"Affine{'Values' if transposed else 'Keys'}<{form}, {own}, {offsets}>",
        "encode_affine.cuh",
        f"AffineEncoder<{form}, {head_dim}, {offsets}, {_lower(transposed)}>",
        4 * own * fmt.bits,  # of 32 tokens
        meta,
        bits=fmt.bits,
        grouped=fmt.group_size is not None,
        same_for=group if channel else 0,
        scratch=12 if not channel and fmt.group_size is None else 0,
        queries=3 if channel and fmt.bits == 2 else 2,
        sums=1 if channel else max(own // group, 1),
    )


def _boosted(fmt: Boosted, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    count, columns = fmt.boosted(head_dim), fmt.columns(head_dim)
    arguments = f"{columns}, {head_dim}, {at['high']}, {at['scale']}, {at['zero']}, {at['map']}"
    return Needs(
        "boosted.cuh",
        f"BoostedKeys<{arguments}>",
        "encode_boosted.cuh",
        f"BoostedEncoder<{count}, {arguments}, {SCORES.index(fmt.score)}, {fmt.seed}u>",
        8 * (head_dim + columns),
        lambda kv_tile: 4 * head_dim + columns,
        bits=fmt.bits,
        queries=3,
        by_thread=True,
    )


def _codebook(fmt: Codebook, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    copies = max(min(LANES_BYTES, MAX_TABLE >> fmt.bits) // (2 * fmt.dim), 1)
    own = head_dim // slices(head_dim)
    arguments = f"{fmt.dim}, {fmt.bits}"
    return Needs(
        "codebook.cuh",
        f"Codebook{'Values' if transposed else 'Keys'}<{arguments}, {copies}, {own}>",
        "encode_codebook.cuh",
        f"CodebookEncoder<{arguments}, {head_dim}, {_lower(transposed)}>",
        4 * own * fmt.bits // fmt.dim,
        lambda kv_tile: 0,
        bits=-(-fmt.bits // fmt.dim),
        table=2 * fmt.dim * copies << fmt.bits,
    )


def _dense(fmt: Dense, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    own = head_dim // slices(head_dim)
    struct = f"Dense{'Values' if transposed else 'Keys'}<{own}>"
    encoder = f"DenseEncoder<{head_dim}>"
    return Needs("dense.cuh", struct, "encode_dense.cuh", encoder, 64 * own, lambda kv_tile: 0, queries=1)


def _fp8(fmt: Fp8, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    own = head_dim // slices(head_dim)
    return Needs(
        "fp8.cuh",
        f"Fp8{'Values' if transposed else 'Keys'}<{own}, {at['scale']}>",
        "encode_fp8.cuh",
        f"Fp8Encoder<{head_dim}, {at['scale']}, {_lower(transposed)}>",
        32 * own,
        lambda kv_tile: 4 * kv_tile,
        bits=8,
    )


def _fp8_centered(fmt: Fp8Centered, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    own, offsets = head_dim // slices(head_dim), f"{at['scale']}, {at['center']}"
    return Needs(
        "fp8_centered.cuh",
        f"Fp8CenteredKeys<{own}, {offsets}>",
        "encode_fp8_centered.cuh",
        f"Fp8CenteredEncoder<{head_dim}, {offsets}>",
        32 * own,
        lambda kv_tile: 2 * own + 4 * kv_tile,
        bits=8,
        same_for=page_size,
        again=4,
    )


def _static(fmt: Static, head_dim: int, page_size: int, at: Mapping[str, int], transposed: bool) -> Needs:
    fmt.validate(head_dim, page_size)
    size = head_dim // len(fmt.pattern)  # of a group of channels
    gains = fmt.gain(head_dim)[::size].tolist()
    groups = [f"Width<{digit}, {_float_bits(gain)}u>" for digit, gain in zip(fmt.pattern, gains, strict=True)]
    own, where = head_dim // slices(head_dim), at["scale" if transposed else "mean"]
    return Needs(
        "static_values.cuh" if transposed else "static.cuh",
        f"StaticValues<{own}, {where}, {groups[0]}>"
        if transposed
        else f"StaticKeys<{own}, {where}, {', '.join(groups)}>",
        "encode_static.cuh",
        f"StaticEncoder<{_lower(transposed)}, {head_dim}, {where}, {_thresholds(fmt, head_dim)}, {', '.join(groups)}>",
        128 * words(fmt.planes(head_dim), fmt.layout) // slices(head_dim),
        lambda kv_tile: kv_tile // 2 if transposed else 2 * head_dim,
        bits=-(-sum(map(int, fmt.pattern)) // len(fmt.pattern)),
        same_for=0 if transposed else page_size,
        scratch=8 if transposed else 0,
        queries=3,
    )


def _lower(flag: bool) -> str:
    return str(flag).lower()


def _thresholds(fmt: Static, head_dim: int) -> str:
    return f"Thresholds<{', '.join(f'{_float_bits(x)}u' for x in fmt.thresholds(head_dim).tolist())}>"


def _float_bits(x: float) -> int:
    """The bits of a float32."""
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _loads_of_four(fmt: Codebook, head_dim: int, transposed: bool) -> bool:
    """Whether a warp's words of 32 tokens are whole loads of four."""
    return head_dim // slices(head_dim) // fmt.dim * fmt.bits // 32 % 4 == 0


KERNELS: dict[type[Format], Kernels] = {
    Affine: Kernels(_affine),
    # boosted channels may be anywhere in the head
    Boosted: Kernels(_boosted, values=False, divides=lambda *args: False),
    Codebook: Kernels(_codebook, divides=_loads_of_four),
    Dense: Kernels(_dense),
    Fp8: Kernels(_fp8, covers=lambda fmt: fmt.granularity == "token"),
    Fp8Centered: Kernels(_fp8_centered, values=False),
    # a key's words have its channels in the order of their widths
    Static: Kernels(_static, divides=lambda fmt, head_dim, transposed: transposed),
}


def covered(fmt: Format, transposed: bool) -> bool:
    """Whether there are kernels for keys, or for values (transposed), in this format."""
    kernels = KERNELS.get(type(fmt))
    return kernels is not None and (kernels.values if transposed else kernels.keys) and kernels.covers(fmt)


def why_not(keys: Format, values: Format, widths: tuple[int, int] | None = None) -> str | None:
    """Why the kernels do not support these formats, or `None`. widths: head_dim of keys and of values; `None`: any."""
    for fmt, transposed, side in ((keys, False, "keys"), (values, True, "values")):
        if not covered(fmt, transposed):
            return f"has no kernels for {side} in format {fmt.name!r} yet"
        if widths is not None and slices(head_dim := widths[transposed]) > 1:
            if not KERNELS[type(fmt)].divides(fmt, head_dim, transposed):
                return f"has no kernels for {side} in format {fmt.name!r} with head_dim={head_dim}; allowed: up to {WIDEST}"
    if widths is not None and slices(widths[0]) != slices(widths[1]):
        return f"takes no heads of {widths[0]} and {widths[1]} channels: both or neither may have more than {WIDEST}"
    return None


def needs(fmt: Format, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    """The needs of the format on one side."""
    if not covered(fmt, transposed):
        raise ValueError(f"format {fmt.name!r} has no CUDA kernels for {'values' if transposed else 'keys'}")
    if isinstance(fmt, (Affine, Fp8)) and fmt.layout != LAYOUTS[transposed]:
        raise ValueError(
            f"backend='cuda' stores {fmt.name!r} in layout {LAYOUTS[transposed]!r}: see backends.choice.storage_spec"
        )
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    return KERNELS[type(fmt)].needs(fmt, head_dim, page_size, at, transposed)
