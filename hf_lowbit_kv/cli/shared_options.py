"""Options and output that commands share. Like all files of this folder, it imports torch, transformers and modules that
need them only inside functions, so that help is fast."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..eval.data_parallel import process_count
from ..eval.local_models import AUTO, check_bundled_model, load_model, model_name
from ..folders import check_model_folder
from ..presets import get_preset

if TYPE_CHECKING:
    import torch

_INTEGER = re.compile("-?[0-9]+")
DTYPES = ("float32", "float16", "bfloat16")
#: name in JSON -> heading in tables of 80 columns
HEADINGS = {"bits_per_value": "bits", "residual": "tail", "transform": "mapped"}

PresetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        "-p",
        help="Presets, separated by commas.",
        show_default="all that support the model",
    ),
]


def check_model(name: str | None) -> str | None:
    """The value of `--model`, if it is not a folder that is missing. Without one, the bundled model must be installed."""
    if name is None:
        check_bundled_model()
    else:
        check_model_folder("--model", name)
    return name


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Hub name or folder of the model.",
        show_default="the bundled SmolLM2-135M-Instruct",
        callback=check_model,
    ),
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text file; repeatable.",
        exists=True,
        dir_okay=False,
        readable=True,
        show_default="the essays worked and popular",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="E.g. cpu, cuda:1. auto: layers spread over all GPUs.", show_default="the GPU, if there is one"),
]
DtypeOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.", show_default="float32 on a CPU, else bfloat16")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Argument of from_preset, e.g. residual=64; repeatable."),
]
ChunkOption = Annotated[
    int, typer.Option("--kv-chunk", min=1, help="Tokens read at a time. Above a page (128) results look too good.")
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        help="Calibration: a file that `calibrate` made, or a folder or hub repository with one.",
        show_default="the one found for the model",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")]
JsonObjectOption = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]

#: when a measuring command needs the extra `eval`
MEASURING = "for the bundled model and texts, if you give no --model or --text"


def split_names(options: list[str] | None) -> list[str]:
    """Unique names from repeated and comma-separated values of an option."""
    names = dict.fromkeys(name.strip() for value in options or [] for name in value.split(","))
    return [name for name in names if name]


def resolve_presets(options: list[str] | None) -> list[str]:
    """Validated preset names from repeated and comma-separated options. Empty if there are no options."""
    names = split_names(options)
    if options and not names:
        raise ValueError("--preset is empty; see `hf-lowbit-kv presets`")
    return [get_preset(name).name for name in names]


def all_presets(model: Any, overrides: dict[str, Any] | None = None) -> list[str]:
    """The listed presets that support the model. Prints the others, with reasons, to standard error."""
    from ..eval.preset_search import fitting_presets

    names, reasons = fitting_presets(model, overrides)
    print_left_out(reasons)
    if not names:
        raise ValueError(f"no preset supports this model: {next(iter(reasons.values()))}")
    return names


def print_left_out(reasons: dict[str, str]) -> None:
    """Print presets that are left out, with the reason for each, to standard error."""
    for name, reason in reasons.items():
        Console(stderr=True).print(f"without {name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def parse_overrides(options: list[str] | None, calibration: str | None = None) -> dict[str, Any]:
    """`--set` and `--calibration` as arguments of `from_preset`. Values are parsed as JSON if they are valid JSON, else they
    are text. The calibration is read once."""
    if options:
        from ..cache.cache_options import PresetCacheOptions, unknown_option
    overrides: dict[str, Any] = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set {option!r} is not allowed; it must be NAME=VALUE, e.g. residual=64")
        if name not in PresetCacheOptions.__annotations__:
            raise ValueError(f"--set {option!r} is not allowed: {unknown_option(name)}")
        if name == "calibration" and calibration is not None:
            raise ValueError(f"--calibration {calibration!r} and --set {option!r} are both given; give one of them")
        try:
            overrides[name] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name] = value
        if name == "per_layer" and isinstance(overrides[name], dict):  # keys of JSON objects are text
            overrides[name] = {
                int(key) if _INTEGER.fullmatch(key) else key: each for key, each in overrides[name].items()
            }
    if calibration is None:
        return overrides
    from ..calibration_files.calibration_file import Calibration

    return {"calibration": Calibration.load(calibration), **overrides}


def load(name: str | None, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """Load the model and its tokenizer. name, device, dtype: values of `--model`, `--device` and `--dtype`."""
    check_dtype(dtype)
    import torch
    import transformers

    if not sys.stderr.isatty():  # a log has no moving bar
        transformers.utils.logging.disable_progress_bar()
    return load_model(name, getattr(torch, dtype) if dtype else None, check_device(device))


def ran_on(model: Any, name: str | None) -> str:
    """Model, dtype and device of a measurement, for the title of its table. name: the value of `--model`."""
    from ..eval.provenance import device_name

    return f"{model_name(name)}, {str(model.dtype).removeprefix('torch.')}, {device_name(model.device)}"


def check_dtype(name: str | None, allowed: Sequence[str] = DTYPES) -> None:
    """Raise `ValueError` if `--dtype` is not one of `allowed`."""
    if name is not None and name not in allowed:
        raise ValueError(f"--dtype {name!r} is not offered; allowed: {', '.join(allowed)}")


def check_device(name: str | None) -> torch.device | str | None:
    """The device of this name, or `"auto"`. Raises `ValueError` if torch cannot use it."""
    if name == AUTO:
        return name
    import torch

    try:
        device = None if name is None else torch.device(name)
        if device is not None:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def device_of_process(name: str | None) -> str | None:
    """`--device` for this process. If several processes run on GPUs, each uses its own GPU.

    Raises:
        ValueError: there are several processes, and `--device` names one GPU for all of them, or is `auto`.
    """
    count = process_count()
    if count == 1 or name == "cpu":
        return name
    import torch

    if name == AUTO or (name is not None and torch.device(name).index is not None):
        raise ValueError(
            f"--device {name!r} with {count} processes is not allowed: each process uses its own GPU; leave --device out"
        )
    if not torch.cuda.is_available():
        return name
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"


def refuse_several_processes(command: str) -> None:
    """Raise `ValueError` if a launcher has started several processes: each would do all the work."""
    if (count := process_count()) > 1:
        raise ValueError(
            f"`{command}` runs in one process, but WORLD_SIZE={count}: start it without accelerate launch or torchrun. "
            "`eval perplexity` and `eval lm-eval` can use several processes"
        )


@contextmanager
def progress(total: int, after: float = 0.0) -> Iterator[Any]:
    """Show a bar on standard error, or a line per step where that is not a terminal. Yields a function to call with the
    name of each step, when it begins.

    Args:
        after: seconds before anything is shown.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=total)
    steps, start = 0, time.monotonic()

    def report(name: str) -> None:
        nonlocal steps
        bar.update(task, description=name, completed=steps)
        steps += 1
        if time.monotonic() - start < after:
            return
        if console.is_terminal:
            bar.start()
        else:
            console.print(f"{steps}/{total} {name}")

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def print_table(title: str, rows: list[dict[str, Any]], numbers_from: int | None = None) -> None:
    """Print rows as a table, never cut. Columns of numbers, and those from `numbers_from` on, are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, (column, cell) in enumerate(rows[0].items()):
        right = isinstance(cell, (int, float)) or (numbers_from is not None and index >= numbers_from)
        table.add_column(HEADINGS.get(column, column), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else escape(str(cell)) for cell in row.values()))
    console = console_for(table)
    # printed separately: a table would wrap its title to its own width
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def console_for(table: Table) -> Console:
    """A console that is wide enough for a table. In a narrower terminal the table's lines wrap, but no number is cut."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    console.width = max(console.width, needed)
    return console


def error_of_kl(row: dict[str, Any]) -> str:
    """The standard error of KL for a table; `"-"` if there are too few positions."""
    return "-" if row["kl"] > 0 and row["kl_error"] == 0 else f"{row['kl_error']:.2g}"


def print_json(rows: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Print a JSON list or object to standard output. NaN and infinity, which JSON lacks, become null."""
    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(_finite(rows), indent=2, ensure_ascii=ascii_only, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
