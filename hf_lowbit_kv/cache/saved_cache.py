"""Caches in files: a description (json) and the tensors (safetensors). Old files stay until the new ones are complete.
A cache can only be loaded for the model that it was made for.

The description names its tensor file, whose name holds a checksum. So replacing the description replaces both at once.
Several processes may save into one folder and read from it. Each writes files of its own, and then, one after the other,
gives them their names and removes those of the save before. A reader opens the tensors that its description names, and
keeps them open.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from filelock import FileLock

from ..calibration_files import calibration_lookup
from ..folders import try_folder
from ..presets import why_not_of
from ..storage.content_digests import difference, digest, fingerprint_of, rows_digest
from ..storage.layer_spec import LayerSpec
from ..storage.page_pool import Slab, upload
from ..storage.paged_store import read_pages
from .checked_tensors import UninterpretableError, read_tensors, write_tensors
from .contents import Contents, PackedLayer, PagedLayers
from .model_positions import keeps_positions

FILE_NAME = "lowbit_cache.json"
#: an empty file in the folder, which a process locks while it replaces files
LOCK_NAME = ".lock"
#: version of the description and of the tensors' names
VERSION = 2
#: an unfinished file older than this (seconds) is removed
LEFT_FOR = 86400
_FORMAT = "hf-lowbit-kv cache"
#: names of `PackedLayer.windows`
_WINDOWS = ("sink.keys", "sink.values", "tail.keys", "tail.values")


# ---- writing -----------------------------------------------------------------------------------------------------------


def header_of(cache: Any, fingerprint: Mapping[str, Any], ids: torch.Tensor | None = None) -> dict[str, Any]:
    """The description of a cache and its model for a file, and the calibration's tensors (`parameters`). ids: of the text, if
    known."""
    packed = {index: layer for index, layer in enumerate(cache.layers) if hasattr(layer, "spec")}
    return {
        "class": type(cache).__name__,
        "preset": cache.preset,
        "specs": {str(index): layer.spec.with_layouts("planar-1", "planar-1").key for index, layer in packed.items()},
        "fingerprint": fingerprint,
        "embedded": None if ids is None else rows_digest(cache.model.get("saved"), ids),
        "parameters": {f"{index}.{name}": x for index, layer in packed.items() for name, x in layer.parameters.items()},
    }


def header_in(description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The header that a file was written with."""
    named = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith("parameters.")}
    fields = {name: description[name] for name in ("class", "preset", "specs", "fingerprint")}
    return {**fields, "embedded": description.get("embedded"), "parameters": named}


