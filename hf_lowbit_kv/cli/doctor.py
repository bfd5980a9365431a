"""`hf-lowbit-kv doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..doctor import doctor as examine
from .shared_options import DeviceOption


def doctor(
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a report.")] = False,
) -> None:
    """Say what runs on this machine and why, and what is missing. Exits with 1 where nothing runs."""
    found = examine(device)
    print(json.dumps(found, indent=2) if as_json else found, end="\n" if as_json else "")
    if not found.ok:
        raise typer.Exit(1)
