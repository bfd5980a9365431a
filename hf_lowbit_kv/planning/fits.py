"""Does it fit? Bytes of weights, cache and prefill for every preset, from a configuration only.

The model and its cache are made on the meta device, where tensors have sizes but no memory, and their bytes are summed.
GB are 10^9 bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

from ..byte_sizes import parse_size, parse_tokens
from ..cache.length_rope import drop_limit
from ..cache.served_models import longest_text
from ..cache.spoiled_keys import has_key_biases
from ..presets import DEFAULT_PRESET, MAX_SHOWN, get_preset, preset_names, short_list
from ..storage.layer_spec import check_count
from .cache_memory import CacheMemory, FullMemory, PresetMemory, chunk_bytes
from .model_shapes import Shape, shape_of, weight_bytes
from .weight_kinds import WEIGHT_KINDS

#: bytes for the CUDA context, loaded kernels and CUDA graphs
CUDA_BYTES = 10**9
#: name of the row of the 16-bit cache
FULL = "16-bit"
GB = 10**9


@dataclass(frozen=True)
class Fit:
    """Memory of a model with one cache.

    Attributes:
        preset: name, or "16-bit" for transformers' own growing cache.
        weights, cache, chunk, cuda: bytes of the parameters, of the preallocated cache of all rows, of prefilling one
            chunk, and of CUDA with recorded steps.
        memory: available bytes.
        longest_context: largest number of tokens per row that fits with this number of rows; 0: none fits.
        most_rows: largest number of rows that fits with this context.
        calibrated: whether the preset needs a calibration of the model.
        biased: whether the model has key biases, and the preset has a range per token for keys, which large biases spoil.
    """

    preset: str
    weights: int
    cache: int
    chunk: int
    cuda: int
    memory: int
    longest_context: int
    most_rows: int
    calibrated: bool
    biased: bool = False

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.chunk + self.cuda

    @property
    def fits(self) -> bool:
        return self.total <= self.memory

    @property
    def packs(self) -> bool:
        """Whether the cache has fewer than 16 bits."""
        return self.preset != FULL and any(fmt.name != "dense" for fmt in get_preset(self.preset).spec().formats)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total": self.total, "fits": self.fits}


def _nearness(fit: Fit) -> tuple[bool, int, int, int]:
    """Sort key, larger is better: no calibration, more bits in codes, more sink tokens, less metadata."""
    spec = get_preset(fit.preset).spec()
    codes = sum(fmt.code_bytes(128, spec.page_size, torch.float16) for fmt in spec.formats)
    return not fit.calibrated, codes, spec.sink, -fit.cache


@dataclass(eq=False, repr=False)
class FitTable(Sequence[Fit]):
    """One `Fit` per cache, the 16-bit cache first. Recommended presets follow: those that fit, most bits first, and those
    that do not; then other presets in the same way. With `presets=` the order is the caller's. Prints as a table of at
    most 12 rows, or of all `presets=`.

    Attributes:
        name: the model's name.
        context: tokens per row.
        rows: number of rows.
        positions: tokens that the model was made for, or `None` if its configuration does not say.
        dropped_at: tokens beyond which the model's own `generate` drops its cache, or `None`.
    """

    _fits: list[Fit]
    name: str
    context: int
    rows: int
    positions: int | None
    dropped_at: int | None = None
    _short: bool = False

    def __getitem__(self, index):
        return self._fits[index]

    def __len__(self) -> int:
        return len(self._fits)

    @property
    def whole(self) -> FitTable:
        """The same table with all rows printed."""
        return dataclasses.replace(self, _short=False)

    @property
    def shown(self) -> list[Fit]:
        """The printed rows."""
        if not self._short:
            return self._fits
        full, *others = self._fits
        highlighted = {fit.preset for fit in (self.nearest, self.recommended) if fit is not None}
        chosen = short_list(fit.preset for fit in others if fit.preset not in highlighted)[
            : MAX_SHOWN - 1 - len(highlighted)
        ]
        return [full, *(fit for fit in others if fit.preset in highlighted.union(chosen))]

    @property
    def nearest(self) -> Fit | None:
        """The preset below 16 bits with the most bits in its codes that fits; one without calibration, if there is one.
        Presets that large key biases would spoil are excluded."""
        return max((fit for fit in self if fit.fits and fit.packs and not fit.biased), key=_nearness, default=None)

    @property
    def recommended(self) -> Fit | None:
        """The default preset if it fits, otherwise `nearest`. `None`: no preset below 16 bits fits."""
        return next((fit for fit in self if fit.fits and fit.preset == DEFAULT_PRESET), self.nearest)

    @property
    def advice(self) -> str:
        """One line of advice."""
        best, nearest = self.recommended, self.nearest
        if best is None or nearest is None:
            return "No preset fits: use fewer tokens (see longest), fewer rows, or weights with fewer bits (int4)."
        if best is nearest:
            relation = "the default, and" if best.preset == DEFAULT_PRESET else "it is"
            text = f"Recommended: {best.preset}, {relation} nearest to 16 bits of the presets that fit."
        else:
            text = f"Recommended: {best.preset}, the default. {nearest.preset} fits too: nearest to 16 bits."
        return f"{text} The 16-bit cache fits as well." if self._fits[0].fits else text

    @property
    def title(self) -> str:
        rows = f"{self.rows} rows of " if self.rows > 1 else ""
        memory = self._fits[0].memory / GB
        return f"{self.name}, {rows}{self.context} tokens, {memory:g} GB (columns in GB of 10^9 bytes)"

    @property
    def notes(self) -> list[str]:
        """Notes below the table."""
        notes = ["longest: most tokens per row that fit; rows: most rows of this length that fit"]
        if self.recommended is not None:
            notes.append("+: recommended")
        if any(fit.calibrated for fit in self.shown):
            notes.append("*: needs a calibration of the model (hf-lowbit-kv calibrate)")
        if any(fit.biased for fit in self.shown):
            notes.append(
                "!: this family has key biases, and large ones spoil keys with a range per token (docs/choose.md)"
            )
        if (more := len(self) - len(self.shown)) > 0:
            notes.append(f"{more} more presets: hf-lowbit-kv fits --all; in Python print(table.whole)")
        if self.positions is not None and self.context > self.positions:
            notes.append(
                f"The model's configuration is for {self.positions} positions; {self.context} need its RoPE scaling (see the "
                "model's card)"
            )
        if self.dropped_at is not None and self.context > self.dropped_at:
            notes.append(
                f"model.generate of this model drops every cache beyond {self.dropped_at} tokens: use lb.generate or lb.enable"
            )
        return notes

    def cells(self) -> Iterator[dict[str, str]]:
        """The rows of the table: text by heading."""
        best = self.recommended
        for fit in self.shown:
            signs = ("*", fit.calibrated), ("!", fit.biased), ("+", fit is best)
            yield {
                "preset": " ".join([fit.preset, *(sign for sign, holds in signs if holds)]),
                "weights": f"{fit.weights / GB:.2f}",
                "cache": f"{fit.cache / GB:.2f}",
                "chunk": f"{fit.chunk / GB:.2f}",
                "CUDA": f"{fit.cuda / GB:.2f}",
                "sum": f"{fit.total / GB:.2f}",
                "fits": "yes" if fit.fits else "no",
                "longest": f"{fit.longest_context:,}" if fit.longest_context else "-",
                "rows": str(fit.most_rows) if fit.most_rows else "-",
            }

    def table(self) -> Table:
        """A table for rich."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        cells = list(self.cells())
        for heading in cells[0]:
            table.add_column(heading, justify="left" if heading == "preset" else "right", no_wrap=True)
        for row in cells:
            table.add_row(*row.values())
        return table

    def print_to(self, console: Console) -> None:
        """Title, table, notes and advice."""
        console.print(self.title, style="italic", highlight=False, soft_wrap=True)
        console.print(self.table())
        for note in (*self.notes, self.advice):
            console.print(note, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            self.print_to(console)
        return capture.get()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = list(self.cells())
        head = "".join(f"<th>{escape(heading)}</th>" for heading in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in (*self.notes, self.advice))
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>{notes}"


def fits(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    context: int | str,
    memory: str | int = "24GB",
    *,
    rows: int = 1,
    weights: str | int | None = None,
    presets: Sequence[str] | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> FitTable:
    """The GPU memory of a model and its cache, for every preset.

    Args:
        model: hub name, folder, configuration or model; its weights are not read. The names of `known_models()` work
            offline.
        context: tokens per row, or a text such as `"64k"` (1k is 1024).
        memory: memory of the GPU, in bytes or as `"24GB"`.
        rows: number of sequences at once.
        weights: how the weights are stored, one of `WEIGHT_KINDS`, or their size, in bytes or as `"5.7GB"`. `None`: as
            published.
        presets: names in the order of the result; `None`: all that support the model, the recommended ones first.
        report: called for each preset with its name, the number of presets done, and the number of all presets.

    Raises:
        ValueError: a number, name or size is not allowed, or no preset supports the model.
        TypeError: `presets` is a single name. OSError: the configuration cannot be read.

    Column `chunk`: activations of 2048 tokens, or the buffer into which attention unpacks, whichever is larger.
    Sliding-window and recurrent layers are counted as transformers allocates them.

    Example:
        >>> table = lb.fits("Qwen/Qwen3-8B", context=65536, memory="24GB", presets=["kivi-4-sink"])
        >>> [(fit.preset, fit.fits) for fit in table]
        [('16-bit', False), ('kivi-4-sink', True)]
    """
    context = parse_tokens(context, "context") if isinstance(context, str) else context
    check_count("context", context)
    check_count("rows", rows, unit="rows")
    memory = parse_size(str(memory), "memory")
    shape = shape_of(model)
    parameters, biases = _weights(shape, weights), has_key_biases(shape.model)
    counters: dict[str, CacheMemory] = {FULL: FullMemory(shape), **_preset_memory(shape, presets, report)}
    table = []
    for name, counter in counters.items():
        chunk = chunk_bytes(shape, packed=name != FULL)
        left = memory - parameters - chunk - CUDA_BYTES
        table.append(
            Fit(
                name,
                parameters,
                counter.nbytes(context, rows),
                chunk,
                CUDA_BYTES,
                memory,
                longest_context=largest_fitting(lambda tokens: counter.nbytes(tokens, rows) <= left),  # noqa: B023
                most_rows=largest_fitting(lambda number: counter.nbytes(context, number) <= left),  # noqa: B023
                calibrated=counter.calibrated,
                biased=counter.needs_small_biases and biases,
            )
        )
    if presets is None:  # a stable sort: presets that do not fit keep their order
        first = short_list(name for name in counters if name != FULL)
        table[1:] = sorted(table[1:], key=lambda fit: (fit.preset not in first, -fit.cache if fit.fits else 0))
    longest = longest_text(shape.config)
    return FitTable(table, shape.name, context, rows, longest, drop_limit(shape.model), presets is None)


def _weights(shape: Shape, weights: str | int | None) -> int:
    if weights is None:
        return weight_bytes(shape, shape.weights)
    if isinstance(weights, str) and weights in WEIGHT_KINDS:
        return weight_bytes(shape, weights)
    try:
        return parse_size(str(weights))
    except ValueError:
        raise ValueError(
            f"weights={weights!r} is not offered; allowed: {', '.join(WEIGHT_KINDS)}, a size such as '5.7GB', or a number of "
            "bytes"
        ) from None


def _preset_memory(
    shape: Shape, presets: Sequence[str] | None, report: Callable[[str, int, int], None] | None
) -> dict[str, PresetMemory]:
    """The counters for these presets; without names, for all presets that support the model."""
    if isinstance(presets, str):
        raise TypeError(f"presets={presets!r} is not allowed; it must be a list of names, e.g. [{presets!r}], or None")
    counters, reasons = dict[str, PresetMemory](), list[ValueError]()
    names = preset_names() if presets is None else presets
    for done, name in enumerate(names):
        if report is not None:
            report(name, done, len(names))
        get_preset(name)  # raises for an unknown name
        try:
            counters[name] = PresetMemory(shape, name)
        except ValueError as error:
            if presets is not None:
                raise
            reasons.append(error)
    if reasons and not counters:
        raise ValueError(f"no preset supports model={shape.name!r}: {reasons[0]}") from reasons[0]
    return counters


def largest_fitting(fitting: Callable[[int], bool], limit: int = 2**31) -> int:
    """The largest number up to `limit` that fits; 0: none. If a number fits, all smaller ones must fit too."""
    low, high = 0, 1
    while high < limit and fitting(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low
