"""`hf-lowbit-kv eval layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..eval.layer_errors import run as measure_layers
from ..eval.local_models import default_texts
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
    progress,
    resolve_presets,
)


def layers(
    preset: PresetOption = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file.", exists=True, dir_okay=False, readable=True, show_default="an essay"),
    ] = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of the text to read.")] = 2048,
    start: Annotated[int, typer.Option("--from", min=1, help="First token that counts.")] = 512,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Error of attention in each layer alone, and how uneven its channels are."""
    names, changes = resolve_presets(preset), parse_overrides(overrides, calibration)
    loaded, tokenizer = load(model, device, dtype)
    names = names or all_presets(loaded, changes)
    source = text or default_texts()[0]
    with progress(loaded.config.get_text_config().num_hidden_layers) as report:
        rows = measure_layers(
            names, source, loaded, tokenizer, context, start, changes, lambda layer: report(f"layer {layer}")
        )
    if as_json:
        print_json(rows)
        return
    cells = [
        {"layer": row["layer"]}
        | {name: f"{row[key]:.1f}" for name, key in (("key peak", "key_peak"), ("value peak", "value_peak"))}
        | {"1st key": f"{row['first_key']:.1f}"}
        | {name: f"{error:.4f}" for name, error in row["errors"].items()}
        for row in rows
    ]
    print_table(
        f"Relative error of attention outputs, {source.name}, tokens {start} to {context}", cells, numbers_from=0
    )
