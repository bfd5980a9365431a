"""Page formats. A new format is one file here, one kernel file of the same stem, and one line in each registry."""

from __future__ import annotations

import functools

from .affine import Affine
from .base import HEAD_DIMS, Field, Format
from .dense import Dense

#: every format class; each has `parse(name) -> instance or None`
FORMATS: list[type[Format]] = [Dense, Affine]


@functools.cache
def _parse(name: str) -> Format:
    for cls in FORMATS:
        if (found := cls.parse(name)) is not None:  # type: ignore[attr-defined]
            return found
    raise ValueError(
        f"format={name!r} is not known; allowed: 'dense', 'int<2|4|8>-<channel|token>[-g<32|64|128>]'"
        + "".join(f", {cls.__name__}" for cls in FORMATS if cls not in (Dense, Affine))
    )


def parse_format(format: str | Format) -> Format:
    """The format of that name, e.g. `"int4-channel"`, `"int2-token-g32"`, `"dense"`; a `Format` is returned as it is."""
    return format if isinstance(format, Format) else _parse(format)


__all__ = ["FORMATS", "HEAD_DIMS", "Affine", "Dense", "Field", "Format", "parse_format"]
