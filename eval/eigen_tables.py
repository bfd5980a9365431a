"""Tables of what eigen-2 and eigen-3 were tried with (`eval.eigen`), for `report`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from hf_lowbit_kv.eval import batch_rows, eigen
from hf_lowbit_kv.eval.calibrated_tables import newest
from hf_lowbit_kv.eval.results import markdown_table


class _Table(NamedTuple):
    groups: tuple[str, ...]
    """of `eigen.ROWS`, besides the presets themselves"""
    head: str
    label: Callable[[dict[str, Any]], str]
    """what tells a record's line from the others"""
    window: bool = False
    """whether bytes of a row are shown, as `batch_rows` counts them: where a window's share shows"""


def _preset(record: dict[str, Any]) -> str:
    """What a record is compared with."""
    if record["keys"] == eigen.KIVI_2["keys"]:
        return "kivi-2-sink"
    return "eigen-3" if record["values"] == eigen.VALUES_3 else "eigen-2"


def _of_gradients(record: dict[str, Any]) -> str:
    shown = {"far": "of queries far behind", "all": "of all queries", "none": "none"}
    window = f", residual {record['residual']}" if record["residual"] != eigen.RESIDUAL else ""
    return f"`{_preset(record)}`, {shown[record['gradients']]}{window}"


def _of_texts(record: dict[str, Any]) -> str:
    windows = f"{record['windows']} windows of {record['length']}"
    return f"`{_preset(record)}`, {record['texts'].replace('+', ' and ')}, {windows}"


_TABLES = {
    "own-patterns": _Table(("pattern",), "keys", lambda r: f"`{r['keys']}`"),
    "own-gradients": _Table(("gradients",), "gradients", _of_gradients),
    "own-texts": _Table(("calibrated on", "windows"), "calibrated on", _of_texts),
    "own-windows": _Table(
        ("first tokens", "newest tokens", "newest tokens of kivi-2-sink", "smallest window"),
        "window",
        lambda r: f"`{_preset(r)}`, sink {r['sink']}, residual {r['residual']}",
        window=True,
    ),
    "own-sides": _Table(("one side",), "stored", lambda r: f"keys `{r['keys']}`, values `{r['values']}`"),
}


def _is_own(record: dict[str, Any]) -> bool:
    """Whether a record is of what the others of its preset are compared with."""
    return record["group"] == "presets" or (
        _preset(record) == "kivi-2-sink" and record["residual"] == eigen.RESIDUAL and record["sink"] == eigen.SINK
    )


def render(name: str, rows: Any = None) -> str:
    """KL by configuration, those of a preset together behind the preset's own; in per cent of that."""
    table = _TABLES[name]
    asked = [row for row in eigen.ROWS if row.group in ("presets", *table.groups)]
    found = sorted(newest(eigen.OUT, asked).values(), key=_preset)
    own = {_preset(record): record for record in found if _is_own(record)}
    tried = [record for record in found if record["group"] != "presets"]
    if not tried:
        return "(no record)\n"
    others = [text for text in eigen.TEXTS[2:] if all(text in record["by_text"] for record in tried)]
    head = [table.head, "bits", *(["MB a row"] if table.window else []), "essays: KL", "to the preset", "top-1"]
    head += [f"{text}: KL" for text in others]
    return markdown_table(head, (_cells(table, x, own, others) for x in found if _preset(x) in map(_preset, tried)))


def _cells(table: _Table, record: dict[str, Any], own: dict[str, dict[str, Any]], others: list[str]) -> list[str]:
    cells = [table.label(record), f"{record['bits']:.2f}"]
    if table.window:
        room = batch_rows.room(f"{_preset(record)},sink={record['sink']},residual={record['residual']}")
        cells.append(f"{room.row / 1e6:.0f}")
    base = own.get(_preset(record))
    change = "" if base is None or _is_own(record) else f"{100 * (record['kl'] / base['kl'] - 1):+.0f} %"
    cells += [f"{record['kl']:.4f}", change, f"{record['top1']:.3f}"]
    return cells + [f"{record['by_text'][text]['kl']:.4f}" for text in others]


#: what `report` calls with its own rows, which these tables do not need
TABLES: dict[str, Callable[[Any], str]] = {
    **{name: functools.partial(render, name) for name in _TABLES},
    "own-rows": lambda rows: batch_rows.render(),
}