def write(folder: Path, contents: Contents, header: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
    """Write the contents of a cache. Existing files in the folder are replaced in one step, or not at all.

    Args:
        header: see `header_of`.
        more: plain values to keep in the description.

    Raises:
        OSError: the files cannot be written, or a file has the name of the folder.
    """
    tensors, described = _tensors_of(contents)
    tensors |= {f"parameters.{name}": tensor for name, tensor in header["parameters"].items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    memory = set[int]()
    for name, tensor in tensors.items():  # safetensors does not take two views of one memory
        start = tensor.untyped_storage().data_ptr()
        tensors[name] = (
            tensor.clone() if start in memory or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        )
        memory.add(start)
    fields = {name: value for name, value in header.items() if name != "parameters"}
    description = {"format": _FORMAT, "version": VERSION, **fields, **described, "more": dict(more or {})}
    try_folder(folder)
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    of_tensors = temporary.with_suffix(".tensors.tmp")
    try:
        checksums = write_tensors(of_tensors, tensors, {"description": _described_by(description)})
        name = f"lowbit_cache-{_checksum(json.dumps(checksums, sort_keys=True))}.safetensors"
        description |= {"checksums": checksums, "tensors": name}
        temporary.write_text(_signed(description), encoding="utf-8")
        _sync(of_tensors)
        _sync(temporary)
        with FileLock(folder / LOCK_NAME):
            of_tensors.replace(folder / name)
            temporary.replace(folder / FILE_NAME)
            for old in folder.glob("lowbit_cache-*.safetensors"):
                if old.name != name:
                    old.unlink(missing_ok=True)
    finally:
        of_tensors.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
    for left in folder.glob(".*.tmp"):  # files of processes that were killed
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > LEFT_FOR:
                left.unlink()


def _tensors_of(contents: Contents) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by name, and the other values of the description."""
    tensors, layers, native_layers = dict[str, torch.Tensor](), dict[str, Any](), dict[str, Any]()
    padding = {f"padding.{number}": each for number, each in enumerate(contents.padding)}
    for index, layer in contents.layers.items():
        prefix, group = f"layers.{index}", contents.groups[layer.spec.paging]
        numbers, places = np.unique(group.table[group.present], return_inverse=True)
        (table := np.zeros_like(group.table, dtype=np.int32))[group.present] = places
        tensors[f"{prefix}.pages"] = _pages(layer.slabs, numbers)
        tensors[f"{prefix}.table"] = torch.from_numpy(table)
        tensors |= {f"{prefix}.{name}": window for name, window in zip(_WINDOWS, layer.windows, strict=True)}
        tensors |= {name: mask for name, (_, mask) in padding.items()}
        sinks, tails = group.window(contents.lengths)
        layers[str(index)] = {
            "spec": layer.spec.key,
            "heads": layer.heads,
            "widths": layer.widths,
            "dtype": str(layer.dtype).removeprefix("torch."),
            "seen": contents.seen,
            "in_tail": group.in_tail,
            "mode": contents.mode,
            "paged": group.paged.tolist(),
            "sinks": sinks.tolist(),
            "tails": tails.tolist(),
            "padding": [(start, name) for name, (start, _) in padding.items()],
        }
    for index, of_layer in contents.native_layers.items():
        tensors |= {f"own.{index}.{name}": tensor for name, tensor in of_layer.items()}
        native_layers[str(index)] = {"seen": contents.seen if "keys" in of_layer else 0, "tensors": list(of_layer)}
    if contents.text is not None:
        tensors["text"] = contents.text
    described: dict[str, Any] = {"layers": layers, "own": native_layers, "read": contents.read}
    if contents.positions is not None:
        tensors |= {f"positions.{name}": x for name, x in contents.positions.items() if isinstance(x, torch.Tensor)}
        described["positions"] = {
            name: None if isinstance(x, torch.Tensor) else x for name, x in contents.positions.items()
        }
    return tensors, described


def _pages(slabs: list[torch.Tensor], numbers: np.ndarray) -> torch.Tensor:
    """The pages with these numbers, ascending. A kept prompt shares slabs with other texts, whose pages are left out."""
    if len(slabs) == 1 and len(slabs[0]) == len(numbers):
        return slabs[0]
    copied = read_pages(slabs, upload(numbers, slabs[0].device))
    return copied.cpu()  # one layer at a time, because a GPU may have no room for copies of all


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _described_by(description: Mapping[str, Any]) -> str:
    """A checksum of what describes the tensors. Their file contains it, so neither of the two goes with another one."""
    return _checksum(
        json.dumps({name: x for name, x in description.items() if name not in ("checksums", "tensors")}, sort_keys=True)
    )


def _signed(description: dict[str, Any]) -> str:
    text = json.dumps(description)
    return json.dumps({"checksum": _checksum(text), "content": text}, indent=1)


def _sync(path: Path) -> None:
    """Make sure that the written file survives a crash of the machine."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


# ---- reading -----------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A saved cache that is open for reading."""

    path: Path
    """of the description"""
    description: dict[str, Any]
    file: FileIO
    """the tensors"""

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors, on `device`."""
        return read_tensors(self.file, self.description["checksums"], device, _described_by(self.description))


@contextlib.contextmanager
def opened(source: str | Path, revision: str | None = None, token: str | bool | None = None) -> Iterator[Saved]:
    """Open the saved cache in a folder or a hub repository. Later saves of other processes do not change it.

    Raises:
        FileNotFoundError: there is none. ValueError: as `read_description`, or the tensors are not there.
        UninterpretableError: also in place of what the block raises because the description has other fields or values
            than this release writes.
    """
    local, path = Path(source).exists(), _find(source, revision, token)
    while True:
        description = read_description(path)
        file = path.parent / _named(description, path)
        if not local and not file.is_file():
            file = _of_hub(str(source), description["tensors"], revision, token)
        try:
            if not stat.S_ISREG(file.stat().st_mode):  # to open a pipe would wait for somebody who writes to it
                raise ValueError(f"{file} is no regular file")
            open_file = file.open("rb", buffering=0)
            break
        except FileNotFoundError:  # unless another process has replaced both
            if read_description(path) == description and not file.exists():
                raise ValueError(f"{path} names {description['tensors']}, which is not there") from None
    with open_file:
        try:
            yield Saved(path, description, open_file)
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            raise UninterpretableError(f"{path} cannot be interpreted: {type(error).__name__}: {error}") from error


def _find(source: str | Path, revision: str | None, token: str | bool | None) -> Path:
    """The description of a saved cache in a folder or a hub repository."""
    path = Path(source)
    if path.is_dir() or path.is_file():
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"{str(source)!r} has no {FILE_NAME}: no cache was saved there")
        return path
    if str(source).count("/") != 1 or path.is_absolute():
        raise FileNotFoundError(f"{str(source)!r} is neither a folder nor a hub repository with {FILE_NAME}")
    return _of_hub(str(source), FILE_NAME, revision, token)


def _of_hub(repo: str, name: str, revision: str | None, token: str | bool | None) -> Path:
    from transformers.utils import cached_file

    file = cached_file(repo, name, revision=revision, token=token)
    if file is None:
        raise FileNotFoundError(f"the hub repository {repo!r} has no {name}")
    return Path(file)


def stored_tokens(description: Mapping[str, Any]) -> int:
    """Tokens of a row that a saved cache holds."""
    return max((fields["seen"] for fields in description["layers"].values()), default=0)


def read_description(path: Path) -> dict[str, Any]:
    """The contents of a description.

    Raises:
        ValueError: it is not the description of a cache, was truncated or altered, or has another version.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UninterpretableError(f"{path} is no regular file")
    try:
        signed = json.loads(path.read_text(encoding="utf-8"))
        text, checksum = signed["content"], signed["checksum"]
        altered = set(signed) != {"content", "checksum"} or _checksum(text) != checksum
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no saved cache, or was truncated or altered: {error!r:.200}") from error
    if altered:
        raise ValueError(f"{path} was altered: its content is not what was saved")
    try:
        description: dict[str, Any] = json.loads(text)
        kind, version = description["format"], description["version"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UninterpretableError(f"{path} cannot be interpreted: {error!r:.200}") from error
    if kind != _FORMAT or version != VERSION:
        raise UninterpretableError(
            f"{path} has format {kind!r}, version {version!r}; this release reads {_FORMAT!r}, version {VERSION}: make it again"
        )
    return description


def _named(description: Mapping[str, Any], path: Path) -> str:
    """The name of the tensors' file."""
    name = description.get("tensors")
    if not isinstance(name, str) or not re.fullmatch(r"lowbit_cache-[0-9a-f]{32}\.safetensors", name):
        raise UninterpretableError(f"{path} names {name!r:.100} as its tensors")
    return name


def check_model(description: Mapping[str, Any], model: Any, path: Path) -> None:
    """Raise `ValueError` if the cache was saved for another model. The message names the difference."""
    if (reason := difference(description["fingerprint"], fingerprint_of(model, "a saved cache"))) is not None:
        raise ValueError(f"{path} was saved for another model: {reason}")
    if description["layers"] and "positions" not in description and keeps_positions(model):
        raise ValueError(
            f"{path} was saved without the positions that {type(model).__name__} keeps outside of its cache (rope_deltas): "
            "make it again"
        )


def check_expected(
    description: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    preset: str | None,
    calibration: Any,
    model: Any,
    cache: Any,
    path: Path,
) -> None:
    """Raise `ValueError` if the cache does not have the preset or the calibration that the caller expects, or the model other
    embeddings of its text."""
    if description.get("embedded") is not None:
        now = rows_digest(model, tensors.get("text"))
        if now not in (description["embedded"], None):
            raise ValueError(f"{path} was saved for another model: the embedding of a token of its text differs")
    if preset is not None:
        reason = why_not_of(preset, description["preset"], specs_in(description).values())
        if reason is not None:
            raise ValueError(f"{path} holds a cache of {reason}")
    if calibration is None:
        return
    specs = {index: cache.layers[index].spec for index in cache.packed_sizes}
    wanted = calibration_lookup.parameters_for(
        calibration, model, specs, cache.packed_sizes, preset, allow_other_weights=True
    ).tensors
    for index in specs:
        expected = wanted.get(index, {})
        saved = {name.split(".", 2)[2]: x for name, x in tensors.items() if name.startswith(f"parameters.{index}.")}
        for name in sorted({*expected, *saved}):
            if name not in expected or name not in saved or digest(expected[name].cpu()) != digest(saved[name].cpu()):
                raise ValueError(f"{path} was saved with another calibration: {name} of layer {index} differs")


def parameters_in(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """The calibration's tensors by layer, as `LowBitCache` takes them."""
    by_layer: dict[int, dict[str, torch.Tensor]] = {}
    for full, tensor in tensors.items():
        if full.startswith("parameters."):
            _, index, name = full.split(".", 2)
            by_layer.setdefault(int(index), {})[name] = tensor
    return by_layer


def specs_in(description: Mapping[str, Any]) -> dict[int, LayerSpec]:
    """The spec of each packed layer, in the default layout."""
    try:
        return {int(index): LayerSpec.parse(key) for index, key in description["specs"].items()}
    except ValueError as error:
        raise UninterpretableError(
            f"the saved cache has a format or a layout that this release does not know: {error}"
        ) from error


def contents_in(description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Contents:
    """The contents of the saved cache."""
    try:
        contents = _packed_in(description, tensors)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UninterpretableError(f"the saved cache has layers that this release does not know: {error}") from error
    contents.native_layers = {
        int(index): {name: tensors[f"own.{index}.{name}"] for name in fields["tensors"]}
        for index, fields in description["own"].items()
    }
    contents.text, read = tensors.get("text"), description.get("read")
    if (positions := description.get("positions")) is not None:
        contents.positions = {name: tensors.get(f"positions.{name}", value) for name, value in positions.items()}
    contents.read = None if read is None else tuple(read)
    return contents


def _packed_in(description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Contents:
    """The packed layers. Raises `ValueError` if they do not hold the same text."""
    contents = Contents()
    for number, fields in description["layers"].items():
        prefix, spec = f"layers.{number}", LayerSpec.parse(fields["spec"])
        slab, *windows = (tensors[f"{prefix}.{name}"] for name in ("pages", *_WINDOWS))
        table, paged = tensors[f"{prefix}.table"].cpu().numpy().astype(np.int64), np.array(fields["paged"])
        lengths = np.sum([fields["sinks"], paged, fields["tails"]], axis=0)
        if not contents.groups:
            contents.lengths, contents.seen, contents.mode = lengths, fields["seen"], fields["mode"]
            contents.padding = [(start, tensors[name]) for start, name in fields["padding"]]
        new = PagedLayers(spec, [Slab(len(slab))], table, paged, {}, fields["in_tail"])
        group = contents.groups.setdefault(spec.paging, new)
        layer = group.layers[int(number)] = PackedLayer(spec, [slab], windows)
        same = zip((table, paged, lengths), (group.table, group.paged, contents.lengths), strict=True)
        if fields["seen"] != contents.seen or not all(np.array_equal(one, other) for one, other in same):
            raise ValueError("not all layers hold the text")
        sizes = np.repeat([counts.sum() for counts in new.window(lengths)], 2).tolist()
        longest = lengths.max()
        most = longest + sum(mask.shape[1] for _, mask in contents.padding)
        if (
            min(fields["paged"]) < 0
            or not longest <= contents.seen <= most
            or [window.shape[1] for window in windows] != sizes
            or (fields["heads"], *fields["widths"]) != (slab.shape[1], *layer.widths)
        ):
            raise ValueError(f"{prefix} has other numbers of tokens, heads or channels than its tensors")
    if contents.groups and contents.layers.keys() != {int(index) for index in description["specs"]}:
        raise ValueError("not all layers hold the text")
    return contents


def options_for(specs: Mapping[int, LayerSpec]) -> dict[str, Any]:
    """Arguments of `LowBitCache` that give its layers these specs."""
    first = next(iter(specs.values()))

    def of(spec: LayerSpec) -> dict[str, Any]:
        formats = {"key_format": spec.key_format, "value_format": spec.value_format}
        window = {"sink": spec.sink, "residual": spec.residual}
        return {**formats, **window, "transform": spec.key_transform, "value_transform": spec.value_transform}

    others = {index: {**of(spec), "page_size": spec.page_size} for index, spec in specs.items() if spec != first}
    return {**of(first), "page_size": first.page_size, "per_layer": others or None}
