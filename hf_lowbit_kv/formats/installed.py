"""Formats that installed packages announce: the entry-point group `hf_lowbit_kv.formats`."""

from __future__ import annotations

import importlib.metadata
import inspect
import warnings

from .. import formats
from .base import Format
from .registered import register_format

#: a module that registers what it has, or a format's class
GROUP = "hf_lowbit_kv.formats"


def load_installed() -> list[str]:
    """Load the formats and presets of installed packages, each once.

    A package announces them in its `pyproject.toml`; the value is a module, or a class after a colon:

        [project.entry-points."hf_lowbit_kv.formats"]
        mine = "my_package.formats"

    A package whose entry point fails is left out with a warning, so that it does not stop commands that do not need it.

    Returns:
        The names of the entry points that work.
    """
    names = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            target = entry.load()
            if isinstance(target, type) and issubclass(target, Format):
                if target not in formats.FORMATS:
                    register_format(target)
            elif not inspect.ismodule(target):
                raise TypeError(f"{entry.value!r} must be a module, or a class derived from hf_lowbit_kv.Format")
        except Exception as error:
            source = f" of {entry.dist.name}" if entry.dist is not None else ""
            warnings.warn(
                f"entry point {entry.name!r}{source} in {GROUP!r} does not load and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            names.append(entry.name)
    return names
