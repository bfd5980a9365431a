"""The file to which a calibration is written. It is tested before the work begins. If writing fails at the end, the
calibration goes to another file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from filelock import FileLock

from ..calibration_files.calibration_file import FILE_NAME, Calibration
from ..calibration_files.calibration_lookup import user_folder
from ..folders import make_folder, try_folder


def try_file(path: Path, label: str) -> Calibration | None:
    """Check that a calibration can be written to `path`, or added to the file there. Creates the folder of `path`.

    Args:
        label: the name of the file in messages.

    Returns:
        The calibration in the file, or `None` if there is no file.

    Raises:
        ValueError: `path` is a folder, or its file is damaged or of another version.
        OSError: `path` cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{label} is a folder; name a file, e.g. {str(path / FILE_NAME)!r}")
    try_folder(path.parent)
    if not path.exists():
        return None
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{label} is not writable")
    try:
        return Calibration.load(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{label} exists, but nothing can be added to it: {error}. Delete it, or name another file"
        ) from error


def try_user_files(model_name: str) -> None:
    """Call `try_file` for all files of the user's folder that may belong to a model of this name. Which one does depends
    on the weights, which are not loaded yet."""
    make_folder(user_folder())
    pattern = re.compile(re.escape(model_name) + r"-[0-9a-f]{16}\.safetensors")
    for path in sorted(user_folder().iterdir()):
        if pattern.fullmatch(path.name):
            try_file(path, repr(str(path)))


def add_to_file(calibration: Calibration, path: Path) -> Calibration:
    """Write a calibration to `path`, merged with the content of an existing file. A lock serializes processes that add to
    the same file.

    Returns:
        The calibration in the file afterwards.

    Raises:
        OSError: `path` could not be written. The calibration is then written to another file, in the folder of `path` or
            the folder for temporary files. The message names this file, or says that the calibration is lost.
    """
    try:
        with FileLock(path.with_name(f".{path.name}.lock")):
            if path.exists():
                calibration = Calibration.load(path).merged(calibration)
            calibration.save(path)
    except Exception as error:  # no error should lose minutes of work
        raise OSError(f"{str(path)!r} could not be written: {error}. {_rescued(calibration, path)}") from error
    return calibration


def _rescued(calibration: Calibration, path: Path) -> str:
    """Write the calibration to a new file. Returns a sentence with its name, or with the reasons of the failure."""
    reasons = []
    for folder in (path.parent, Path(tempfile.gettempdir())):
        other: Path | None = None
        try:
            handle, name = tempfile.mkstemp(dir=folder, prefix=f"{path.stem}-", suffix=".safetensors")
            os.close(handle)
            other = Path(name)
            calibration.save(other)
            return f"The result is in {name!r}: use calibration={name!r}"
        except Exception as error:
            reasons.append(str(error))
            if other is not None:
                other.unlink(missing_ok=True)
    return f"It could not be written elsewhere either and is lost: {'; '.join(reasons)}"
