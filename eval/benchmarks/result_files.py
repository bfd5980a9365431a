"""Reads files of records in `eval/results/`, and makes Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_lowbit_kv.presets import get_preset


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. The first column is text, the others are numbers."""
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def current_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without those of a preset that has other formats today, or that is gone."""
    return [record for record in read_records(path) if _is_current(record)]


def _is_current(record: dict[str, Any]) -> bool:
    if "keys" not in record:  # of a cache that is not ours
        return True
    try:
        preset = get_preset(record["preset"] if "preset" in record else record["cache"])
    except ValueError:
        return False
    return (preset.key_format, preset.value_format) == (record["keys"], record["values"])


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first. The list is empty if there is no such file.

    Raises:
        ValueError: a line is not a JSON object. The message names the line.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {number}, is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path.name}, line {number}, is no record: {line[:80]!r}")
        records.append(record)
    return records
