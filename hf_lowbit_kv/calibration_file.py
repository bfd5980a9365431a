"""Calibrations on disk: tensors by layer, side, transform and format, with what they were made from. Never pickled.

One file serves several presets: those that share a transform and a format share the tensors. Names of tensors are

    layers.<index>.<keys|values>.<transform>.<parameter>              of a transform, e.g. layers.3.keys.smooth+hadamard.scale
    layers.<index>.<keys|values>.<transform>.<format>.<parameter>     of a format that stores what the transform gives
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .folders import cache_root
from .presets import get_preset, preset_names
from .staleness import ReadOnce, converted

#: of the file's layout; another one is refused
VERSION = 1
FILE_NAME = "calibration.safetensors"
#: numbers of a model's embedding that tell it from others, and by how much (relative to their root mean square) they may differ
MARKS, TOLERANCE = 64, 0.02


@dataclass(eq=False)
class Calibration:
    """Parameters of transforms and formats for one model.

    Attributes:
        tensors: by name, see the module's description.
        model: what they were made for: `name`, `model_type`, `layers`, `marks` (see `describe_model`).
        source: texts, samples, length, seed and versions they were made from.
        path: where it was loaded from.
    """

    tensors: dict[str, torch.Tensor]
    model: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)
    path: str | None = None

    def get(self, layer: int, side: str, names: Iterable[str]) -> torch.Tensor:
        """One tensor. Raises `ValueError` where the calibration does not hold it."""
        *what, parameter = names
        name = ".".join(("layers", str(layer), side, *what, parameter))
        if (found := self.tensors.get(name)) is None:
            raise ValueError(
                f"calibration{self._where()} holds no {parameter} for {side} of {'.'.join(what)} ({name}); it holds "
                f"{', '.join(self.contents()) or 'nothing'}"
            )
        return found

    def contents(self) -> list[str]:
        """What it was made for: `keys of smooth+hadamard.vq-d4b8`, ..."""
        found = {tuple(name.split(".")[2:-1]) for name in self.tensors}
        return sorted(f"{side} of {'.'.join(rest)}" for side, *rest in found)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, which appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "format": "hf-lowbit-kv calibration",
            "version": str(VERSION),
            "model": json.dumps(self.model),
            "source": json.dumps(self.source),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(self.tensors.items())}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @classmethod
    def load(cls, source: str | Path) -> Calibration:
        """Read a file, or the file `calibration.safetensors` of a folder or of a hub repository.

        Raises:
            ValueError: no calibration, truncated, of another version, or with numbers that are not finite. TypeError: no path.
            OSError: there is nothing of that name.
        """
        path = _find(source)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != "hf-lowbit-kv calibration":
                    raise ValueError(f"calibration={str(source)!r} is a safetensors file, but no calibration")
                if metadata.get("version") != str(VERSION):
                    raise ValueError(
                        f"calibration={str(source)!r} has version {metadata.get('version')!r}, and this release reads "
                        f"{VERSION}: make it again with `hf-lowbit-kv calibrate`"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"calibration={str(source)!r} cannot be read, it may be truncated: {error}") from error
        try:
            model, made_from = json.loads(metadata["model"]), json.loads(metadata["source"])
        except (KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"calibration={str(source)!r} does not say what it was made for: {error!r}") from error
        if bad := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
            raise ValueError(f"calibration={str(source)!r} holds numbers that are not finite, in {bad}: make it again")
        return cls(tensors, model, made_from, str(path))

    def merged(self, other: Calibration) -> Calibration:
        """With the tensors of `other`, made for the same model, put in the place of those of the same names."""
        if (reason := _difference(self.model, other.model)) is not None:
            raise ValueError(f"calibrations for different models cannot be joined: {reason}")
        return Calibration(self.tensors | other.tensors, self.model, other.source, self.path)

    def check(self, model: Mapping[str, Any]) -> None:
        """Raise `ValueError` where `model` (`describe_model`) is not the one it was made for."""
        if (reason := _difference(self.model, model)) is not None:
            raise ValueError(f"calibration{self._where()} was made for another model ({self.model['name']}): {reason}")

    def _where(self) -> str:
        return f"={self.path!r}" if self.path else ""


#: calibrations that were loaded for caches, and the models that files were made for
_loaded: ReadOnce[Calibration] = ReadOnce(most=8)
_made_for: ReadOnce[dict[str, Any]] = ReadOnce(most=1000)
#: by name of a hub repository, its file: each is asked for once a process
_of_hub: dict[str, Path] = {}


@dataclass(frozen=True)
class Borrowed:
    """`calibration=` of a cache that nobody else sees before it has copied its tensors. Until then it may share them with other
    caches, so a file is read only once while it does not change."""

    source: Calibration | str | Path | None


@torch.inference_mode(False)  # of tensors made inside it, PyTorch does not count changes
def _load_once(source: str | Path) -> Calibration:
    """As `Calibration.load`; whoever gets the result shares it, and must not change it."""
    return _loaded.get(_find(source), lambda: Calibration.load(source))


def _find(source: str | Path) -> Path:
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"calibration must be a path, a hub repository or a Calibration, not {type(source).__name__}")
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
            found = cached_file(text, FILE_NAME)
        except OSError as error:
            raise OSError(
                f"calibration={text!r} is no file here, and no hub repository that can be read: {error}"
            ) from error
        if found is not None:
            _of_hub[text] = Path(found)
            return _of_hub[text]
    raise FileNotFoundError(f"calibration={text!r} is neither a file, nor a folder or hub repository with {FILE_NAME}")


def describe_model(model_or_config: Any, layers: Mapping[int, tuple[int | None, ...]]) -> dict[str, Any]:
    """What tells a model from others.

    Args:
        layers: of each packed layer, KV heads and the sizes of their keys and values.

    Returns:
        `name`, `model_type`, `layers` (index -> heads, sizes) and, of a model with weights, `marks`: numbers of its embedding.
    """
    config = getattr(model_or_config, "config", model_or_config)
    config = config.get_text_config(decoder=True)
    name = getattr(config, "_name_or_path", "") or config.model_type
    out: dict[str, Any] = {
        "name": Path(name).name,
        "model_type": config.model_type,
        "layers": {str(index): list(sizes) for index, sizes in layers.items()},
    }
    if hasattr(model_or_config, "get_input_embeddings"):
        weight = model_or_config.get_input_embeddings().weight
        if type(weight) in (torch.Tensor, torch.nn.Parameter) and not weight.is_meta and weight.dim() == 2:
            rows = torch.linspace(1, weight.shape[0] - 1, MARKS, dtype=torch.float64).long()
            columns = torch.arange(MARKS) * 7 % weight.shape[1]
            marks = weight.detach()[rows.to(weight.device), columns.to(weight.device)]
            out["marks"] = [float(f"{x:.4g}") for x in marks.float().tolist()]
    return out


def _difference(made_for: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """In what two descriptions of models differ, or `None`."""
    for key in ("model_type", "layers"):
        if made_for.get(key) != model.get(key):
            shown = (_sizes(made_for[key]), _sizes(model[key])) if key == "layers" else (made_for[key], model[key])
            return f"{key} {shown[0]}, and the model has {shown[1]}"
    if "marks" in made_for and "marks" in model:
        a, b = (torch.tensor(x["marks"], dtype=torch.float64) for x in (made_for, model))
        if a.shape != b.shape or not bool((a - b).abs().max() <= TOLERANCE * a.square().mean().sqrt() + 1e-12):
            return "the sizes agree, and the weights of the embedding do not"
    return None


def _sizes(layers: Mapping[str, list[int]]) -> str:
    kinds = sorted(
        {f"{heads} KV heads of {'/'.join(map(str, dict.fromkeys(dims)))}" for heads, *dims in layers.values()}
    )
    return f"{len(layers)} with {', '.join(kinds)}"


def user_folder() -> Path:
    """Where calibrations are looked for, below `folders.cache_root`."""
    return cache_root() / "calibrations"


def user_file(model: Mapping[str, Any]) -> Path:
    """The file of a model in that folder: its name and a hash of what `describe_model` says of it."""
    marks = json.dumps([model["model_type"], model["layers"], [f"{x:.2g}" for x in model.get("marks", [])]])
    return user_folder() / f"{model['name']}-{hashlib.sha256(marks.encode()).hexdigest()[:16]}.safetensors"


def bundled_folder() -> Path:
    """Calibrations that come with the package."""
    return Path(__file__).parent / "calibrations"


def find(model: Mapping[str, Any], load: Callable[[Path], Calibration] = Calibration.load) -> Iterator[Calibration]:
    """Calibrations made for `model`: the user's, then the bundled ones. Both folders are looked through each time."""
    if "marks" not in model:  # a configuration alone does not tell models apart
        return
    for folder in (user_folder(), bundled_folder()):
        for path in sorted(folder.glob("*.safetensors")):
            made_for = _made_for.get(path, lambda path=path: _model_of(path))  # type: ignore[misc]
            if made_for and _difference(made_for, model) is None:
                yield load(path)


