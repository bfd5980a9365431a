"""Benchmarks in this process: their commands, and rows of the accuracy table. What presets store today is computed once,
because each takes two seconds."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from hf_lowbit_kv.eval.benchmarks import measure, tables
from hf_lowbit_kv.eval.benchmarks.result_files import read_records


def invoked(command: Callable[..., Any], *arguments: object) -> click.testing.Result:
    """The result of a command with these arguments, exit code and output."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*map(str, arguments)])


def records_of(command: Callable[..., Any], out: Path, *arguments: object) -> list[dict[str, Any]]:
    """The records that a command writes into a new file `out`. It must end without an error."""
    done = invoked(command, *arguments, "--out", out)
    assert done.exit_code == 0, (done.output, done.exception)
    return read_records(out)


definition = functools.cache(measure.definition)


@functools.cache
def accuracy_rows() -> list[tables.PresetRow]:
    """`tables.load()` of the committed records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "definition", definition)
        return tables.load()
