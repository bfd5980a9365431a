"""What scripts that measure have in common: records with what is needed to repeat them, and a console for tables."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

#: where records are kept in a checkout; the wheel has no such folder
RESULTS = Path(__file__).resolve().parent / "results"


def device_name(device: torch.device | str) -> str:
    """Name of the GPU, or `"cpu"`."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def results_path(kind: str, name: str) -> Path:
    """`eval/results/<kind>-<name>.jsonl`, the name in lower case with hyphens: `decode-nvidia-h200.jsonl`."""
    return RESULTS / f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl"


def default_records(kind: str, name: str) -> Path | None:
    """Where a script that users have appends its records unless they say: `results_path` in a checkout, elsewhere nowhere."""
    return results_path(kind, name) if RESULTS.is_dir() else None


def commit() -> str:
    """The checkout's commit, with `-dirty` where it has uncommitted changes; `"unknown"` outside a checkout."""
    if not RESULTS.is_dir():
        return "unknown"  # an installed package may lie in somebody else's checkout
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


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON line. NaN and infinity are no JSON: they raise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
