"""`hf-lowbit-kv eval sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..eval import preset_search
from ..eval.local_models import default_texts
from ..eval.preset_search import plot
from .perplexity import TextOption
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load,
    parse_overrides,
    print_json,
    print_table,
)


def sweep(
    formats: Annotated[str, typer.Option(help="Pairs KEYS/VALUES, separated by commas.")] = ",".join(
        preset_search.PAIRS
    ),
    transform: Annotated[str, typer.Option(help="Transforms, separated by commas.")] = ",".join(
        preset_search.TRANSFORMS
    ),
    sink: Annotated[str, typer.Option(help="Sink tokens, separated by commas.")] = ",".join(
        map(str, preset_search.SINKS)
    ),
    residual: Annotated[str, typer.Option(help="Newest tokens in 16 bits, separated by commas.")] = ",".join(
        map(str, preset_search.RESIDUALS)
    ),
    text: TextOption = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each text to read.")] = 2048,
    start: Annotated[int, typer.Option("--from", min=1, help="First token that counts.")] = 512,
    bits_at: Annotated[int, typer.Option(min=1, help="Length at which bits are stated.")] = 32768,
    out: Annotated[Path | None, typer.Option(help="Picture to write, .png or .svg.")] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bits against KL over formats, transforms and windows, named presets or not."""
    pairs = [preset_search.parse_pair(each) for each in _split(formats)]
    numbers = [_numbers(name, value) for name, value in (("--sink", sink), ("--residual", residual))]
    if out is not None and (out.suffix not in (".png", ".svg") or not out.parent.is_dir()):
        raise ValueError(f"--out {str(out)!r} is not allowed; it must be a .png or .svg in a folder that exists")
    given = parse_overrides(None, calibration)
    texts = text or default_texts()[:1]
    loaded, tokenizer = load(model, device, dtype)
    rows = preset_search.sweep(
        pairs, texts, loaded, tokenizer, _split(transform), *numbers, context, start, bits_at, **given
    )
    if out is not None:
        plot(rows, out, f"{', '.join(each.name for each in texts)}, tokens {start} to {context}", label="name")
        Console(stderr=True).print(f"picture: {out}", markup=False, soft_wrap=True)
    if as_json:
        print_json(rows)
        return
    cells = [
        {"formats, transform, window": row["name"], "bits": f"{row['bits_per_value']:.2f}", "KL": f"{row['kl']:.4f}"}
        | {"top-1": f"{row['top1']:.3f}", "front": "*" if row["pareto"] else ""}
        for row in rows
    ]
    print_table(f"Bits at {bits_at} tokens; *: no other has both fewer bits and less KL", cells, numbers_from=1)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _split(text)]
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is not allowed; it must be numbers separated by commas") from error
