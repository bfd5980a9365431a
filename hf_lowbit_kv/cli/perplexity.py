"""`hf-lowbit-kv eval perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..eval.models import default_texts
from ..eval.perplexity import run
from .common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PresetOption,
    load,
    print_json,
    print_table,
    resolve_presets,
)


def perplexity(
    preset: PresetOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file; repeat it for several.",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default="the essays worked and popular",
        ),
    ] = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each text to read.")] = 4096,
    start: Annotated[int, typer.Option("--from", min=1, help="First token that counts.")] = 512,
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
    texts = text or default_texts()
    loaded, tokenizer = load(model, device, dtype)
    rows = run(names, texts, loaded, tokenizer, context=context, start=start)
    if as_json:
        print_json(rows)
        return
    print_table(f"Tokens {start} to {context} of {', '.join(path.name for path in texts)}", rows)
