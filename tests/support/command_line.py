"""The command `hf-lowbit-kv`, called in the process of the test."""

import pytest
import typer

from hf_lowbit_kv import cli
from hf_lowbit_kv.cli import application


def call(capture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error. capture: `capsys`, or `capfd`, where what C code writes counts."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    captured = capture.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def commands() -> dict[str, object]:
    """All commands by their full name."""
    group = typer.main.get_command(application.app)
    named = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        named |= {name: command} if inner is None else {f"{name} {each}": sub for each, sub in inner.items()}
    return named
