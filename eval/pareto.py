"""Bits against KL: which points no other point beats, and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def pareto(rows: Sequence[dict[str, Any]], x: str = "bits_per_value", y: str = "kl") -> list[bool]:
    """Whether no other row has at most the same `x` and `y` and less of one of them."""

    def beaten(row: dict[str, Any]) -> bool:
        return any(
            other[x] <= row[x] and other[y] <= row[y] and (other[x] < row[x] or other[y] < row[y]) for other in rows
        )

    return [not beaten(row) for row in rows]


def plot(rows: Sequence[dict[str, Any]], path: Path | None, title: str, label: str = "preset") -> Any:
    """Draw rows with `bits_per_value` and `kl`: the Pareto front as a line, its points named by `label`.

    path: the picture to write (`.png`, `.svg`); `None`: the figure is returned to be shown.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    front = [row for row, best in zip(rows, pareto(rows)) if best]
    rest = [row for row in rows if row not in front]
    front.sort(key=lambda row: row["bits_per_value"])
    for of, colour, size in ((rest, "0.65", 22), (front, "C0", 36)):
        axes.scatter([row["bits_per_value"] for row in of], [row["kl"] for row in of], s=size, color=colour, zorder=3)
    axes.step(
        [row["bits_per_value"] for row in front], [row["kl"] for row in front], where="post", color="C0", linewidth=1
    )
    _name(axes, front, label, "black", 9)
    _name(axes, rest, label, "0.45", 7)
    axes.set_yscale("log")
    axes.set_xlabel("bits per number, everything counted")
    axes.set_ylabel("KL from full precision, nats")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12, y=0.1)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _name(axes: Any, rows: Sequence[dict[str, Any]], label: str, colour: str, size: int) -> None:
    for row in rows:
        axes.annotate(
            row[label], (row["bits_per_value"], row["kl"]), xytext=(5, 4), textcoords="offset points",
            fontsize=size, color=colour,
        )  # fmt: skip
