"""What VecInfer's choices do to the bundled model: `python -m hf_lowbit_kv.eval.vecinfer`.

Each row is calibrated on texts on which it is not measured (the other essays, or Python source where a row says so), then
measured through the cache, as `perplexity` does. Records go to `eval/results/vecinfer-smollm2.jsonl`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.calibrated_rows import command
from hf_lowbit_kv.eval.models import calibration_texts, default_texts, library_texts
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.results import results_path, run_command
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.transforms import parse_transform

OUT = results_path("vecinfer", "smollm2")
START = 512


class Row(NamedTuple):
    """One configuration. `texts`: what it is calibrated on, `essays`, the first or second half of them, or `python`."""

    group: str
    keys: str = "vq-d4b8"
    values: str = "vq-d4b8"
    transform: str = "hadamard"
    value_transform: str = "none"
    sink: int = 32
    per_head: bool | None = None
    texts: str = "essays"

    @property
    def spec(self) -> lb.LayerSpec:
        formats = parse_format(self.keys), parse_format(self.values)
        transforms = parse_transform(self.transform), parse_transform(self.value_transform)
        return lb.LayerSpec(*formats, self.sink, key_transform=transforms[0], value_transform=transforms[1])


TRANSFORMS = ("none", "smooth", "hadamard", "smooth+hadamard", "hadamard+smooth")
ROWS = (
    *(Row("transform", transform=transform) for transform in TRANSFORMS),
    *(Row("transform at 1.5 bits", "vq-d8b12", "vq-d8b12", transform) for transform in TRANSFORMS),
    *(Row("a codebook a KV head", transform=how, per_head=True) for how in ("hadamard", "smooth+hadamard")),
    *(Row("no sink", transform=transform, sink=0) for transform in ("none", "hadamard", "smooth+hadamard")),
    Row("keys alone", values="dense"),
    Row("values alone", keys="dense", transform="none"),
    Row("values rotated", value_transform="hadamard"),
    Row("2 bits", "vq-d2b4", "vq-d2b4"),
    Row("1.5 bits", "vq-d2b3", "vq-d2b3"),
    Row("1.5 bits", "vq-d4b6", "vq-d4b6"),
    *(Row("calibrated on", texts=texts) for texts in ("first half", "second half", "python")),
    Row("presets", "vq-d2b8", "vq-d2b8"),
    Row("presets", "vq-d4b12", "vq-d4b12"),
    Row("presets", "vq-d8b12", "vq-d8b8"),
    Row("presets", "vq-d4b10", "vq-d8b12"),
    Row("presets", transform="none", sink=0),
)


def read(source: str) -> list[str]:
    """The texts that `Row.texts` names."""
    if source == "python":
        return [path.read_text(encoding="utf-8") for path in library_texts()]
    essays = [path.read_text(encoding="utf-8") for path in calibration_texts()]
    half = len(essays) // 2
    return {"essays": essays, "first half": essays[:half], "second half": essays[half:]}[source]


def measure(rows: list[Row], model: Any, tokenizer: Any, backend: str | None, context: int) -> Iterator[dict[str, Any]]:
    """Calibrate together what is calibrated alike, and score it group by group: what is done is recorded, whatever comes."""
    for kind in dict.fromkeys((row.texts, row.per_head) for row in rows):
        alike = [row for row in rows if (row.texts, row.per_head) == kind]
        texts, per_head = kind
        specs = [row.spec for row in alike]
        calibration = lb.calibrate(model, tokenizer, read(texts), specs, samples=64, per_head=per_head)
        for group in dict.fromkeys(row.group for row in alike):
            of = [row for row in alike if row.group == group]
            factories = {str(number): _factory(row, model, calibration, backend) for number, row in enumerate(of)}
            options = {"progress": False, "batch": 2 if model.device.type == "cuda" else 1, "parallel": True}
            scores = score(factories, default_texts(), model, tokenizer, context, START, **options)
            for row, each in zip(of, scores.values(), strict=True):
                means = mean_row(each, position_edges(START, context))
                del means["by_position"]
                by_text = {path.stem: round(x.means()["kl"], 5) for path, x in zip(default_texts(), each, strict=True)}
                yield row._asdict() | {"bits": row.spec.bits_per_value(10**9, 64)} | means | {"kl_by_text": by_text}


def _factory(row: Row, model: Any, calibration: Any, backend: str | None) -> Any:
    return functools.partial(
        lb.LowBitCache,
        *(model, row.keys, row.values),
        sink=row.sink,
        transform=row.transform,
        value_transform=row.value_transform,
        calibration=calibration,
        backend=backend,
    )


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "group": lambda record: record["group"] + ("" if record["texts"] == "essays" else f" {record['texts']}"),
    **{name: operator.itemgetter(name) for name in ("keys", "values", "transform")},
    "of values": operator.itemgetter("value_transform"),
    "sink": lambda record: str(record["sink"]),
    "bits": lambda record: f"{record['bits']:.2f}",
    "KL": lambda record: f"{record['kl']:.4f}",
    "top-1": lambda record: f"{record['top1']:.3f}",
    "ppl": lambda record: f"{record['ppl']:.2f}",
}
main = command(ROWS, measure, COLUMNS, OUT)

if __name__ == "__main__":
    run_command(main)
