"""All commands in one application."""

from __future__ import annotations

import importlib.metadata
import io
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .demo_command import demo
from .evaluation_commands import eval_app
from .every_command import add_command
from .presets_command import presets
from .recommend_command import recommend
from .serve_command import serve
from .setup_commands import calibrate, doctor, fits, share
from .shared_options import MEASURING, refuse_several_processes

app = typer.Typer(
    help="Low-bit KV caches for transformers: see what fits and runs here, calibrate a model, measure presets, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of long options
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(eval_app, name="eval")
add_command(app, "doctor", doctor)
add_command(app, "fits", fits)
add_command(app, "recommend", recommend, extra="eval", extra_for=MEASURING)
add_command(app, "calibrate", calibrate, extra="calibrate", extra_for="for vecinfer-* on a CPU")
add_command(app, "share", share)
add_command(app, "serve", serve, extra="serve", extra_for="always")
add_command(app, "presets", presets)
add_command(app, "demo", demo, extra="eval", extra_for="for the bundled model, if you give no --model")

_print_traceback = False


def run(args: list[str] | None = None, commands: typer.Typer = app, name: str = "hf-lowbit-kv") -> None:
    """Run a command and exit; see `cli.main`. commands, name: another application with the same error handling, and its
    name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal or pipe shows "?" instead of ending the command
    try:
        commands(args=args, prog_name=name)
    except (ValueError, OSError, ImportError) as error:
        # messages of these errors say what the user can change; any other error is a defect and needs its traceback
        if _print_traceback:
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)


def _print_version(requested: bool) -> None:
    if requested:
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
    global _print_traceback
    _print_traceback = traceback
    if context.invoked_subcommand != "eval":  # `eval` checks its own commands
        refuse_several_processes(str(context.invoked_subcommand))