def _model_of(path: Path) -> dict[str, Any]:
    """What a file says of the model that it was made for."""
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get("model", "{}"))


def parameters_for(
    calibration: Calibration | str | Path | Borrowed | None,
    model_or_config: Any,
    specs: Mapping[int, Any],
    sizes: Mapping[int, tuple[int | None, ...]],
    preset: str | None,
) -> dict[int, dict[str, torch.Tensor]]:
    """By layer, the tensors that its `LayerSpec` asks for, by their full names (`LayerSpec.parameters`).

    Args:
        calibration: given by the user; `None`: the user's own files, then the bundled ones, are looked through.
        specs, sizes: of each packed layer, its spec, and its KV heads and their size.
        preset: name to show in messages.

    Raises:
        ValueError: there is none, it was made for another model, or it does not hold what a layer asks for.
    """
    load: Callable[[Any], Calibration] = Calibration.load
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to
    if isinstance(calibration, Borrowed):
        calibration, load, convert = calibration.source, _load_once, converted
    asked = {layer: wanted for layer, spec in specs.items() if (wanted := list(asked_of(spec)))}
    if calibration is None and not asked:
        return {}
    model = describe_model(model_or_config, sizes)
    name = getattr(model_or_config, "name_or_path", "") or "NAME"
    if calibration is not None:
        given = calibration if isinstance(calibration, Calibration) else load(calibration)
        given.check(model)
        try:
            return _taken(given, asked, convert)
        except ValueError as error:
            raise ValueError(f"{error}; {_how_to_make(asked, specs, name, preset, given.path)}") from error
    reasons = []
    for found in find(model, load):
        try:
            return _taken(found, asked, convert)
        except ValueError as error:
            reasons.append(str(error))
    layer, spec = next((layer, specs[layer]) for layer in asked)
    what = f"preset={preset!r}" if preset else f"{spec.key_format} / {spec.value_format}"
    if len(asked) < len(specs) and not (preset and list(asked_of(get_preset(preset).spec()))):
        what, preset = f"per_layer[{layer}] ({spec.key_format} / {spec.value_format})", None
    raise ValueError(
        f"{what} needs a calibration for {model['name']}, and none was given: {_how_to_make(asked, specs, name, preset)}"
        + (f" ({'; '.join(reasons)})" if reasons else "")
    )


