"""Finds a preset for a model: presets that fit the model, and the best ones within a budget.

`hf-lowbit-kv recommend` prints the results of `recommend`. `pareto` finds the points of bits and KL that no other point
beats. `plot` draws the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.cache.low_bit_cache import LowBitCache
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.cache.preset_cache import cache_of_preset
from hf_lowbit_kv.cache.served_models import unwrap
from hf_lowbit_kv.cache.spoiled_keys import spoiled_keys
from hf_lowbit_kv.calibration_files.calibration_file import Calibration
from hf_lowbit_kv.presets import DEFAULT_PRESET, preset_names

from .cache_sizes import Factory, Size, sizes
from .perplexity import check_packed, mean_row, position_edges, score, window_tokens
from .texts import Text, read_text

#: most presets to measure: those with the most bits within the budget, and the default
MOST = 8


class Budget(NamedTuple):
    """Limit for a cache with `batch` rows of `context` tokens: `bits` per number, or `memory` bytes of all rows
    together."""

    bits: float | None
    memory: int | None
    context: int
    batch: int = 1

    def holds(self, size: Size) -> bool:
        return size.bits <= self.bits if self.bits is not None else size.nbytes <= (self.memory or 0)

    def __str__(self) -> str:
        amount = f"{self.bits:g} bits per value" if self.bits is not None else f"{self.memory} bytes"
        rows = f" in {self.batch} rows" if self.batch > 1 else ""
        return f"{amount} at {self.context} tokens{rows}"


def within(budget: Budget, sizes_of: Mapping[str, Size], most: int = MOST, wanted: str | None = None) -> list[str]:
    """At most `most` caches that meet the budget, those with the most bits first. `wanted` is among them if it meets
    the budget.

    Raises:
        ValueError: no cache meets the budget. The message names the nearest one.
    """
    order = sorted(sizes_of, key=lambda name: sizes_of[name].bits, reverse=True)
    if names := [name for name in order if budget.holds(sizes_of[name])]:
        return names[:most] if wanted is None or wanted not in names[most:] else [*names[: most - 1], wanted]
    nearest = sizes_of[order[-1]]
    raise ValueError(
        f"no preset meets {budget}; the nearest is {order[-1]!r} with {nearest.bits:.2f} bits per value, "
        f"{nearest.nbytes} bytes"
    )


def recommend(
    model: Any,
    tokenizer: Any,
    text: str | Path | Text,
    budget: Budget,
    presets: Sequence[str] | None = None,
    overrides: dict[str, Any] | None = None,
    tokens: int = 2048,
    start: int = 512,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Measure the presets that meet a budget, the best first.

    Args:
        text: the text to measure on. Its first `tokens` tokens are read, and scored from `start`.
        presets: candidates; `None`: all presets that fit the model. If several presets store the same, one is measured.
            Those whose keys the model's biases spoil are left out.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        One dict for each preset, in the order of `kl`: `preset`, `same_as` (presets that store the same),
        `bits_per_value`, `bytes` and `bytes_full` (all rows at the budget's context; see `sizes`), `kl`, `kl_error`, `kl_p99`,
        `top1`, `ppl`, `ppl_full`, `calibrated` (whether the preset uses a calibration), and `code`, which makes the cache.

    Raises:
        ValueError: no preset meets the budget (the message names the nearest), an unknown preset, arguments that no
            preset takes, a text that is too short, too few `tokens` (also to pack a page), or no candidate survives the
            model's key biases.
    """
    overrides = overrides or {}
    source = read_text(text)
    window_tokens(source, tokenizer, tokens, 1, "tokens")  # raises for a text that is too short
    names, reasons = (list(presets), {}) if presets else fitting_presets(model, overrides)
    if not names:
        raise ValueError(f"no preset supports this model and these arguments: {next(iter(reasons.values()))}")
    makers = {name: _Maker(name, model, overrides) for name in names}
    if not (factories := {name: maker for name, maker in makers.items() if not _spoiled(maker(), model)}):
        raise ValueError(f"the model's weights spoil the keys of all of these presets: {', '.join(makers)}")
    same = _same(factories)
    sizes_of = sizes({name: factories[name] for name in same}, model, budget.context, budget.batch)
    default = next((name for name, others in same.items() if DEFAULT_PRESET in (name, *others)), None)
    chosen = within(budget, sizes_of, MOST, default)
    check_packed({name: factories[name] for name in chosen}, tokens, name="tokens")
    scores = score({name: factories[name] for name in chosen}, [source], model, tokenizer, tokens, start,
                   progress=progress)  # fmt: skip
    rows = []
    for name, of in scores.items():
        measured, size = mean_row(of, position_edges(start, tokens)), sizes_of[name]
        rows.append(
            {"preset": name, "same_as": same[name], "bits_per_value": size.bits}
            | {"bytes": size.nbytes, "bytes_full": size.nbytes_full}
            | {key: measured[key] for key in ("kl", "kl_error", "kl_p99", "top1", "ppl", "ppl_full")}
            | {"calibrated": factories[name].calibrated, "code": factories[name].code}
        )
    return sorted(rows, key=lambda row: row["kl"])


