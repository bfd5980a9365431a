"""The command of scripts that calibrate and measure rows of choices: `eval.eigen` and `eval.vecinfer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.eval.models import BUNDLED_MODEL, default_device, load_model
from hf_lowbit_kv.eval.results import append_record, device_name, provenance, wide_console

#: of rows, the model, its tokenizer, a backend (`None`: by device) and the tokens of a text: a record of each row, as they come
Measure = Callable[[list[Any], Any, Any, str | None, int], Iterator[dict[str, Any]]]


def setting(context: int, device: torch.device, backend: str | None) -> dict[str, Any]:
    """Of a record: what it was measured with."""
    facts = {"model": BUNDLED_MODEL, "context": context, "dtype": "float32", "device": device_name(device)}
    return facts | {"backend": backend or "the default"}


def command(
    rows: Sequence[Any], measure: Measure, columns: Mapping[str, Callable[[dict[str, Any]], str]], records: Path
) -> Callable[..., None]:
    """A function for `run_command`: it measures rows on the bundled model, records each, and shows a table.

    Args:
        rows: what can be measured; each has a `group`.
        measure: yields a row's fields with what was found.
        columns: of the table that is shown; from a record, what stands in a cell.
        records: JSON lines to append to, where the user says nothing.
    """
    groups = list(dict.fromkeys(row.group for row in rows))

    def main(
        group: Annotated[list[str] | None, typer.Option(help="Group of rows, repeatable [default: all].")] = None,
        context: Annotated[int, typer.Option(help="Tokens of each text; those from 512 on are scored.")] = 4096,
        device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
        backend: Annotated[str | None, typer.Option(help="torch, cpu, triton [default: by device].")] = None,
        commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
        out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = records,
    ) -> None:
        """Calibrate and measure each row, record it, and show a table."""
        if unknown := [name for name in group or () if name not in groups]:
            raise typer.BadParameter(f"--group {unknown[0]!r} is not known; allowed: {', '.join(map(repr, groups))}")
        where = torch.device(device) if device else default_device()
        model, tokenizer = load_model(None, torch.float32, where)
        table = Table(*columns)
        for found in measure(
            [row for row in rows if not group or row.group in group], model, tokenizer, backend, context
        ):
            record = found | setting(context, where, backend) | provenance(commit)
            append_record(out, record)
            table.add_row(*(cell(record) for cell in columns.values()))
        wide_console().print(table)

    return main
