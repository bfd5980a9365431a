"""What the choices behind eigen-2 and eigen-3 do to the bundled model: `python -m hf_lowbit_kv.eval.eigen`.

Each row is calibrated on texts on which it is not measured, then measured through the cache, as `perplexity` does, on two
essays; some groups also on two texts by other authors. Records go to `eval/results/eigen-smollm2.jsonl`.

Rows of one run share their calibration where they ask for the same, and calibrations share what they read. So name several
groups in one run: `--group presets --group pattern`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

import hf_lowbit_kv as lb
from hf_lowbit_kv import calibration, gradients
from hf_lowbit_kv.eval.calibrated_rows import command
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.results import results_path, run_command
from hf_lowbit_kv.eval.texts import Text, essay_text, jargon, transcript
from hf_lowbit_kv.eval.vecinfer import read
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.transforms import parse_transform

OUT = results_path("eigen", "smollm2")
KEYS_2, VALUES_2 = "static-44422000", "static-2-t"
KEYS_3, VALUES_3 = "static-64332222", "static-3-t"
SINK, RESIDUAL = 32, 128
START = 512
#: rows that are scored together, so that they share the full-precision pass; a run that is stopped loses so many
TOGETHER = 7


class Row(NamedTuple):
    """One configuration. `texts`: what it is calibrated on, `essays`, `python`, or both joined by +. `gradients`: those of
    queries far behind a key, of `all` queries, or `none`, on `gradient_windows` of 1024 tokens. `windows`: of `length` tokens,
    for means, covariances and steps. Calibration leaves out the presets' 32 sink tokens, whatever `sink` is."""

    group: str
    keys: str = KEYS_2
    values: str = VALUES_2
    sink: int = SINK
    residual: int = RESIDUAL
    texts: str = "essays+python"
    gradients: str = "far"
    gradient_windows: int = 8
    windows: int = 8
    length: int = 4096
    transform: str = "eigen"

    @property
    def spec(self) -> lb.LayerSpec:
        rotated = self.values.startswith("static")
        how = parse_transform(self.transform), parse_transform("hadamard" if rotated else "none")
        formats = parse_format(self.keys), parse_format(self.values)
        return lb.LayerSpec(*formats, self.sink, self.residual, key_transform=how[0], value_transform=how[1])

    @property
    def measured_on(self) -> tuple[str, ...]:
        return TEXTS if self.group in WIDE_GROUPS else ESSAYS

    @property
    def calibrated_on(self) -> tuple[Any, ...]:
        return self.texts, self.gradients, self.gradient_windows, self.windows, self.length


EIGEN_3: dict[str, Any] = {"keys": KEYS_3, "values": VALUES_3}
KIVI_2: dict[str, Any] = {"keys": "int2-channel", "values": "int2-token", "transform": "none"}
PATTERNS_2 = ("53222110", "44222200", "22222222")
PATTERNS_3 = ("54433221", "44442222")
ROWS = (
    Row("presets"),
    Row("presets", **EIGEN_3),
    *(Row("pattern", f"static-{pattern}") for pattern in PATTERNS_2),
    *(Row("pattern", f"static-{pattern}", VALUES_3) for pattern in PATTERNS_3),
    *(Row("newest tokens", residual=residual) for residual in (64, 32)),
    Row("newest tokens", residual=32, **EIGEN_3),
    *(Row("newest tokens of kivi-2-sink", residual=residual, **KIVI_2) for residual in (128, 32)),
    *(Row("first tokens", sink=sink) for sink in (0, 4)),
    Row("smallest window", sink=4, residual=32),
    Row("one side", values="dense"),
    Row("one side", "dense", transform="none"),
    Row("gradients", gradients="none"),
    Row("gradients", gradients="none", **EIGEN_3),
    Row("gradients", gradients="all"),
    Row("gradients", gradients="all", residual=32),
    *(Row("calibrated on", texts=texts) for texts in ("essays", "python")),
    Row("windows", windows=64, length=512),
)  # fmt: skip
ESSAYS, TEXTS = ("worked", "popular"), ("worked", "popular", "transcript", "jargon")
#: groups that are measured on the texts by other authors too
WIDE_GROUPS = ("presets", "calibrated on")


def sources(names: str) -> list[str]:
    """The texts that `Row.texts` names."""
    return [text for name in names.split("+") for text in read(name)]


def measured(names: Sequence[str]) -> list[Text]:
    """The texts that `Row.measured_on` names."""
    other = {"transcript": transcript, "jargon": jargon}
    return [other[name]() if name in other else essay_text(name) for name in names]


