"""`hf-lowbit-kv eval needle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..eval import needle as task
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


def needle(
    preset: PresetOption = None,
    model: ModelOption = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prompt; repeatable.", show_default="512, 1024, 2048")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where the fact stands, 0 to 1; repeatable.", show_default="0, 0.25, 0.5, 0.75, 1"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Needles at each place.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to hide them in.", exists=True, dir_okay=False, show_default="the essay worked"),
    ] = None,
    kv_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens read at a time; more than a page flatters the cache.")
    ] = 128,
    picture: Annotated[Path | None, typer.Option(help="PNG file for the heat maps.")] = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find a fact hidden in a text, over depths and lengths, with each preset and full precision."""
    names = resolve_presets(preset)
    lengths, depths = length or list(task.LENGTHS), depth or list(task.DEPTHS)
    if picture is not None:
        task.check_picture(picture)
    given = parse_overrides(overrides, calibration)
    loaded, tokenizer = load(model, device, dtype)
    names = names or all_presets(loaded, given)
    with progress(task.steps(names, lengths)) as report:
        rows = task.run(
            names, loaded, tokenizer, lengths, depths, trials, text, kv_chunk, report=report, overrides=given
        )
    if picture is not None:
        task.draw(rows, picture)
    if as_json:
        print_json(rows)
        return
    print_table("Needles found, and mean log-probability of the code", task.heat_map(rows), numbers_from=2)
