"""Checks of arguments that several functions take."""

from __future__ import annotations

from typing import Any


def check_count(name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    """Raise `ValueError` unless `value` (tokens) is an integer of `least` or more, or `None`, where that is allowed."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = f"an integer of {least} or more (tokens)" + (", or None" if optional else "")
        raise ValueError(f"{name}={value!r} is not allowed; it must be {allowed}")
