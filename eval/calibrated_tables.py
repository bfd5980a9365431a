"""Tables of what calibrated presets were tried with (`eval.eigen`, `eval.vecinfer`), for `report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_lowbit_kv.eval import eigen, vecinfer
from hf_lowbit_kv.eval.results import read_records

#: a record's line in a table: its label, and what tells a table's lines apart
Label = Callable[[dict[str, Any]], str]


def newest(path: Path, rows: Iterable[Any], context: int = 4096) -> list[dict[str, Any]]:
    """The newest record of each configuration, those that have one, in the order of `rows`."""
    found: dict[tuple, dict[str, Any]] = {}
    known = {tuple(row._asdict().items()): None for row in rows}
    for record in read_records(path):
        for key in known:
            if record["context"] == context and all(record.get(name) == value for name, value in key):
                found[key] = record
    return [found[key] for key in known if key in found]


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head, lines = list(head), list(lines)
    if not lines:
        return "(no record)\n"
    out = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*out, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


# ---- eigen ----------------------------------------------------------------------------------------------------------


def _level(record: dict[str, Any]) -> str:
    return "eigen-3" if record["values"] == eigen.VALUES_3 else "eigen-2"


GRADIENTS = {"far": "queries behind the newest tokens", "all": "all queries", "none": "no gradients"}
EIGEN: dict[str, tuple[tuple[str, ...], Label]] = {}


def eigen_table(name: str) -> str:
    """KL of the essays (mean of both) and of each other text, by configuration."""
    groups, label = EIGEN[name]
    rows = [row for group in groups for row in eigen.ROWS if row.group == group]
    head = "", "bits", "essays: KL", "top-1", *(f"{text}: KL" for text in eigen.TEXTS[2:])
    return table(
        head,
        (
            [label(record), f"{record['bits']:.2f}", f"{record['kl']:.4f}", f"{record['top1']:.3f}"]
            + [f"{record['by_text'][text]['kl']:.4f}" for text in eigen.TEXTS[2:]]
            for record in newest(eigen.OUT, rows)
        ),
    )


# ---- VecInfer -------------------------------------------------------------------------------------------------------


def _of_transform(record: dict[str, Any]) -> str:
    return record["transform"] if record["transform"] != "none" else "none"


VECINFER: dict[str, tuple[tuple[str, ...], Label]] = {
    "vecinfer-heads": (
        ("transform", "a codebook a KV head"),
        lambda r: f"{r['transform']}, a codebook a {'KV head' if r['per_head'] else 'layer'}",
    ),
    "vecinfer-sides": (
        ("keys alone", "values alone", "values rotated"),
        lambda r: f"keys `{r['keys']}`, values `{r['values']}`{' rotated' if r['value_transform'] != 'none' else ''}",
    ),
    "vecinfer-texts": (("transform", "calibrated on"), lambda r: r["texts"]),
}


def vecinfer_table(name: str) -> str:
    """KL of both essays and their mean, and the perplexity, by configuration."""
    groups, label = VECINFER[name]
    rows = [row for group in groups for row in vecinfer.ROWS if row.group == group]
    if name not in ("vecinfer-transforms", "vecinfer-transforms-1.5"):
        known = (
            ("hadamard", "smooth+hadamard", "none") if name in ("vecinfer-heads", "vecinfer-sinks") else ("hadamard",)
        )
        rows = [row for row in rows if row.transform in known or row.group in ("values alone",)]
    if name == "vecinfer-heads":
        rows = [row for row in rows if row.transform != "none"]
    head = "", "bits", "`worked`: KL", "`popular`: KL", "mean", "top-1", "perplexity"
    return table(
        head,
        (
            [label(record), f"{record['bits']:.2f}"]
            + [f"{record['kl_by_text'][text]:.4f}" for text in ("worked", "popular")]
            + [f"{record['kl']:.4f}", f"{record['top1']:.3f}", f"{record['ppl']:.2f}"]
            for record in newest(vecinfer.OUT, rows)
        ),
    )


def _of(render: Callable[[str], str], name: str) -> Callable[[Any], str]:
    return lambda rows: render(name)


TABLES: dict[str, Callable[[Any], str]] = {
    **{name: _of(eigen_table, name) for name in EIGEN},
    **{name: _of(vecinfer_table, name) for name in VECINFER},
}
