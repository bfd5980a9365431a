"""`hf-lowbit-kv recommend`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..eval.local_models import default_texts
from ..eval.preset_search import Budget, parse_size
from ..eval.preset_search import recommend as measure
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    SetOption,
    load,
    parse_overrides,
    print_json,
    print_table,
    resolve_presets,
)


def recommend(
    bits: Annotated[float | None, typer.Option(help="Bits per number at --context, everything counted.")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="Instead of --bits: memory of the cache at --context, e.g. 24GB.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", "-p", help="Candidate.", show_default="all that serve the model")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to measure on.", exists=True, dir_okay=False, readable=True, show_default="an essay"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=514, help="Tokens of the text to read; the first 512 do not count.")
    ] = 2048,
    model: ModelOption = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a table.")] = False,
) -> None:
    """Measure the presets that meet a budget, and name the best."""
    if (bits is None) == (cache_memory is None):
        raise ValueError("give a budget, either --bits or --cache-memory")
    if bits is not None and bits <= 0:
        raise ValueError(f"--bits {bits:g} is not allowed; it must be above 0")
    budget = Budget(bits, None if cache_memory is None else parse_size(cache_memory), context, batch)
    names, changes = resolve_presets(preset), parse_overrides(overrides, calibration)
    loaded, tokenizer = load(model, device, dtype)
    source = text or default_texts()[0]
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
            "top-1": f"{row['top1']:.3f}",
            "ppl": f"{row['ppl']:.2f}",
        }
        for row in rows
    ]
    title = (
        f"Within {budget}; accuracy on {source.name}, tokens 512 to {tokens}, full precision: {rows[0]['ppl_full']:.2f}"
    )
    print_table(title, cells, numbers_from=1)
    print(f"Best: {rows[0]['preset']}")
    Console().print(rows[0]["code"], markup=False, soft_wrap=True)
