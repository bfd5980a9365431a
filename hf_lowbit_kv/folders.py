"""The folder in which this package keeps files: calibrations, compiled kernels, and the bundled model."""

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


def try_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raises `OSError` with the folder's name if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".try-") as file:
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
