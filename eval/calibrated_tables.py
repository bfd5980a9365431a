"""Tables of what VecInfer's presets were tried with (`eval.vecinfer`), for `report`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval import vecinfer
from hf_lowbit_kv.eval.results import markdown_table, read_records

CONTEXT = 4096


class _Table(NamedTuple):
    wanted: Callable[[Any], bool]
    """whether a row of `vecinfer.ROWS` belongs to it"""
    label: Callable[[dict[str, Any]], str]
    """what tells a record's line from the others"""


_SIZES = ("transform", "transform at 1.5 bits", "2 bits", "1.5 bits", "presets")
_TABLES = {
    "vecinfer-sides": _Table(
        lambda row: row.group in ("keys alone", "values alone", "values rotated"),
        lambda r: f"keys `{r['keys']}`, values `{r['values']}`{' rotated' if r['value_transform'] != 'none' else ''}",
    ),
    "vecinfer-sizes": _Table(
        lambda row: row.group in _SIZES and row.transform == "hadamard" and row.sink == 32,
        lambda r: f"`{r['keys']}`" if r["keys"] == r["values"] else f"`{r['keys']}`, values `{r['values']}`",
    ),
    "vecinfer-texts": _Table(
        lambda row: row.group in ("transform", "calibrated on") and row.transform == "hadamard",
        lambda r: {"essays": "all other essays", "python": "Python's library"}.get(r["texts"], f"their {r['texts']}"),
    ),
}


def newest(path: Path, rows: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """The newest record of each row that has one, in the order of `rows`."""
    found: dict[Any, dict[str, Any]] = {}
    known = {row: row._asdict() for row in rows}
    for record in sorted(read_records(path), key=lambda record: record["date"]):
        if record["context"] == CONTEXT:
            for row, fields in known.items():
                if all(record.get(name) == value for name, value in fields.items()):
                    found[row] = record
    return {row: found[row] for row in known if row in found}


def render(name: str, rows: Any = None, path: Path = vecinfer.OUT) -> str:
    """KL of both essays and their mean, top-1, the perplexity and the device, by configuration; fewest bits first."""
    wanted, label = _TABLES[name]
    head = "", "bits", "`worked`: KL", "`popular`: KL", "mean", "top-1", "perplexity", "measured on"
    records = sorted(newest(path, filter(wanted, vecinfer.ROWS)).values(), key=lambda record: record["bits"])
    return markdown_table(head, map(functools.partial(_line, label), records))


def _line(label: Callable[[dict[str, Any]], str], record: dict[str, Any]) -> list[str]:
    texts = [f"{record['kl_by_text'][text]:.4f}" for text in ("worked", "popular")]
    means = f"{record['kl']:.4f}", f"{record['top1']:.3f}", f"{record['ppl']:.2f}"
    return [label(record), f"{record['bits']:.2f}", *texts, *means, _shown(record["device"])]


def _shown(device: str) -> str:
    return {"cpu": "CPU", "NVIDIA H200": "H200"}.get(device, device)


#: columns of the table of transforms: what is shown, and the group of rows
_BY_TRANSFORM = {
    "2 bits": "transform",
    "a codebook a KV head": "a codebook a KV head",
    "no sink": "no sink",
    "1.5 bits": "transform at 1.5 bits",
}


def transforms_table(rows: Any = None, path: Path = vecinfer.OUT) -> str:
    """Mean KL by the transform of keys and what else is varied; each cell with its device where a column has several. Columns
    and lines without a record are left out."""
    found = newest(path, vecinfer.ROWS)
    cells = {(row.group, row.transform): record for row, record in found.items()}
    head, columns = ["keys mapped by"], []
    for title, group in _BY_TRANSFORM.items():
        devices = sorted({_shown(record["device"]) for (of, _), record in cells.items() if of == group})
        if not devices:
            continue
        head.append(title + (f" ({devices[0]})" if len(devices) == 1 else ""))
        columns.append((group, len(devices) > 1))
    lines = []
    for how in vecinfer.TRANSFORMS:
        records = [(cells.get((group, how)), several) for group, several in columns]
        shown = [
            "" if x is None else f"{x['kl']:.4f}" + (f" ({_shown(x['device'])})" if several else "")
            for x, several in records
        ]
        if any(shown):
            lines.append([f"`{how}`", *shown])
    return markdown_table(head, lines)


#: what `report` calls with its own rows, which these tables do not need
TABLES: dict[str, Callable[[Any], str]] = {
    "vecinfer-transforms": transforms_table,
    **{name: functools.partial(render, name) for name in ("vecinfer-sides", "vecinfer-sizes", "vecinfer-texts")},
}
