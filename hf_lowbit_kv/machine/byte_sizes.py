"""Amounts of memory as people write them: `"24GB"` is 24 * 10^9 bytes, `"24GiB"` is 24 * 2^30."""

from __future__ import annotations

import re

#: bytes of the units that `parse_size` knows
UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))}}
UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix}


def parse_size(text: str) -> int:
    """`"24GB"`, `"512 MiB"`, `"1e9"` -> bytes. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"size {text!r} is not understood; give e.g. 24GB or 512MiB")
    return int(float(match[1]) * units[match[2].lower()])
