"""Calibration files: tensors by layer, side, transform and format, and a record of their source. Never pickled.

A file contains a digest of its content, so altered files are rejected. Files of earlier releases have no digest.

One file can have the parameters of several presets, which share tensors of the same transform and format. Tensor names:

    layers.<index>.<keys|values>.<transform>.<parameter>              of a transform, e.g. layers.3.keys.smooth+hadamard.scale
    layers.<index>.<keys|values>.<transform>.<format>.<parameter>     of a format that stores the transform's output
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..folders import named_path, try_folder
from ..storage.content_digests import digest
from .calibration_card import push_to_hub
from .model_description import MadeFor, difference

#: version of the content; files of other versions are rejected. In version 1, keys of `eigen` had no center, and pages of
#: `static` had 8-bit means. Files of version 1 without such tensors are accepted
VERSION = 2
CHANGED_IN_2 = ("eigen", "static-")
FILE_NAME = "calibration.safetensors"


@dataclass(eq=False)
class Calibration:
    """Parameters of transforms and formats for one model.

    Attributes:
        tensors: by name; the module's docstring explains names.
        model: a description of the model: `name`, `model_type`, `layers`, `marks`, `weights` (see `describe_model`).
        source: the runs of `calibrate` that made the tensors. An entry has presets, samples, length, seed, versions and
            the names of its `tensors`. A dict, as in older files, becomes one entry with the names of all tensors.
        path: the file from which the calibration was loaded.

    Example:
        >>> calibration = lb.calibrate(model, tokenizer, [long_text], ["vecinfer-2"], samples=2, length=256, progress=False)
        >>> calibration.save("mine.safetensors")
        >>> lb.Calibration.load("mine.safetensors").contents()
        ['keys of hadamard.vq-d4b8', 'values of none.vq-d4b8']
    """

    tensors: dict[str, torch.Tensor]
    model: dict[str, Any]
    source: list[dict[str, Any]] = field(default_factory=list)
    path: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, dict):
            self.source = [{**self.source, "tensors": sorted(self.tensors)}] if self.source else []

    def __repr__(self) -> str:
        return f"Calibration({', '.join(self.contents()) or 'nothing'}; for {self.model.get('name')!r}, path={self.path!r})"

    def get(self, layer: int, side: str, names: Iterable[str]) -> torch.Tensor:
        """One tensor. Raises `ValueError` if the calibration does not have it."""
        *stages, parameter = names
        name = ".".join(("layers", str(layer), side, *stages, parameter))
        if (tensor := self.tensors.get(name)) is None:
            raise ValueError(
                f"calibration{self._where()} has no {parameter} for {side} of {'.'.join(stages)} ({name}); it has "
                f"{', '.join(self.contents()) or 'nothing'}"
            )
        return tensor

    def contents(self) -> list[str]:
        """The parts for which the calibration has tensors: `keys of smooth+hadamard.vq-d4b8`, ..."""
        parts = {tuple(name.split(".")[2:-1]) for name in self.tensors}
        return sorted(f"{side} of {'.'.join(rest)}" for side, *rest in parts)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically. Raises `OSError` if that fails, and `ValueError` if `path` is empty."""
        path = named_path("path", path, "file")
        metadata = {
            "format": "hf-lowbit-kv calibration",
            "version": str(VERSION),
            "model": json.dumps(self.model),
            "source": json.dumps(self.source),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(self.tensors.items())}
        metadata["digest"] = _digest(tensors, metadata)
        try_folder(path.parent)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors replaces the file by one that only its owner can read
        try:
            save_file(tensors, temporary, metadata)
            temporary.chmod(mode)
            temporary.replace(path)
        except SafetensorError as error:
            raise OSError(f"calibration cannot be written to {str(path)!r}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        measured: Sequence[Mapping[str, Any]] = (),
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload the calibration with a card that describes its source. `calibration="org/name"` then finds it.

        Args:
            repo_id: `org/name`. The repository is created if it does not exist.
            measured: accuracy of presets for the card, on a text that the calibration has not used. One mapping per
                preset, with `preset`, `kl`, and optionally `bits_per_value`, `top1` and `text`, as
                `hf-lowbit-kv eval perplexity --json` prints them.
            private, token, revision, commit_message: as for `huggingface_hub.HfApi`.

        Returns:
            The URL of the commit.

        Raises:
            ValueError: `measured` lacks a field, or names a text that the calibration has used. Nothing is uploaded.
        """
        return push_to_hub(
            self,
            FILE_NAME,
            repo_id,
            measured=measured,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
        )

    @classmethod
    def load(cls, source: str | Path) -> Calibration:
        """Read a file, or the file `calibration.safetensors` of a folder or of a hub repository.

        Raises:
            ValueError: the file is not a calibration, is truncated, altered or of another version, or has numbers that
                are not finite.
            OSError: there is no such file, or it cannot be opened.
        """
        path, label = find_file(source), f"calibration={str(source)!r}"
        with opened(path, label) as file:
            tensors = {name: file.read(name) for name in file.names}
        saved_digest = file.metadata.get("digest")
        if saved_digest is not None and saved_digest != _digest(tensors, file.metadata):
            raise ValueError(f"{label} was altered after it was saved: make it again")
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{label} has numbers that are not finite, in {name}: make it again")
        return cls(tensors, file.model, file.source, str(path))

    def merged(self, other: Calibration) -> Calibration:
        """A calibration with the tensors of both. `other` must be for the same model, and its tensors replace tensors of
        the same names. Runs whose tensors are all replaced are dropped from `source`.

        Raises:
            ValueError: the models differ, or `other` changes a transform, but not a format that depends on it.
        """
        if (reason := difference(self.model, other.model)) is not None:
            raise ValueError(f"calibrations for different models cannot be merged: {reason}")
        self._check_kept(other)
        runs = [
            {**run, "tensors": [x for x in run.get("tensors", []) if x not in other.tensors]} for run in self.source
        ]
        source = [*(run for run in runs if run["tensors"]), *other.source]
        return Calibration(self.tensors | other.tensors, self.model, source, self.path)

    def _check_kept(self, other: Calibration) -> None:
        """Raise `ValueError` if `other` changes a transform on which kept tensors of this calibration depend."""
        stored = self.tensors
        changed = {
            x for x, tensor in other.tensors.items() if x in stored and not torch.equal(stored[x].cpu(), tensor.cpu())
        }
        dependent = {tuple(x.split(".")[:4]): x for x in stored if x not in other.tensors and len(x.split(".")) > 5}
        for name in sorted(changed):
            if len(parts := name.split(".")) == 5 and (later := dependent.get(tuple(parts[:4]))) is not None:
                raise ValueError(
                    f"{name} would change, but {later} depends on the present one: calibrate the presets of both "
                    "together, or write another file"
                )

    @property
    def made_for(self) -> MadeFor:
        """The model for which this calibration was made."""
        return MadeFor(self.model, f"calibration{self._where()}")

    def check(self, model: Mapping[str, Any], allow_other_weights: bool = False) -> None:
        """Raise `ValueError` if the calibration was not made for `model` (`describe_model`). allow_other_weights: whether
        other weights of the same sizes are accepted."""
        self.made_for.check(model, allow_other_weights)

    def _where(self) -> str:
        return f"={self.path!r}" if self.path else ""


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """64 hexadecimal digits that identify the content of a file."""
    fields = [metadata[key] for key in ("format", "version", "model", "source")]
    content = [(name, digest(tensor).hex()) for name, tensor in sorted(tensors.items())]
    return hashlib.sha256(json.dumps([fields, content]).encode()).hexdigest()


class OpenFile(NamedTuple):
    """An open calibration file with its header: the descriptions of the model and of the source."""

    handle: Any
    metadata: dict[str, str]
    model: dict[str, Any]
    source: Any

    @property
    def names(self) -> list[str]:
        return list(self.handle.keys())

    def read(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own: the file may be overwritten or truncated while a calibration is in use."""
        return self.handle.get_tensor(name).clone()


@contextmanager
def opened(path: Path, label: str) -> Iterator[OpenFile]:
    """Open a calibration file of this version. label: its name in messages.

    Raises:
        ValueError: the file is not a calibration, is truncated, is of another version, or names no model.
        OSError: the file cannot be opened.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != "hf-lowbit-kv calibration":
                raise ValueError(f"{label} is a safetensors file, but not a calibration")
            version = metadata.get("version")
            compatible = version == "1" and not any(part in name for name in file.keys() for part in CHANGED_IN_2)  # noqa: SIM118
            if version != str(VERSION) and not compatible:
                raise ValueError(
                    f"{label} has version {version!r}, but this release reads {VERSION}: make it again with "
                    "`hf-lowbit-kv calibrate`"
                )
            try:
                model, source = json.loads(metadata["model"]), json.loads(metadata["source"])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{label} does not describe its model and source: {error!r}") from error
            yield OpenFile(file, metadata, model, source)
    except SafetensorError as error:
        raise ValueError(f"{label} cannot be read; it may be truncated: {error}") from error
    except OSError as error:
        raise type(error)(f"{label} cannot be opened: {error}") from error


#: name of a hub repository -> its file, so that a process looks up each only once
_of_hub: dict[str, Path] = {}


def find_file(source: str | Path) -> Path:
    """The file for the argument `calibration=`, which names a file, a folder or a hub repository."""
    path = Path(source)
    if path.is_dir():
        path = path / FILE_NAME
    if path.is_file():
        return path
    text = str(source)
    if text in _of_hub and _of_hub[text].is_file():
        return _of_hub[text]
    if text.count("/") == 1 and not path.is_absolute() and not text.startswith(".") and path.suffix != ".safetensors":
        from transformers.utils import cached_file

        try:
            file = cached_file(text, FILE_NAME)
        except OSError as error:
            raise OSError(f"calibration={text!r} is neither a file nor a readable hub repository: {error}") from error
        if file is not None:
            _of_hub[text] = Path(file)
            return _of_hub[text]
    raise FileNotFoundError(f"calibration={text!r} is neither a file, nor a folder or hub repository with {FILE_NAME}")
