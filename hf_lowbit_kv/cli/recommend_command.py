"""`hf-lowbit-kv recommend`: the best preset within a budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..byte_sizes import parse_size
from ..eval.local_models import calibration_texts, default_texts
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonObjectOption,
    ModelOption,
    SetOption,
    error_of_kl,
    load,
    parse_overrides,
    print_json,
    print_table,
    resolve_presets,
)

if TYPE_CHECKING:
    from ..eval.preset_search import Budget


def recommend(
    bits: Annotated[
        float | None, typer.Option(help="Budget: bits per value at --context, scales and window included.")
    ] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="Budget, instead of --bits: memory of the cache at --context, e.g. 24GB.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens per row.")] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", help="Presets to try.", show_default="all that support the model"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to measure on.", exists=True, dir_okay=False, readable=True, show_default="an essay"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=514, help="Tokens of the text to read; the first 512 are not measured.")
    ] = 2048,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            help="Calibrate the model if presets within the budget need it.", show_default="prompt on a terminal"
        ),
    ] = None,
    calibration_text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file for --calibrate; repeatable.",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default="bundled essays, without the measured one",
        ),
    ] = None,
    model: ModelOption = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonObjectOption = False,
) -> None:
    """Measure the presets within a budget, and name the best one.

    Presets that need a calibration are included if the model has one, or with --calibrate.
    """
    if (bits is None) == (cache_memory is None):
        raise ValueError("give a budget, either --bits or --cache-memory")
    from ..eval.preset_search import Budget
    from ..eval.preset_search import recommend as measure

    budget = Budget(bits, None if cache_memory is None else parse_size(cache_memory, "--cache-memory"), context, batch)
    names, changes = resolve_presets(preset), parse_overrides(overrides, calibration)
    if calibration is None and calibrate is None and _can_ask():
        hint = (
            "When the model is loaded, this asks whether to calibrate it (--calibrate or --no-calibrate answers now)."
        )
        Console(stderr=True).print(hint, highlight=False)
    loaded, tokenizer = load(model, device, dtype)
    source = text or default_texts()[0]
    if calibration is None:
        _calibrate_first(loaded, tokenizer, budget, names, changes, calibrate, calibration_text, source)
    rows = measure(loaded, tokenizer, source, budget, names, changes, tokens)
    if as_json:
        print_json({"budget": budget._asdict(), "best": rows[0]["preset"], "code": rows[0]["code"], "candidates": rows})
        return
    cells = [
        {
            "preset": row["preset"],
            "bits": f"{row['bits_per_value']:.2f}",
            "GB": f"{row['bytes'] / 1e9:.3f}",
            "full GB": f"{row['bytes_full'] / 1e9:.3f}",
            "KL": f"{row['kl']:.4f}",
            "+-": error_of_kl(row),
            "top-1": f"{row['top1']:.3f}",
            "ppl": f"{row['ppl']:.2f}",
        }
        for row in rows
    ]
    title = (
        f"Within {budget}; accuracy on {source.name}, tokens 512 to {tokens}, full precision: {rows[0]['ppl_full']:.2f}"
    )
    print_table(title, cells, numbers_from=1)
    best = rows[0]
    print(f"Best: {best['preset']}. +-: standard error of KL")
    print(best["code"])
    if best["calibrated"]:
        print(
            f"{best['preset']} uses a calibration of this model. Another model needs its own: "
            f"hf-lowbit-kv calibrate --preset {best['preset']} --model NAME"
        )


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _calibrate_first(
    model: Any,
    tokenizer: Any,
    budget: Budget,
    names: list[str] | None,
    changes: dict[str, Any],
    confirmed: bool | None,
    texts: list[Path] | None,
    measured: Path,
) -> None:
    """Make missing calibrations for presets within the budget, if the user agrees. Otherwise print the excluded presets."""
    from ..calibration.calibration_cost import cost
    from ..calibration.progress import LogLines
    from . import missing_calibrations

    if not (lacking := missing_calibrations.lacking(model, budget, names, changes)):
        return
    console, names_text = Console(stderr=True), ", ".join(lacking)
    announcement = f"{names_text}: a calibration of the model takes {cost(model, lacking)}"
    if confirmed is None and _can_ask():
        console.print(f"{announcement}. Make it? [y/N] ", end="", markup=False, soft_wrap=True)
        confirmed = sys.stdin.readline().strip().lower() in ("y", "yes")  # the end of input is a no
    if not confirmed and names:
        return  # presets named by the user are not excluded: they raise with the command that calibrates
    if not confirmed:
        console.print(f"left out: {announcement} (--calibrate)", markup=False, soft_wrap=True)
        return
    console.print(announcement, markup=False, soft_wrap=True)
    progress = True if console.is_terminal else LogLines()
    path = missing_calibrations.make(model, tokenizer, lacking, texts or calibration_texts(), measured, progress)
    console.print(f"calibration: {path}", markup=False, soft_wrap=True)
