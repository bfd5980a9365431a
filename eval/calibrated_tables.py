"""Tables of what VecInfer's presets were tried with (`eval.vecinfer`), for `report`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval import vecinfer
from hf_lowbit_kv.eval.results import read_records

CONTEXT = 4096


class _Table(NamedTuple):
    wanted: Callable[[Any], bool]
    """whether a row of `vecinfer.ROWS` belongs to it"""
    label: Callable[[dict[str, Any]], str]
    """what tells a record's line from the others"""


_TABLES = {
    "vecinfer-heads": _Table(
        lambda row: row.group in ("transform", "a codebook a KV head") and "hadamard" in row.transform,
        lambda r: f"{r['transform']}, a codebook a {'KV head' if r['per_head'] else 'layer'}",
    ),
    "vecinfer-sides": _Table(
        lambda row: (
            row.group == "values alone"
            or (row.group in ("keys alone", "values rotated") and row.transform == "hadamard")
        ),
        lambda r: f"keys `{r['keys']}`, values `{r['values']}`{' rotated' if r['value_transform'] != 'none' else ''}",
    ),
    "vecinfer-texts": _Table(
        lambda row: row.group in ("transform", "calibrated on") and row.transform == "hadamard", lambda r: r["texts"]
    ),
}


def newest(path: Path, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """The newest record of each configuration, those that have one, in the order of `rows`."""
    found: dict[tuple, dict[str, Any]] = {}
    known = [tuple(row._asdict().items()) for row in rows]
    for record in read_records(path):
        for key in known:
            if record["context"] == CONTEXT and all(record.get(name) == value for name, value in key):
                found[key] = record
    return [found[key] for key in known if key in found]


def render(name: str, rows: Any = None) -> str:
    """KL of both essays and their mean, and the perplexity, by configuration."""
    wanted, label = _TABLES[name]
    head = "", "bits", "`worked`: KL", "`popular`: KL", "mean", "top-1", "perplexity"
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for record in newest(vecinfer.OUT, filter(wanted, vecinfer.ROWS)):
        cells = [label(record), f"{record['bits']:.2f}"]
        cells += [f"{record['kl_by_text'][text]:.4f}" for text in ("worked", "popular")]
        cells += [f"{record['kl']:.4f}", f"{record['top1']:.3f}", f"{record['ppl']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


#: what `report` calls with its own rows, which these tables do not need
TABLES: dict[str, Callable[[Any], str]] = {name: functools.partial(render, name) for name in _TABLES}
