"""`hf-lowbit-kv demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    all_presets,
    load,
    parse_overrides,
    print_json,
    print_table,
    progress,
    resolve_presets,
)

if TYPE_CHECKING:
    from ..eval.demo import Continuation

#: presets of the demo, from the closest to full precision to the fewest bits
SHOWN = ("kv8", "kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink")


def demo(
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", help="Presets, separated by commas, or 'all'.", show_default=", ".join(SHOWN)),
    ] = None,
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default="part of an essay")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 40,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a model continue a text, with the full-precision cache and with each preset. Compare the texts."""
    every = preset == ["all"]
    names = [] if every else resolve_presets(preset or [",".join(SHOWN)])
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give it a text to continue")
    from ..eval.demo import compare, default_prompt

    prompt = default_prompt() if prompt is None else prompt
    loaded, tokenizer = load(model, device, dtype)
    changes = parse_overrides(None, calibration)
    names = names or all_presets(loaded, changes)
    with progress(len(names) + 1) as report:
        reference, rows = compare(names, loaded, tokenizer, prompt, max_new_tokens, report, changes)
    if as_json:
        print_json(rows)
    else:
        _print_demo(prompt, reference, rows, tokenizer, str(loaded.dtype).removeprefix("torch."))


def _print_demo(prompt: str, reference: Continuation, rows: list[dict[str, Any]], tokenizer: Any, dtype: str) -> None:
    console = Console()
    console.print(Text(f"... {prompt[-200:].strip()}", style="dim"))
    console.print()
    _print_text(console, "full precision", reference.text, len(reference.text))
    for row in rows:
        agreeing = tokenizer.decode(reference.tokens[: row["agreeing_tokens"]], skip_special_tokens=True)
        _print_text(console, row["preset"], row["text"], len(agreeing))
    cells = [
        {
            "preset": row["preset"],
            "stored bits": f"{row['bits_per_value']:.2f}",
            "KV MB": f"{row['kv_bytes'] / 1e6:.1f}",
            "full MB": f"{row['kv_bytes_full'] / 1e6:.1f}",
            "smaller": f"{row['kv_bytes_full'] / row['kv_bytes']:.2f}x",
            "agreeing": f"{row['agreeing_tokens']}/{len(reference.tokens)}",
            "seconds": f"{row['seconds']:.1f}",
        }
        for row in rows
    ]
    print_table(f"Against the full-precision cache in {dtype}", cells, numbers_from=1)
    console.print(
        "stored bits: of a number of keys and values. KV MB: what the tokens take packed; full MB: what they take in 16 bits. "
        "Everything counted, the window in 16 bits. smaller: full MB / KV MB",
        highlight=False,
    )


def _print_text(console: Console, name: str, text: str, agreeing: int) -> None:
    """Print a continuation under the name of its cache. Text that differs from full precision has another colour."""
    console.print(Text(name, style="bold"))
    console.print(Text.assemble(text[:agreeing].lstrip("\n"), (text[agreeing:], "yellow")))
    console.print()