class _Maker:
    """Makes a preset's cache. `code` makes the same cache; it has a calibration only if the preset uses one."""

    def __init__(self, name: str, model: Any, overrides: dict[str, Any]):
        self.name, self.model, self.overrides = name, model, overrides

    def __call__(self) -> Any:
        return cache_of_preset(self.name, self.model, **self.overrides)

    @property
    def code(self) -> str:
        unused = () if self.calibrated else ("calibration",)
        changes = "".join(f", {key}={_in_code(value)}" for key, value in self.overrides.items() if key not in unused)
        return f'import hf_lowbit_kv as lb\ncache = lb.from_preset("{self.name}", model{changes})'

    @property
    def calibrated(self) -> bool:
        """Whether a layer needs calibrated tensors."""
        specs = (layer.spec for layer in self().packed_layers)
        return any(part.has_parameters for spec in specs for _, part, _ in spec.roles(1, 1))


def _in_code(value: Any) -> str:
    """The value of an argument in Python code: a calibration by its file, or else by the name `calibration`."""
    if isinstance(value, Calibration):
        return repr(value.path) if value.path else "calibration"
    return repr(str(value)) if isinstance(value, Path) else repr(value)


def _spoiled(cache: LowBitCache, model: Any) -> bool:
    """Whether the model's weights spoil the keys of some layers."""
    specs = {index: layer.spec for index, layer in enumerate(cache.layers) if isinstance(layer, LowBitLayer)}
    return bool(spoiled_keys(unwrap(model), specs, cache.packed_sizes))


def _same(factories: Mapping[str, Factory]) -> dict[str, list[str]]:
    """Groups presets that store the same: the first preset of a group -> the others."""
    first: dict[tuple, str] = {}
    same: dict[str, list[str]] = {}
    for name, factory in factories.items():
        key = tuple(layer.spec.key for layer in factory().packed_layers)
        if key in first:
            same[first[key]].append(name)
        else:
            first[key], same[name] = name, []
    return same


def fitting_presets(
    model_or_config: Any, overrides: dict[str, Any] | None = None, names: Iterable[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Those of these presets (default: the listed ones) that work with this model and these arguments of `from_preset`,
    and the reasons why others do not.

    Presets for latent attention work only with models that have it. A calibrated preset needs its calibration.
    """
    fitting, reasons = list[str](), dict[str, str]()
    for name in preset_names() if names is None else names:
        try:
            cache_of_preset(name, model_or_config, **overrides or {})
        except (ValueError, TypeError) as error:
            reasons[name] = str(error)
        else:
            fitting.append(name)
    return fitting, reasons


#: width and height of the picture, inches
SIZE = (7.5, 4.5)


def pareto(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """For each row: `True` if no other row beats it. A row is beaten if another has no larger `bits_per_value` and `kl`, and
    one of them is smaller."""
    points = [(row["bits_per_value"], row["kl"]) for row in rows]
    return [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str, **options: Any) -> None:
    """Write the picture of `draw` to `path` (`.png`, `.svg`). options: those of matplotlib's `savefig`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    draw(figure.subplots(), rows, title)
    figure.savefig(path, dpi=120, **options)


def draw(axes: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draw rows with `bits_per_value` and `kl` on matplotlib axes. A line shows the Pareto front. Points get the names
    if there is room."""
    front = [row for row, best in zip(rows, pareto(rows)) if best]
    rest = [row for row in rows if row not in front]
    front.sort(key=lambda row: row["bits_per_value"])
    for of, colour, size in ((rest, "0.65", 22), (front, "C0", 36)):
        axes.scatter([row["bits_per_value"] for row in of], [row["kl"] for row in of], s=size, color=colour, zorder=3)
    axes.step(
        [row["bits_per_value"] for row in front], [row["kl"] for row in front], where="post", color="C0", linewidth=1
    )
    axes.set(
        xscale="log", yscale="log", xlabel="bits per value, everything counted", ylabel="KL from full precision, nats"
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
    axes.figure.canvas.draw()  # afterwards the positions of points are known
    taken = _markers(axes, rows)
    _name(axes, front, "black", 9, taken)
    _name(axes, rest, "0.45", 7, taken)


def _markers(axes: Any, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Bounding boxes of the points."""
    from matplotlib.transforms import Bbox

    half = 3 * axes.figure.dpi / 72
    places = axes.transData.transform([(row["bits_per_value"], row["kl"]) for row in rows])
    return [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in places]


#: offsets from a point at which its label begins, or ends (negative), in typographic points. The first free one is taken
_OFFSETS = ((-6, -3), (6, -3), (-6, -13), (6, 5), (6, -11), (-6, 5), (6, 14), (-6, 14), (6, -20), (-6, -20))


def _name(axes: Any, rows: Sequence[dict[str, Any]], colour: str, size: int, taken: list[Any]) -> None:
    """Write the rows' names beside their points if there is room. `taken` collects the boxes of everything drawn."""
    for row in rows:
        for x, y in _OFFSETS:
            aligned: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if x > 0 else "right"}
            point = row["bits_per_value"], row["kl"]
            text = axes.annotate(row["preset"], point, xytext=(x, y), fontsize=size, color=colour, **aligned)
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.figure.bbox.x1
            inside &= axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