class Readings:
    """Stands for `read_windows` and `read_gradients`: the same windows are read once, and what was found is repeated. Keys and
    values of the last windows alone are kept: 1.5 GB of the bundled model."""

    def __init__(self) -> None:
        self._windows: tuple[Any, list[tuple]] = None, []
        self._gradients: dict[Any, list[tuple]] = {}
        self._read_windows, self._read_gradients = calibration.read_windows, gradients.read_gradients

    def read_windows(self, model: Any, windows: Sequence[torch.Tensor], see: Callable, progress: Any = None) -> None:
        if self._windows[0] != (key := _of_windows(windows)):
            self._windows = key, []
            self._read_windows(model, windows, lambda *found: self._windows[1].append(found))
        for found in self._windows[1]:
            see(*found)

    def read_gradients(
        self,
        model: Any,
        windows: Sequence[torch.Tensor],
        layers: Any,
        sides: Any,
        see: Callable,
        seed: int,
        progress: Any,
    ) -> None:
        if (key := (gradients.DISTANCE, seed, *_of_windows(windows))) not in self._gradients:
            kept = self._gradients[key] = []
            self._read_gradients(model, windows, layers, sides, lambda *found: kept.append(found), seed)
        for found in self._gradients[key]:
            see(*found)


def _of_windows(windows: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple(tuple(window.tolist()) for window in windows)


def measure(rows: list[Row], model: Any, tokenizer: Any, backend: str | None, context: int) -> Iterator[dict[str, Any]]:
    """Calibrate and score rows, those together that are calibrated alike."""
    readings = Readings()
    for kind in dict.fromkeys(row.calibrated_on for row in rows):
        of = [row for row in rows if row.calibrated_on == kind]
        found = calibrated(of, model, tokenizer, readings)
        for texts in (ESSAYS, TEXTS):
            some = [row for row in of if row.measured_on == texts]
            for first in range(0, len(some), TOGETHER):
                yield from _scored(some[first : first + TOGETHER], found, model, tokenizer, backend, context)


def calibrated(rows: Sequence[Row], model: Any, tokenizer: Any, readings: Readings) -> Any:
    """What rows that are calibrated alike need; `None` where none of them needs anything."""
    texts, how, extra, windows, length = rows[0].calibrated_on
    specs = [dataclasses.replace(row.spec, sink=SINK, residual=RESIDUAL) for row in rows]
    if not (specs := [spec for spec in specs if spec.parameters(64, 64, 1)]):
        return None
    # all queries count where keys are watched from their own chunk on
    with (
        mock.patch.object(gradients, "DISTANCE", 0 if how == "all" else gradients.DISTANCE),
        mock.patch.object(gradients, "SAMPLES", dict.fromkeys(gradients.SAMPLES, extra)),
        mock.patch.object(calibration, "read_windows", readings.read_windows),
        mock.patch.object(gradients, "read_gradients", readings.read_gradients),
    ):
        options = {"samples": windows, "length": length, "gradients": how != "none"}
        return lb.calibrate(model, tokenizer, sources(texts), specs, **options)


def _scored(
    rows: Sequence[Row], found: Any, model: Any, tokenizer: Any, backend: str | None, context: int
) -> Iterator[dict[str, Any]]:
    factories = {str(number): _factory(row, model, found, backend) for number, row in enumerate(rows)}
    texts = rows[0].measured_on
    options = {"progress": False, "batch": len(texts) if model.device.type == "cuda" else 1, "parallel": True}
    scores = score(factories, measured(texts), model, tokenizer, context, START, **options)
    for row, each in zip(rows, scores.values(), strict=True):
        means = mean_row(each[:2], position_edges(START, context))  # the essays
        del means["by_position"]
        by_text = {
            text: {key: round(x, 6) for key, x in of.means().items()} for text, of in zip(texts, each, strict=True)
        }
        bits = row.spec.bits_per_value(10**9, 64)
        yield row._asdict() | {"bits": bits} | means | {"by_text": by_text}


def _factory(row: Row, model: Any, calibration: Any, backend: str | None) -> Any:
    return functools.partial(
        lb.LowBitCache,
        *(model, row.keys, row.values),
        sink=row.sink,
        residual=row.residual,
        transform=row.spec.key_transform,
        value_transform=row.spec.value_transform,
        calibration=calibration,
        backend=backend,
    )


def _kl_of(text: str, record: dict[str, Any]) -> str:
    """Nothing where a row was not measured on the text."""
    return f"{record['by_text'][text]['kl']:.4f}" if text in record["by_text"] else ""


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: operator.itemgetter(name) for name in ("group", "keys", "values")},
    "window": lambda record: f"{record['sink']}/{record['residual']}",
    "calibrated on": lambda r: f"{r['texts']}, {r['gradients']}, {r['windows']} x {r['length']}",
    "bits": lambda record: f"{record['bits']:.2f}",
    "KL essays": lambda record: f"{record['kl']:.4f}",
    "top-1": lambda record: f"{record['top1']:.3f}",
    **{text: functools.partial(_kl_of, text) for text in TEXTS[2:]},
}
main = command(ROWS, measure, COLUMNS, OUT)

if __name__ == "__main__":
    run_command(main)
