"""`hf-lowbit-kv presets`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..presets import (
    DEFAULT_PRESET,
    RECOMMENDED,
    Preset,
    get_preset,
    preset_names,
    recommended_first,
    short_list,
)
from .shared_options import JsonOption, print_json, print_left_out, print_table


def presets(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence.")] = 32768,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of an attention head.")] = 128,
    every: Annotated[bool, typer.Option("--all", help="List all presets, not only the recommended ones.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the recommended presets and their bits per value. The bits include scales and the 16-bit window.

    Presets that do not fit --head-dim are named on standard error.
    With --json the list always has all presets.
    """
    _row(get_preset("dense"), tokens, head_dim)  # raises for a size of heads that no format supports
    fitting, reasons = dict[str, dict[str, Any]](), dict[str, str]()
    for name in recommended_first(preset_names()):
        try:
            fitting[name] = _row(get_preset(name), tokens, head_dim)
        except ValueError as error:
            reasons[name] = str(error)
    names = list(fitting)
    listed = names if every or as_json else short_list(names)
    print_left_out({name: reasons[name] for name in reasons if every or as_json or name in RECOMMENDED})
    rows = [fitting[name] for name in listed]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        marks = {" *": row.pop("calibrated"), " +": row["preset"] == DEFAULT_PRESET}
        row["preset"] += "".join(mark for mark, applies in marks.items() if applies)
    print_table(f"Bits per value at {tokens} tokens, head_dim {head_dim}, 16-bit model, everything counted", rows)
    print("+: the default. *: needs a calibration of the model (hf-lowbit-kv calibrate)")
    if len(names) > len(listed):
        print(f"{len(names) - len(listed)} more: hf-lowbit-kv presets --all")


def _row(preset: Preset, tokens: int, head_dim: int) -> dict[str, Any]:
    """The table row of a preset. Raises `ValueError` if the preset does not fit the size of heads."""
    spec = preset.spec()
    widths = spec.attention_kind.shown_widths(head_dim)
    spec.validate(*widths)
    return {
        "preset": preset.name,
        "keys": preset.key_format,
        "values": preset.value_format,
        "transform": preset.transform,
        "sink": preset.sink,
        "residual": preset.residual,
        "calibrated": bool(spec.parameters(*widths, 1)),
        "bits_per_value": round(spec.bits_per_value(tokens, head_dim), 4),
    }
