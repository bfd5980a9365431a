"""`hf-lowbit-kv eval perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..eval.local_models import default_texts
from ..eval.perplexity import run
from ..eval.texts import Text, dataset_text
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PresetOption,
    SetOption,
    all_presets,
    load,
    parse_overrides,
    print_json,
    print_table,
    resolve_presets,
)

TextOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text file; repeat it for several.",
        exists=True,
        dir_okay=False,
        readable=True,
        show_default="the essays worked and popular",
    ),
]


def perplexity(
    preset: PresetOption = None,
    text: TextOption = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead of --text: a hub name or a local file for `datasets`.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "test",
    column: Annotated[str, typer.Option(help="Column of the dataset that holds the documents.")] = "text",
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 4096,
    start: Annotated[int, typer.Option("--from", min=1, help="First token of a window that counts.")] = 512,
    windows: Annotated[int, typer.Option(min=0, help="Windows of each text, at most; 0: as many as it has.")] = 1,
    by_position: Annotated[bool, typer.Option(help="Print KL and top-1 by position too.")] = False,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity, KL divergence and top-1 agreement of each preset against the full-precision cache."""
    names = resolve_presets(preset)
    if start >= context - 1:
        raise ValueError(
            f"--from {start} with --context {context}: no token would count; at most {context - 2} is allowed"
        )
    if text and dataset:
        raise ValueError("--text and --dataset exclude each other; give one of them")
    changes = parse_overrides(overrides, calibration)
    texts: list[Path | Text] = [*(text or default_texts())]
    if dataset:
        texts = [dataset_text(dataset, config, split, column, context * (windows or 10_000))]
    loaded, tokenizer = load(model, device, dtype)
    names = names or all_presets(loaded, changes)
    rows = run(names, texts, loaded, tokenizer, context=context, start=start, windows=windows, overrides=changes)
    if as_json:
        print_json(rows)
        return
    shown = ", ".join(each.name for each in texts)
    print_table(f"Tokens {start} to {context} of {shown}", [_without_positions(row) for row in rows])
    if by_position:
        _print_positions(rows)


def _without_positions(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "by_position"}


def _print_positions(rows: list[dict[str, Any]]) -> None:
    """One row a preset, one column a range of positions."""
    for metric in ("kl", "top1"):
        cells = [
            {"preset": row["preset"]}
            | {f"{bucket['from']:.0f} to {bucket['to']:.0f}": bucket[metric] for bucket in row["by_position"]}
            for row in rows
        ]
        print_table(f"{metric} by position", cells)
