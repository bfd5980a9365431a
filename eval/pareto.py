"""Bits against KL: which points no other point beats, and a picture of them."""

from __future__ import annotations

import itertools
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
    taken = [*_markers(axes, rows), *_steps(axes, front)]
    _name(axes, front, label, "black", 9, taken)
    _name(axes, rest, label, "0.45", 7, taken)


def _places(axes: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Where the rows' points are, in pixels `[rows, 2]`."""
    return axes.transData.transform([(row["bits_per_value"], row["kl"]) for row in rows]) if rows else []


def _markers(axes: Any, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The boxes of the points."""
    from matplotlib.transforms import Bbox

    half = 3 * axes.figure.dpi / 72
    return [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in _places(axes, rows)]


def _steps(axes: Any, front: Sequence[dict[str, Any]]) -> list[Any]:
    """The boxes of the line that joins the front: to the right, then down."""
    from matplotlib.transforms import Bbox

    boxes = []
    for (x, y), (next_x, next_y) in itertools.pairwise(_places(axes, front)):
        boxes += [Bbox.from_extents(x, y - 1, next_x, y + 1), Bbox.from_extents(next_x - 1, next_y, next_x + 1, y)]
    return boxes


#: where a label may begin, or end, beside its point, in points: the first place where nothing else stands is taken
_SIDES = (
    *((6, -3), (6, 5), (6, -11), (12, 14), (12, -20), (18, 24), (18, -30)),
    *((30, 34), (30, -40), (45, 20), (45, -26), (45, -50), (60, -60)),
)
_OFFSETS = [(sign * x, y) for x, y in _SIDES for sign in (1, -1)]
#: a label this far away is joined to its point
_FAR = 12


def _line(axes: Any, point: tuple[float, float], box: Any, right: bool) -> list[Any]:
    """Boxes along the line from a point, but for its first quarter, to the label in `box`."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(point)
    across, up = (box.x0 if right else box.x1) - x, (box.y0 + box.y1) / 2 - y
    ways = [part / 16 for part in range(4, 16)]
    return [Bbox.from_bounds(x + way * across, y + way * up, 1, 1) for way in ways]


def _name(axes: Any, rows: Sequence[dict[str, Any]], label: str, colour: str, size: int, taken: list[Any]) -> None:
    """Write the rows' names beside their points, where there is room; `taken` collects what stands where."""
    for row in rows:
        point = row["bits_per_value"], row["kl"]
        for x, y in _OFFSETS:
            aligned: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if x > 0 else "right"}
            text = axes.annotate(row[label], point, xytext=(x, y), fontsize=size, color=colour, **aligned)
            box = text.get_window_extent()
            line = _line(axes, point, box, x > 0) if abs(x) >= _FAR else []
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.figure.bbox.x1
            inside &= axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            if inside and not any(part.overlaps(other) for part in (box, *line) for other in taken):
                taken += [box, *line]
                if line:
                    style = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
                    axes.annotate("", point, xytext=(x, y + size / 3), arrowprops=style, **aligned)
                break
            text.remove()
