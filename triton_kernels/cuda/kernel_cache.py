"""The cache of compiled kernels on disk. Its files run on the GPU, so the directory must belong only to the user.

A file holds a SHA-256 digest, in 64 hexadecimal digits, and the kernel. The digest covers the file's name and the
kernel. A file that was cut short, altered or renamed is ignored: the log names it, and the kernel is compiled again. A
digest does not prove who wrote a file, so the directory must be the user's and closed to all others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from ...folders import VARIABLE, cache_root

logger = logging.getLogger("hf_lowbit_kv")
DIGEST_LENGTH = 64


def cache_directory() -> Path:
    """The directory of the cache. It need not exist."""
    directory = cache_root() / "kernels"
    if (owner := _owner(directory)) is not None and owner != os.getuid():
        directory = directory.with_name(f"kernels-{os.getuid()}")  # users may share the parent folder, but not kernels
    return directory


def _owner(directory: Path) -> int | None:
    """The numeric id of the owner; `None`: the path does not exist, or users have no ids (Windows)."""
    try:
        return directory.stat().st_uid if hasattr(os, "getuid") else None
    except OSError:
        return None


def why_refused(directory: Path) -> str | None:
    """Why an existing directory is neither read nor written, or `None`."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if not hasattr(os, "getuid"):  # Windows: directories of a user are closed to others
        return None
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}, not to {os.getuid()}"
    if status.st_mode & 0o077:
        return f"others may use it: its mode is {stat.S_IMODE(status.st_mode):04o}, and 0700 is required"
    return None


def _usable(directory: Path) -> bool:
    """Whether the directory can be used. If not, the reason is logged once."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        reason = why_refused(directory)
    except OSError as error:
        reason = f"it cannot be written: {error.strerror or error}"
    if reason is not None:
        _warn(directory, reason)
    return reason is None


@functools.cache
def _warn(directory: Path, reason: str) -> None:
    logger.warning(
        "%s keeps no CUDA kernels, because %s. They are compiled again in every process; set %s to another directory",
        *(directory, reason, VARIABLE),
    )


def load(name: str) -> bytes | None:
    """The kernel in the file `name`, or `None` if there is no undamaged file."""
    directory = cache_directory()
    path = directory / name
    try:
        if not directory.exists() or not _usable(directory):
            return None
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refuse(path, f"cannot be read: {error.strerror or error}")
    kernel = data[DIGEST_LENGTH:]
    if data[:DIGEST_LENGTH] != _digest(name, kernel):
        return _refuse(path, "is not the kernel that was kept there")
    return kernel


def _refuse(path: Path, reason: str) -> None:
    logger.warning("%s %s: it is compiled again", path, reason)


def save(name: str, kernel: bytes) -> None:
    """Write a file completely or not at all, because other processes may be reading it."""
    directory = cache_directory()
    if not _usable(directory):
        return
    try:
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:  # only for its owner
            written = Path(file.name)
            try:
                file.write(_digest(name, kernel) + kernel)
                file.close()
                written.replace(directory / name)
            except OSError:
                written.unlink(missing_ok=True)
                raise
    except OSError as error:
        _warn(directory, f"it cannot be written: {error.strerror or error}")


def _digest(name: str, kernel: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + kernel).hexdigest().encode()
