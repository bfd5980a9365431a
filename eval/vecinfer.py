"""What VecInfer's choices do to the bundled model: `python -m hf_lowbit_kv.eval.vecinfer`.

Each row is calibrated on texts on which it is not measured (the other essays, or Python source where a row says so), then
measured through the cache, as `perplexity` does. Records go to `eval/results/vecinfer-smollm2.jsonl`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.models import (
    BUNDLED_MODEL,
    calibration_texts,
    default_device,
    default_texts,
    library_texts,
    load_model,
)
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.results import append_record, device_name, provenance, results_path, run_command, wide_console
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.transforms import parse_transform

OUT = results_path("vecinfer", "smollm2")


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
    """Calibrate and score rows, those of a group together that are calibrated alike."""
    for kind in dict.fromkeys((row.group, row.texts, row.per_head) for row in rows):
        of = [row for row in rows if (row.group, row.texts, row.per_head) == kind]
        _, texts, per_head = kind
        calibration = lb.calibrate(
            model, tokenizer, read(texts), [row.spec for row in of], samples=64, per_head=per_head
        )
        factories = {
            str(number): functools.partial(
                lb.LowBitCache,
                *(model, row.keys, row.values),
                sink=row.sink,
                transform=row.transform,
                value_transform=row.value_transform,
                calibration=calibration,
                backend=backend,
            )
            for number, row in enumerate(of)
        }
        batch = 2 if model.device.type == "cuda" else 1
        scores = score(
            factories, default_texts(), model, tokenizer, context, 512, progress=False, batch=batch, parallel=True
        )
        for row, each in zip(of, scores.values(), strict=True):
            means = mean_row(each, position_edges(512, context))
            del means["by_position"]
            texts_kl = {path.stem: round(x.means()["kl"], 5) for path, x in zip(default_texts(), each, strict=True)}
            yield row._asdict() | {"bits": row.spec.bits_per_value(10**9, 64)} | means | {"kl_by_text": texts_kl}


def main(
    group: Annotated[list[str] | None, typer.Option(help="Group of rows, repeatable [default: all].")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each text; those from 512 on are scored.")] = 4096,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    backend: Annotated[str | None, typer.Option(help="torch, cpu, triton [default: by device].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Calibrate, measure on the default texts, and record."""
    where = torch.device(device) if device else default_device()
    model, tokenizer = load_model(None, torch.float32, where)
    rows = [row for row in ROWS if not group or row.group in group]
    table = Table("group", "keys", "values", "transform", "sink", "bits", "KL", "top-1", "ppl")
    for record in measure(rows, model, tokenizer, backend, context):
        setting = {"model": BUNDLED_MODEL, "context": context, "dtype": "float32", "device": device_name(where)}
        setting["backend"] = backend or "the default"
        append_record(out, record | setting | provenance(commit))
        shown = (f"{record['bits']:.2f}", f"{record['kl']:.4f}", f"{record['top1']:.3f}", f"{record['ppl']:.2f}")
        transform = record["transform"] + (
            "" if record["value_transform"] == "none" else f" / {record['value_transform']}"
        )
        extra = "" if record["texts"] == "essays" else f" {record['texts']}"
        table.add_row(record["group"] + extra, record["keys"], record["values"], transform, str(record["sink"]), *shown)
    wide_console().print(table)


if __name__ == "__main__":
    run_command(main)
