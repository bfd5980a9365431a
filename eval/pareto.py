"""Bits against KL: which points no other point beats, and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: inches of the picture
SIZE = (7.5, 4.5)


def pareto(rows: Sequence[dict[str, Any]], x: str = "bits_per_value", y: str = "kl") -> list[bool]:
    """Whether no other row has at most the same `x` and `y` and less of one of them."""

    def beaten(row: dict[str, Any]) -> bool:
        return any(
            other[x] <= row[x] and other[y] <= row[y] and (other[x] < row[x] or other[y] < row[y]) for other in rows
        )

    return [not beaten(row) for row in rows]


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str, label: str = "preset", **options: Any) -> None:
    """Write the picture that `draw` makes to `path` (`.png`, `.svg`). options: those of matplotlib's `savefig`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    draw(figure.subplots(), rows, title, label)
    figure.savefig(path, dpi=120, **options)


def draw(axes: Any, rows: Sequence[dict[str, Any]], title: str, label: str = "preset") -> None:
    """Draw rows with `bits_per_value` and `kl` on matplotlib axes: the Pareto front as a line; points named by `label` where
    there is room."""
    front = [row for row, best in zip(rows, pareto(rows)) if best]
    rest = [row for row in rows if row not in front]
    front.sort(key=lambda row: row["bits_per_value"])
    for of, colour, size in ((rest, "0.65", 22), (front, "C0", 36)):
        axes.scatter([row["bits_per_value"] for row in of], [row["kl"] for row in of], s=size, color=colour, zorder=3)
    axes.step(
        [row["bits_per_value"] for row in front], [row["kl"] for row in front], where="post", color="C0", linewidth=1
    )
    axes.set(
        xscale="log", yscale="log", xlabel="bits per number, everything counted", ylabel="KL from full precision, nats"
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15, y=0.1)
    ticks = [
        tick for tick in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.figure.canvas.draw()  # places are known then
    taken: list[Any] = []
    _name(axes, front, label, "black", 9, taken)
    _name(axes, rest, label, "0.45", 7, taken)


#: where a label may stand beside its point, in points: the first place where nothing else stands is taken
_PLACES = [(sign * 6, y) for y in (4, -10, 14, -20, 24, -30) for sign in (1, -1)]


def _name(axes: Any, rows: Sequence[dict[str, Any]], label: str, colour: str, size: int, taken: list[Any]) -> None:
    """Write the rows' names beside their points, where there is room; `taken` collects what is written where."""
    for row in rows:
        for x, y in _PLACES:
            text = axes.annotate(
                row[label], (row["bits_per_value"], row["kl"]), xytext=(x, y), textcoords="offset points",
                fontsize=size, color=colour, ha="left" if x > 0 else "right",
            )  # fmt: skip
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.figure.bbox.x1 and axes.bbox.y0 <= box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
