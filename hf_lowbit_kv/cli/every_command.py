"""Common parts of all commands: `--import FILE` for the user's formats and presets, and a help line on extras."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..installation import install_extra

#: imported files -> names of their modules
_imported: dict[Path, str] = {}


def import_files(paths: list[Path] | None) -> None:
    """Run Python files that register formats and presets, each once.

    Raises:
        ValueError: a file is not a Python file.
        ImportError: a file raises; the message says where.
    """
    for path in paths or []:
        full = path.resolve()
        if full in _imported:
            continue
        name = f"hf_lowbit_kv_file_{len(_imported)}_{full.stem}"
        spec = importlib.util.spec_from_file_location(name, full)
        if spec is None or spec.loader is None:
            raise ValueError(f"--import {str(path)!r} is not allowed; it must be a Python file that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up their module
        if str(full.parent) not in sys.path:
            sys.path.append(str(full.parent))  # the file may import its neighbours
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(full)]
            where = f", line {lines[-1]}" if lines else ""
            raise ImportError(f"--import {str(path)!r}{where}: {_line(error)}") from error
        _imported[full] = name


def _load_installed() -> None:
    """Load the formats that installed packages register. Imports nothing if there are none."""
    if importlib.metadata.entry_points(group="hf_lowbit_kv.formats"):
        from ..formats.registered import load_installed

        load_installed()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


ImportOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Python file that registers your formats and presets; repeatable.",
    ),
]


def add_command(
    app: typer.Typer,
    name: str,
    command: Callable[..., Any],
    *,
    extra: str | None = None,
    extra_for: str = "",
    **options: Any,
) -> None:
    """Add a command to the application, with `--import`, which runs before the command.

    Args:
        extra: extra of this project that the command may need, for the help text.
        extra_for: when it is needed.
        options: options of `typer.Typer.command`.
    """
    needs = "Needs no extra packages." if extra is None else f"Needs {install_extra(extra)} ({extra_for})."
    text = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{needs}"
    app.command(name, help=text, **options)(_with_import(command))


def _with_import(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, import_: list[Path] | None = None, **options: Any) -> Any:
        _load_installed()
        import_files(import_)
        return command(*args, **options)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("import_", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ImportOption)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    last = next((n for n, each in enumerate(parameters) if each.name == "as_json"), len(parameters))
    parameters.insert(last, option)
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