def _how_to_make(
    asked: Mapping[int, Iterable[Any]],
    specs: Mapping[int, Any],
    model: str,
    preset: str | None,
    path: str | None = None,
) -> str:
    """The command for what layers ask for, or the call where no preset has it; path: of a file to add to."""
    made = {name: set(asked_of(get_preset(name).spec())) for name in (*([preset] if preset else []), *preset_names())}
    found = [next((name for name, what in made.items() if what.issuperset(wanted)), None) for wanted in asked.values()]
    if None in found:
        own = ", ".join(dict.fromkeys(f"lb.LayerSpec.parse({specs[layer].key!r})" for layer in asked))
        return f"calibration=lb.calibrate(model, tokenizer, texts, [{own}]) makes it"
    file, names = path or "FILE.safetensors", ",".join(dict.fromkeys(filter(None, found)))
    command = f"hf-lowbit-kv calibrate --model {model} --text FILE --preset {names} -o {file}"
    return f"{command}, then calibration={file!r} (--calibration {file})"


def asked_of(spec: Any) -> Iterable[tuple[str, str, tuple[str, ...], torch.dtype]]:
    """What a spec asks for: full name, side, names in the file, and dtype."""
    for side, role in (("keys", "key"), ("values", "value")):
        transform, fmt = getattr(spec, f"{role}_transform"), getattr(spec, f"{role}_format")
        for parameter in transform.parameters(64, 1):
            yield f"{role}_transform.{parameter.name}", side, (transform.name, parameter.name), parameter.dtype
        for parameter in fmt.parameters(64, 1):
            yield f"{role}_format.{parameter.name}", side, (transform.name, fmt.name, parameter.name), parameter.dtype


def _taken(
    calibration: Calibration,
    asked: Mapping[int, Iterable[tuple[str, str, tuple[str, ...], torch.dtype]]],
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
):
    return {
        layer: {name: convert(calibration.get(layer, side, names), dtype) for name, side, names, dtype in wanted}
        for layer, wanted in asked.items()
    }
