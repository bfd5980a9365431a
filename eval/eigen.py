"""What the choices behind eigen-2 and eigen-3 do to the bundled model: `python -m hf_lowbit_kv.eval.eigen`.

Each row is calibrated on texts on which it is not measured, then measured through the cache, as `perplexity` does, on two
essays and two texts by other authors. Records go to `eval/results/eigen-smollm2.jsonl`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hf_lowbit_kv as lb
from hf_lowbit_kv import gradients
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
START = 512


class Row(NamedTuple):
    """One configuration. `texts`: what it is calibrated on, `essays`, `python`, `bible`, several joined by +. `gradients`:
    those of queries far behind a key, of `all` queries, or `none`, on `gradient_windows` of 1024 tokens. `windows`: of `length`
    tokens, for means, covariances and steps."""

    group: str
    keys: str = KEYS_2
    values: str = VALUES_2
    sink: int = 32
    residual: int = 128
    texts: str = "essays+python"
    gradients: str = "far"
    gradient_windows: int = 8
    windows: int = 8
    length: int = 4096
    transform: str = "eigen"

    @property
    def spec(self) -> lb.LayerSpec:
        how = parse_transform(self.transform), parse_transform("none" if self.values == "dense" else "hadamard")
        formats = parse_format(self.keys), parse_format(self.values)
        return lb.LayerSpec(*formats, self.sink, self.residual, key_transform=how[0], value_transform=how[1])

    @property
    def calibrated_on(self) -> tuple[Any, ...]:
        return self.texts, self.gradients, self.gradient_windows, self.windows, self.length


EIGEN_3: dict[str, Any] = {"keys": KEYS_3, "values": VALUES_3}
PATTERNS_2 = ("53222110", "44222200", "42222220", "22222222")
PATTERNS_3 = ("44442222", "64422222", "54433221", "44444220")
ROWS = (
    Row("presets"),
    Row("presets", **EIGEN_3),
    *(Row("gradients", gradients=how) for how in ("all", "none")),
    *(Row("gradients", gradients=how, **EIGEN_3) for how in ("all", "none")),
    *(Row("calibrated on", texts=texts) for texts in ("essays", "python", "bible", "essays+bible")),
    *(Row("calibrated on", texts=texts, **EIGEN_3) for texts in ("essays", "essays+bible")),
    *(Row("windows", windows=windows, length=length) for windows, length in ((2, 4096), (32, 1024), (64, 512))),
    *(Row("pattern", f"static-{pattern}") for pattern in PATTERNS_2),
    *(Row("pattern", f"static-{pattern}", VALUES_3) for pattern in PATTERNS_3),
    Row("gradients", gradient_windows=32),
    Row("one side", values="dense"),
    Row("one side", "dense", transform="none"),
    Row("one side", KEYS_3, "dense"),
    Row("one side", "dense", VALUES_3, transform="none"),
    *(Row("newest tokens", residual=residual) for residual in (64, 32)),
    *(Row("newest tokens", residual=residual, **EIGEN_3) for residual in (64, 32)),
    *(Row("first tokens", sink=sink) for sink in (0, 16, 64)),
)  # fmt: skip
TEXTS = ("worked", "popular", "transcript", "jargon")


def sources(names: str) -> list[str]:
    """The texts that `Row.texts` names."""
    bible = Path(__file__).resolve().parents[1] / "tests/data/tiny_mla/bible-held-out.txt"
    return [x for name in names.split("+") for x in ([bible.read_text("utf-8")] if name == "bible" else read(name))]


def measured() -> list[Text]:
    return [essay_text("worked"), essay_text("popular"), transcript(), jargon()]


def measure(rows: list[Row], model: Any, tokenizer: Any, backend: str | None, context: int) -> Iterator[dict[str, Any]]:
    """Calibrate and score rows, those together that are calibrated alike."""
    for kind in dict.fromkeys(row.calibrated_on for row in rows):
        of = [row for row in rows if row.calibrated_on == kind]
        texts, how, extra, windows, length = kind
        needed = [row.spec for row in of]
        # all queries count where keys are watched from their own chunk on
        with (
            mock.patch.object(gradients, "DISTANCE", 0 if how == "all" else gradients.DISTANCE),
            mock.patch.object(gradients, "SAMPLES", dict.fromkeys(gradients.SAMPLES, extra)),
        ):
            options = {"samples": windows, "length": length, "gradients": how != "none"}
            calibration = lb.calibrate(model, tokenizer, sources(texts), needed, **options)
        factories = {str(number): _factory(row, model, calibration, backend) for number, row in enumerate(of)}
        options = {"progress": False, "batch": len(TEXTS) if model.device.type == "cuda" else 1, "parallel": True}
        scores = score(factories, measured(), model, tokenizer, context, START, **options)
        for row, each in zip(of, scores.values(), strict=True):
            means = mean_row(each[:2], position_edges(START, context))  # the essays
            del means["by_position"]
            by_text = {
                text: {key: round(x, 6) for key, x in of.means().items()} for text, of in zip(TEXTS, each, strict=True)
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


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: operator.itemgetter(name) for name in ("group", "keys", "values")},
    "window": lambda record: f"{record['sink']}/{record['residual']}",
    "calibrated on": lambda r: f"{r['texts']}, {r['gradients']}, {r['windows']} x {r['length']}",
    "bits": lambda record: f"{record['bits']:.2f}",
    "KL essays": lambda record: f"{record['kl']:.4f}",
    "top-1": lambda record: f"{record['top1']:.3f}",
    **{text: lambda record, text=text: f"{record['by_text'][text]['kl']:.4f}" for text in TEXTS[2:]},  # type: ignore[misc]
}
main = command(ROWS, measure, COLUMNS, OUT)

if __name__ == "__main__":
    run_command(main)
