"""Records of measurements: JSON lines under `eval/results/`, each with what is needed to repeat it."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

#: where records are kept, in a checkout
RESULTS = Path(__file__).resolve().parent / "results"


def device_name(device: torch.device | str) -> str:
    """Name of the GPU, or `"cpu"`."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def results_path(kind: str, name: str) -> Path:
    """`eval/results/<kind>-<name>.jsonl`, the name in lower case with hyphens: `decode-nvidia-h200.jsonl`."""
    return RESULTS / f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl"


def commit() -> str:
    """The checkout's commit, with `-dirty` where it has uncommitted changes; `"unknown"` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def provenance(commit_name: str | None = None) -> dict[str, str | None]:
    """`torch`, `triton`, `transformers`, `commit`, `date` (UTC). `commit_name` overrides what git says, for machines
    that hold the files without their history."""
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": commit_name or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_command(main: Callable[..., Any]) -> None:
    """Run `main` as a command. Help is shown as it is written: what stands in brackets is no markup."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app()


def wide_console() -> Console:
    """For tables: a terminal as wide as it is, and a log of 160 columns, where nothing has to be cut."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    return console


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON line. NaN and infinity are no JSON: they raise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first; none where there is no such file.

    Raises:
        ValueError: a line is no JSON object; the message names it.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {number}, is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path.name}, line {number}, is no record: {line[:80]!r}")
        records.append(record)
    return records
