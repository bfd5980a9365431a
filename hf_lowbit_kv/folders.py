"""The folder in which this package keeps files: calibrations, compiled kernels, and the bundled model; folders of models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

#: environment variable for the folder of all kept files, instead of the user's cache folder; an empty value counts as
#: unset
VARIABLE = "HF_LOWBIT_KV_CACHE"


def cache_root() -> Path:
    """The folder with a subfolder for each kind of file. It may not exist."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("hf-lowbit-kv"))


def check_model_folder(argument: str, name: str) -> None:
    """Raise `OSError` if a model's name can only be that of a folder, and there is no such folder."""
    if (name.startswith(("/", ".", "~")) or name.rstrip("/").count("/") > 1 or name.endswith("/")) and not Path(
        name
    ).exists():
        raise OSError(f"{argument}={name!r}: there is no such folder, and a model on the hub is called owner/name")


def named_path(argument: str, path: str | Path, kind: str = "folder") -> Path:
    """The path of an argument. Raises `ValueError` if it is empty: `Path` would mean the working directory."""
    if not str(path):
        raise ValueError(f"{argument}='' is not allowed; it must name a {kind}")
    return Path(path)


def try_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raises `OSError` with the folder's name if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # it has no name, so nothing stays if the process is killed
            file.write(b"\0")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def make_folder(folder: Path) -> None:
    """Create a subfolder of `cache_root` if it is missing, and check that it can be written.

    Raises:
        OSError: it cannot be written. The message says how to choose another folder.
    """
    try:
        try_folder(folder)
    except OSError as error:
        raise OSError(
            f"{str(folder)!r} cannot be written: {error.strerror or error}. Set the environment variable {VARIABLE} to another "
            "folder for all files of this package"
        ) from error
