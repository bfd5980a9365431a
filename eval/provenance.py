"""Shared code of measuring scripts: records, the data that is needed to repeat a measurement, and a console for
tables."""

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

from hf_lowbit_kv.presets import get_preset

#: the folder of records in a checkout; the wheel has no such folder
RESULTS = Path(__file__).resolve().parent / "results"


def device_name(device: torch.device | str) -> str:
    """Name of the GPU, or `"cpu"`."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def results_path(kind: str, name: str) -> Path:
    """`eval/results/<kind>-<name>.jsonl`. The name is in lower case with hyphens, e.g. `decode-nvidia-h200.jsonl`."""
    return RESULTS / f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl"


def default_records(kind: str, name: str) -> Path | None:
    """The default file for records of a script that is part of the wheel: `results_path` in a checkout, `None`
    elsewhere."""
    return results_path(kind, name) if RESULTS.is_dir() else None


def commit() -> str:
    """The checkout's commit, with `-dirty` if there are uncommitted changes. Outside a checkout: `"unknown"`."""
    if not RESULTS.is_dir():
        return "unknown"  # an installed package may be in the checkout of another project
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def provenance(commit_name: str | None = None) -> dict[str, str | None]:
    """`torch`, `triton`, `transformers`, `commit`, `date` (UTC). `commit_name` replaces the commit that git reports,
    for machines that have the files without git's history."""
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": commit_name or commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_command(main: Callable[..., Any] | None = None, **commands: Callable[..., Any]) -> None:
    """Run `main` as a command, or several `commands` by their names. Help is shown as written: brackets are not treated
    as markup."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    for name, command in commands.items() if main is None else [(None, main)]:
        app.command(name)(command)
    app()


def wide_console() -> Console:
    """A console for tables. A terminal keeps its width. A log gets 160 columns, so that tables are not cut."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    return console


def _formats(preset: Any) -> dict[str, str]:
    try:
        known_preset = get_preset(preset)
    except (ValueError, TypeError):
        return {}
    return {"keys": known_preset.key_format, "values": known_preset.value_format}


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line. NaN and infinity raise `ValueError`, because JSON does not have them. A record that names a
    preset (`preset` or `cache`) gets its formats too (`keys`, `values`), because a name may mean others later."""
    record = _formats(record.get("preset", record.get("cache"))) | record
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
