"""Page formats. A new format is one file in this folder, one kernel file of the same stem, and one line in each registry."""

from __future__ import annotations

import functools

from .affine import Affine
from .base import HEAD_DIMS, Field, Format, Parameter
from .boosted import Boosted
from .codebook import Codebook
from .dense import Dense
from .fp8 import Fp8
from .fp8_centered import Fp8Centered
from .static import Static

#: every format class; each has `parse(name) -> instance or None`
FORMATS: list[type[Format]] = [Dense, Affine, Boosted, Codebook, Fp8, Fp8Centered, Static]

#: names of formats and presets that are gone, and the last commit that reads what was stored with them
REMOVED = dict.fromkeys(("trellis-2", "eigen-2-trellis", "million-2"), "611fec58")


def where_read(name: str) -> str:
    """Which commit of this package still knows a format or a preset, for an error message; empty for names that are not
    removed."""
    return f"commit {REMOVED[name]} is the last one that reads it; " if name in REMOVED else ""


@functools.cache
def _parse(name: str) -> Format:
    for cls in FORMATS:
        if (fmt := cls.parse(name)) is not None:  # type: ignore[attr-defined]
            return fmt
    allowed = ", ".join(cls.grammar or repr(cls().name) for cls in FORMATS)
    raise ValueError(
        f"format={name!r} is not known; {where_read(name)}allowed: {allowed}. A format of your own must be registered first "
        "(lb.register_format; on the command line --import FILE)"
    )


def forget_names() -> None:
    """Clear the cache of parsed names, after the set of formats has changed."""
    _parse.cache_clear()


def parse_format(format: str | Format) -> Format:
    """The format with this name, e.g. `"int4-channel"`, `"int2-token-g32"`, `"dense"`. A `Format` is returned unchanged.

    Example:
        >>> lb.parse_format("int2-token-g32")
        Affine('int2-token-g32')
    """
    return format if isinstance(format, Format) else _parse(format)


__all__ = [
    "FORMATS",
    "HEAD_DIMS",
    "Affine",
    "Boosted",
    "Codebook",
    "Dense",
    "Field",
    "Format",
    "Fp8",
    "Fp8Centered",
    "Parameter",
    "Static",
    "parse_format",
]
