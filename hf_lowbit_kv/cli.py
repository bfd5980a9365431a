"""The command `hf-lowbit-kv`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .eval.demo import Continuation, compare, default_prompt
from .eval.models import default_texts, load_model
from .eval.perplexity import run as run_perplexity
from .presets import Preset, get_preset, preset_names

app = typer.Typer(
    help="Packed low-bit KV caches for transformers: what the presets store, and what they do to a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_app = typer.Typer(help="Measure presets against the full-precision cache.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")

DTYPES = ("float32", "float16", "bfloat16")
#: columns of the tables whose name in JSON is longer than what 80 columns hold
_HEADINGS = {"bits_per_value": "bits", "residual": "tail"}
_traceback_wanted = False

PresetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--preset", "-p", help="Preset; repeat it or separate several by commas.", show_default="every preset"
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help="Hub name or folder of the model.", show_default="the bundled SmolLM2-135M-Instruct")
]
DeviceOption = Annotated[str | None, typer.Option(help="E.g. cpu, cuda:1.", show_default="the GPU, if there is one")]
DtypeOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.", show_default="float32 on the CPU, else bfloat16")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")]


def main(args: list[str] | None = None) -> None:
    """Run the command and exit: 0 if it worked, 1 for an error that its message explains, 2 for wrong options."""
    try:
        app(args=args, prog_name="hf-lowbit-kv")
    except (ValueError, OSError, ImportError) as error:
        # these say what the user can change; anything else is a defect, and its traceback is wanted
        if _traceback_wanted:
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)


@app.callback()
def _common(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")] = False,
) -> None:
    global _traceback_wanted
    _traceback_wanted = traceback


@app.command()
def presets(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence.")] = 32768,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of an attention head.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """List the presets and the bits that each stores per number, metadata and full-precision window included."""
    rows = [_preset_row(get_preset(name), tokens, head_dim) for name in preset_names()]
    if as_json:
        _print_json(rows)
        return
    _print_table(f"Bits per number at {tokens} tokens, head_dim {head_dim}, 16-bit model, everything counted", rows)


def _preset_row(preset: Preset, tokens: int, head_dim: int) -> dict[str, Any]:
    spec = preset.spec()
    spec.validate(head_dim, head_dim)
    return {
        "preset": preset.name,
        "keys": str(preset.key_format),
        "values": str(preset.value_format),
        "transform": preset.transform,
        "sink": preset.sink,
        "residual": preset.residual,
        "bits_per_value": round(spec.bits_per_value(tokens, head_dim), 4),
    }


@app.command()
def demo(
    preset: PresetOption = None,
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default="part of an essay")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 40,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a model write from the full-precision cache and from each preset, and compare."""
    names = _resolve_presets(preset)
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give it a text to continue")
    prompt = default_prompt() if prompt is None else prompt
    loaded, tokenizer = _load(model, device, dtype)
    with _progress(len(names) + 1) as report:
        reference, rows = compare(names, loaded, tokenizer, prompt, max_new_tokens, report)
    if as_json:
        _print_json(rows)
    else:
        _print_demo(prompt, reference, rows, tokenizer, str(loaded.dtype).removeprefix("torch."))


@eval_app.command()
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
    names = _resolve_presets(preset)
    if start >= context - 1:
        raise ValueError(
            f"--from {start} with --context {context}: no token would count; at most {context - 2} is allowed"
        )
    texts = text or default_texts()
    loaded, tokenizer = _load(model, device, dtype)
    rows = run_perplexity(names, texts, loaded, tokenizer, context=context, start=start)
    if as_json:
        _print_json(rows)
        return
    _print_table(f"Tokens {start} to {context} of {', '.join(path.name for path in texts)}", rows)


def _resolve_presets(options: list[str] | None) -> list[str]:
    """Names from repeated and comma-separated options, checked; every preset where there are none."""
    names = [name.strip() for option in options or [] for name in option.split(",") if name.strip()]
    if options and not names:
        raise ValueError("--preset is empty; see `hf-lowbit-kv presets`")
    return [get_preset(name).name for name in dict.fromkeys(names)] if names else preset_names()


def _load(name: str | None, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is not offered; allowed: {', '.join(DTYPES)}")
    try:
        where = None if device is None else torch.device(device)
        if where is not None:
            torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return load_model(name, getattr(torch, dtype) if dtype else None, where)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on standard error; yields a function to call with the name of each step as it begins."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def report(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1
            if not console.is_terminal:  # a log has no moving bar
                console.print(f"{begun}/{total} {name}")

        yield report


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
            "bits": f"{row['bits_per_value']:.2f}",
            "KV MB": f"{row['kv_bytes'] / 1e6:.1f}",
            "full MB": f"{row['kv_bytes_full'] / 1e6:.1f}",
            "smaller": f"{row['kv_bytes_full'] / row['kv_bytes']:.2f}x",
            "agreeing": f"{row['agreeing_tokens']}/{len(reference.tokens)}",
            "seconds": f"{row['seconds']:.1f}",
        }
        for row in rows
    ]
    _print_table(f"Against the full-precision cache in {dtype}, the dtype of the window too", cells, numbers_from=1)


def _print_text(console: Console, name: str, text: str, agreeing: int) -> None:
    """A continuation under the name of its cache; what differs from full precision in another colour."""
    console.print(Text(name, style="bold"))
    console.print(Text.assemble(text[:agreeing].lstrip("\n"), (text[agreeing:], "yellow")))
    console.print()


def _print_table(title: str, rows: list[dict[str, Any]], numbers_from: int | None = None) -> None:
    """Rows as a table. Columns of numbers, and those from `numbers_from` on, are aligned to the right."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, (column, cell) in enumerate(rows[0].items()):
        right = isinstance(cell, (int, float)) or (numbers_from is not None and index >= numbers_from)
        table.add_column(_HEADINGS.get(column, column), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else escape(str(cell)) for cell in row.values()))
    Console().print(table)


def _print_json(rows: list[dict[str, Any]]) -> None:
    print(json.dumps(rows, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
