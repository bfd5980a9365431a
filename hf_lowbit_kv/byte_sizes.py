"""Parses sizes: `"24GB"` and `"24G"` are 24 * 10^9 bytes, `"24GiB"` is 24 * 2^30, `"64k"` is 65536 tokens."""

from __future__ import annotations

import re

#: units of `parse_size` -> bytes
UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))}}
UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix}
UNITS |= {unit.removesuffix("B"): factor for unit, factor in UNITS.items()}
#: smaller sizes need a unit: 24 probably means 24 GB
SMALLEST_WITHOUT_UNIT = 10**6


def parse_size(text: int | str, name: str | None = None) -> int:
    """`"24GB"`, `"512 MiB"`, `"1e9"` -> bytes; a number stays. Raises `ValueError` for other texts.

    Args:
        name: name of the argument, for the message.
    """
    if not isinstance(text, str):
        return int(text)
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\d{1,2})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    label = f"size {text!r}" if name is None else f"{name}={text!r}"
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{label} is not understood; give e.g. 24GB or 512MiB")
    size = int(float(match[1]) * units[match[2].lower()])
    if not match[2] and 0 < float(match[1]) < SMALLEST_WITHOUT_UNIT:
        raise ValueError(f"{label} is not understood: it needs a unit. Give e.g. {match[1]}GB or {match[1]}MiB")
    if size == 0:
        raise ValueError(f"{label} is not allowed; it must be more than 0")
    return size


def parse_tokens(text: str, name: str) -> int:
    """`"65536"` or `"64k"` -> tokens; 1k is 1024. Raises `ValueError` for anything else. name: of the argument."""
    match = re.fullmatch(r"\s*(\d+)\s*(k?)\s*", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{name}={text!r} is not understood; give a number of tokens, e.g. 65536 or 64k (1k is 1024)")
    return int(match[1]) * (1024 if match[2] else 1)
