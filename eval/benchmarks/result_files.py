"""Records of measurements: how a benchmark appends and shows them (`Run`), how they are read again, and Markdown tables of
them. Options that many benchmarks have are here too."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, wide_console
from hf_lowbit_kv.presets import get_preset

Record = dict[str, Any]

# ---- options ----------------------------------------------------------------------------------------------------------

Commit = Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")]
Device = Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")]
Out = Annotated[Path | None, typer.Option(help="JSON lines [default: a file in eval/results/ with the GPU's name].")]
PresetNames = Annotated[list[str] | None, typer.Option("--preset", help="Preset; repeatable.")]
Layers = Annotated[int, typer.Option(help="Layers of the model with random weights.")]
Tiny = Annotated[bool, typer.Option(help="A tiny model instead, for a dry run.")]
Rows = Annotated[int, typer.Option(help="Rows.")]
BackendName = Annotated[str | None, typer.Option(help="Backend of our caches where none is named.")]
Rounds = Annotated[int, typer.Option(help="Samples of which the median is taken.")]
ModelName = Annotated[str, typer.Option(help="Folder or hub name.")]
RecordedName = Annotated[str | None, typer.Option(help="Name of the model in the records [default: --model].")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16, float32.")]


# ---- one run of a benchmark ---------------------------------------------------------------------------------------------


class Run:
    """A call of a benchmark: its device, its records, and the measurements that failed.

    Args:
        kind: first part of the name of the file in `eval/results/`, unless `out` is given.
        common: fields of all records.
    """

    def __init__(self, kind: str, device: str = "cuda", commit: str | None = None, out: Path | None = None, **common):
        self.device, self.commit, self.common = torch.device(device), commit, common
        self.out = out or results_path(kind, device_name(self.device))
        self.records: list[Record] = []
        self.faults: list[str] = []
        self.console = wide_console()

    @property
    def dtype(self) -> torch.dtype:
        """Of models with random weights."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def add(self, record: Record, show: bool = True) -> Record:
        """Append a record to the file, with the GPU's name, versions, commit and date. show: in the table of `end`."""
        record = record | {"gpu": device_name(self.device)} | self.common | provenance(self.commit)
        append_record(self.out, record)
        if show:
            self.records.append(record)
        return record

    def attempt(self, title: Any, work: Callable[[], Any]) -> Any:
        """The result of `work`, or `None` if it raises: a failure does not stop the measurements that follow."""
        try:
            return work()
        except Exception as error:
            traceback.print_exc()
            self.faults.append(f"{title}: {type(error).__name__}: {error}")
            return None

    def end(self, *columns: str) -> None:
        """Print a table of the records (`shown`), and the failures. Exits with 1 if there are any."""
        if self.records:
            self.console.print(shown(self.records, *columns))
        for fault in self.faults:
            self.console.print(f"FAILED, not recorded: {fault}", markup=False)
        if self.faults:
            raise typer.Exit(1)


def shown(records: Iterable[Record], *columns: str) -> Table:
    """A table for a terminal. A column is the name of a field, with a format: `ms:.2f`, `share:.1%`, and for bytes
    `nbytes:GB`. A dash stands for a field that a record lacks, or that is `None`."""
    fields = [column.partition(":")[::2] for column in columns]
    table = Table(*(f"{name}, GB" if fmt == "GB" else name for name, fmt in fields))
    for record in records:
        table.add_row(*(_cell(record.get(name), fmt) for name, fmt in fields))
    return table


def _cell(value: Any, fmt: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:.3f}" if fmt == "GB" else f"{value:{fmt}}" if isinstance(value, (int, float)) else str(value)


# ---- files ------------------------------------------------------------------------------------------------------------


def current_records(path: Path) -> list[Record]:
    """The records of a file, without those of a preset that has other formats today, or that is gone."""
    return [record for record in read_records(path) if _is_current(record)]


def _is_current(record: Record) -> bool:
    if "keys" not in record:  # of a cache that is not ours
        return True
    try:
        preset = get_preset(record["preset"] if "preset" in record else record["cache"])
    except ValueError:
        return False
    return (preset.key_format, preset.value_format) == (record["keys"], record["values"])


def read_records(path: Path) -> list[Record]:
    """The records of a file, oldest first. The list is empty if there is no such file.

    Raises:
        ValueError: a line is not a JSON object. The message names the line.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {number}, is no JSON: {error}") from error
        records.append(record)
    return records


def newest(records: Iterable[Record], *keys: str) -> dict[tuple, Record]:
    """The last record of each combination of values in these fields, in the order in which combinations first
    appear."""
    last: dict[tuple, Record] = {}
    for record in records:
        last[tuple(record.get(key) for key in keys)] = record
    return last


# ---- Markdown ---------------------------------------------------------------------------------------------------------

#: a cell: a template of a record's fields, e.g. "`{preset}`", or a function of the record. A template is empty if the
#: record lacks a field
Cell = str | Callable[[Any], str]


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. The first column is text, the others are numbers."""
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def cell_of(record: Any, cell: Cell) -> str:
    """The text of a cell. No record has an empty cell."""
    if record is None:
        return ""
    if not isinstance(cell, str):
        return cell(record)
    try:
        return cell.format(**record)
    except (KeyError, TypeError):
        return ""


def listed(records: Iterable[Any], columns: Mapping[str, Cell] | Sequence[tuple[str, Cell]]) -> str:
    """A Markdown table with a row for each record. `columns`: heads and cells."""
    pairs = [*columns.items()] if isinstance(columns, Mapping) else columns
    return markdown_table(
        [head for head, _ in pairs], ([cell_of(record, cell) for _, cell in pairs] for record in records)
    )


def crossed(
    cells: Mapping[tuple, Record],
    rows: Mapping[str, Cell],
    columns: Mapping[Any, str],
    cell: Cell,
    order: Callable[[tuple], Any] | None = None,
) -> str:
    """A Markdown table in which a record is a cell.

    Args:
        cells: records, keyed by the values of their row and, last, by their column.
        rows: the columns before: of the first record of each row.
        columns: head of each column. Rows without a cell in these columns are left out.
        order: key to sort rows by [default: as they first appear].
    """
    row_keys = list(dict.fromkeys(key[:-1] for key in cells))
    body = []
    for row_key in row_keys if order is None else sorted(row_keys, key=order):
        own = [cells.get((*row_key, column)) for column in columns]
        if first := next((record for record in own if record is not None), None):
            body.append([*(cell_of(first, each) for each in rows.values()), *(cell_of(record, cell) for record in own)])
    return markdown_table([*rows, *columns.values()], body)
