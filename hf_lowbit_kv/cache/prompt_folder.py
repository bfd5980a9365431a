"""Texts of a prefix store in files: a folder for each, which several stores and processes may share.

A folder appears under its name when it is complete, and loses its name before it is removed. A text whose tensors are
damaged is removed. One that cannot be read now, or that another release wrote, stays. Each causes a warning, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from ..storage.process_stamps import ReadOnce
from . import saved_cache
from .checked_tensors import UninterpretableError
from .contents import Contents, common_prefix, joined, trim

#: how many descriptions are remembered while their files do not change
MOST_REMEMBERED = 10_000


class PromptFolder:
    """A folder of texts. Each text is a saved cache in its own subfolder. Texts that another process removes or
    replaces meanwhile are missing, without a warning.

    Args:
        limit: bytes of all files; the least recently used are removed first. `None`: no limit.
    """

    def __init__(self, path: Path, limit: int | None):
        self.path, self.limit = path, limit
        self._read: ReadOnce[tuple[str, torch.Tensor]] = ReadOnce(MOST_REMEMBERED)
        self._warned_of = set[Path]()
        path.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._descriptions())

    def _descriptions(self) -> list[Path]:
        return sorted(self.path.glob(f"prompt-*/{saved_cache.FILE_NAME}"))

    def _warn(self, path: Path, problem: str, error: Exception) -> None:
        """Warn, once for each text. path: of its description."""
        if path not in self._warned_of:
            self._warned_of.add(path)
            warnings.warn(f"the text {str(path.parent)!r} of a PrefixStore {problem}: {error}", stacklevel=2)

    def _text(self, path: Path) -> tuple[str, torch.Tensor]:
        """Seed and ids of a text. Raises `ValueError` if the file is damaged, `FileNotFoundError` if it is gone, and `OSError`
        if it cannot be read."""

        def read() -> tuple[str, torch.Tensor]:
            try:
                more = saved_cache.read_description(path)["more"]
                seed, ids = more["seed"], torch.tensor(more["ids"])
                # earlier releases kept int32 ids as they were
                named = ids.dtype == torch.int64 and path.parent.name in (_name(seed, ids), _name(seed, ids.int()))
            except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
                raise UninterpretableError(f"it is no text of a PrefixStore ({error!r:.200})") from error
            if not named:
                raise UninterpretableError("its folder has the name of another text")
            return seed, ids

        return self._read.get(path, read)

    def texts(self, seed: str) -> list[tuple[Path, torch.Tensor]]:
        """File and ids of each text with this seed, the most recently used first."""
        by_time = []
        for path in self._descriptions():
            try:
                own_seed, ids = self._text(path)
                if own_seed == seed:
                    by_time.append((path.stat().st_mtime_ns, path, ids))
            except FileNotFoundError:  # another store has removed it
                continue
            except (OSError, ValueError) as error:
                self._warn(path, "cannot be used", error)
        return [(path, ids) for _, path, ids in sorted(by_time, key=lambda each: -each[0])]

    def load(self, seed: str, ids: torch.Tensor, device: torch.device, more_than: int, model: Any) -> Contents | None:
        """Read the text that has the longest common prefix with these ids, of those that can be read and suit the model's
        embedding. `None` if no text has more than `more_than` tokens in common."""
        matches = [(common_prefix(own_ids, ids), path) for path, own_ids in self.texts(seed)]
        for tokens, path in sorted(matches, key=lambda each: -each[0]):
            if tokens <= more_than:
                break
            if (prompt := self.read(path, device)) is not None and prompt.suits(model):
                return prompt
        return None

    def read(self, path: Path, device: torch.device) -> Contents | None:
        """Read a text. `None` if its files are gone, cannot be read, or are damaged (damaged ones are removed)."""
        try:
            with saved_cache.opened(path.absolute()) as saved:  # a relative one may look like a hub repository
                prompt = _prompt_of(saved.description, saved.tensors(device))
        except FileNotFoundError:  # another store has removed it, and may be writing it again: nothing to clean up
            return None
        except OSError as error:  # of the disk or the system; the text may be whole
            self._warn(path, "cannot be read now", error)
            return None
        except UninterpretableError as error:
            self._warn(path, "cannot be used", error)
            return None
        except ValueError as error:
            self._remove(path.parent)
            self._warn(path, "is damaged, and is removed", error)
            return None
        with contextlib.suppress(OSError):
            path.touch()
        return prompt

    def save(self, prompt: Contents) -> None:
        """Write a text, then remove the oldest texts beyond the limit. Raises `OSError` if it cannot be written, or is there
        and cannot be read."""
        folder = self.path / _name(prompt.seed, prompt.ids)
        more = {"seed": prompt.seed, "ids": prompt.ids.tolist()}
        try:
            self._text(folder / saved_cache.FILE_NAME)
        except UninterpretableError as error:
            self._warn(folder / saved_cache.FILE_NAME, "cannot be used, and is not replaced", error)
            return
        except (FileNotFoundError, ValueError):  # it is not there, or damaged, so that nothing would find it
            self._remove(folder)
            self._write(folder, prompt, more)
        with contextlib.suppress(OSError):
            (folder / saved_cache.FILE_NAME).touch()
        self._drop_oldest()

    def _write(self, folder: Path, prompt: Contents, more: dict[str, Any]) -> None:
        """Write a text to a new folder, unless another store does so first."""
        work = self._unnamed()
        try:
            saved_cache.write(work, joined([prompt]), prompt.header, more)
            (work / saved_cache.LOCK_NAME).unlink(missing_ok=True)  # no other process uses this folder
            with contextlib.suppress(OSError):  # the text is there
                work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _remove(self, folder: Path) -> bool:
        """Remove a text, or what is left of one. Returns whether it has lost its name; another store may have done so."""
        gone = self._unnamed()
        try:
            folder.rename(gone)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _unnamed(self) -> Path:
        return self.path / f".{secrets.token_hex(8)}.tmp"

    def _drop_oldest(self) -> None:
        for left in self.path.glob(".*.tmp"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > saved_cache.LEFT_FOR:
                    shutil.rmtree(left, ignore_errors=True)
        if (limit := self.limit) is None:
            return
        sizes = []
        for path in self._descriptions():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.parent.iterdir())
                sizes.append((size <= limit, path.stat().st_mtime_ns, size, path.parent))  # too large ones go first
        total = sum(size for *_, size, _ in sizes)
        for *_, size, folder in sorted(sizes):
            if total <= limit:
                return
            self._remove(folder)
            total -= size

    def clear(self) -> None:
        """Remove all texts. Raises `OSError` if some cannot be removed."""
        gone = [self._remove(path.parent) for path in self._descriptions()]
        if not all(gone):
            raise OSError(
                f"{gone.count(False)} of {len(gone)} texts in folder={str(self.path)!r} cannot be removed: is it read-only?"
            )


def _name(seed: str, ids: torch.Tensor) -> str:
    """The folder of a text. ids: int64 `[n]`."""
    return f"prompt-{hashlib.blake2b(seed.encode() + ids.numpy().tobytes(), digest_size=16).hexdigest()}"


def _prompt_of(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Contents:
    contents, more = saved_cache.contents_in(description, tensors), description["more"]
    header = saved_cache.header_in(description, tensors)
    prompt = contents.keep(more["seed"], torch.tensor(more["ids"]), header)
    for slab in list(prompt.acquired):
        trim([prompt], slab)  # older files also have pages of other texts
    return prompt
