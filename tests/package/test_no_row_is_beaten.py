"""Tables that recommend presets follow the picture: no row has more bits and more error than another.

A preset that needs a calibration may beat one that needs none; it must not be beaten by any.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import accuracy_rows
import pytest

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import tables

README = (tables.ROOT / "README.md").read_text(encoding="utf-8")
CHOOSE = (tables.ROOT / "docs/choose.md").read_text(encoding="utf-8")


class Point(NamedTuple):
    preset: str
    bits: float
    error: float

    @property
    def calibrated(self) -> bool:
        return bool(lb.get_preset(self.preset).spec().parameters(64, 64, 1))


def beaten(points: list[Point]) -> list[str]:
    """Rows that another one beats: fewer bits and less error, one of them strictly."""
    return [
        f"{point.preset} by {other.preset}"
        for point in points
        for other in points
        if (point.calibrated or not other.calibrated)
        and other.bits <= point.bits
        and other.error <= point.error
        and (other.bits, other.error) != (point.bits, point.error)
    ]


def cells(page: str) -> list[list[str]]:
    """The cells of a page's first table with presets, a list for each preset."""
    lines = [line for line in page.splitlines() if line.startswith("|") and "`" in line]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]


def in_readme() -> list[Point]:
    block = re.search(r"<!-- results: front -->(.*?)<!-- end of results -->", README, re.DOTALL)
    rows = cells(block[1])
    return [Point(row[0].strip("`"), float(row[2]), float(row[3])) for row in rows]


def in_choose() -> list[Point]:
    """The presets that the short answer names, with bits and KL of the records."""
    answer = CHOOSE.split("## Short answer")[1].split("##")[0]
    names = dict.fromkeys(name for row in cells(answer) for name in re.findall(r"`([\w.-]+)`", "|".join(row)))
    known = {row.preset: row for row in accuracy_rows.rows() if row.essays is not None}
    return [Point(name, known[name].bits, known[name].essays["kl"]) for name in names if name in known]


@pytest.mark.parametrize("points", [in_readme, in_choose])
def test_no_row_is_beaten(points):
    rows = points()
    assert len(rows) >= 6
    assert beaten(rows) == []


def test_a_beaten_row_is_noticed():
    rows = [Point("int8", 8.3, 0.1), Point("int6", 6.3, 0.1), Point("kivi-4", 4.3, 0.2)]
    assert beaten(rows) == ["int8 by int6"]
    assert beaten([Point("kivi-2", 2.4, 0.3), Point("eigen-2", 2.2, 0.1)]) == []
    assert beaten([Point("kivi-2", 2.2, 0.1), Point("eigen-2", 2.4, 0.3)]) == ["eigen-2 by kivi-2"]
