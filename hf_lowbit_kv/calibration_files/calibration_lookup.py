"""Finds the calibration of a cache: the one that the user names, or else one in the user's folder, or a bundled one."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import torch

from ..folders import cache_root
from ..presets import PAPER_PRESETS, get_preset, preset_names
from ..storage.process_stamps import ReadOnce, converted
from . import weight_sums
from .calibration_file import Calibration, find_file, opened
from .model_description import ACCEPTING, MadeFor, describe_model, difference, marks_difference, weights_difference

T = TypeVar("T")
#: calibrations loaded for caches; descriptions of models in files
_loaded: ReadOnce[Calibration] = ReadOnce(size=8)
_descriptions: ReadOnce[dict[str, Any]] = ReadOnce(size=1000)


@dataclass(frozen=True)
class Borrowed:
    """The argument `calibration=` of a cache that copies the tensors before its first use. Until then caches may share them, so
    an unchanged file is read only once."""

    source: Calibration | str | Path | None


@torch.inference_mode(False)  # inference tensors have no version counter
def _load_once(source: str | Path) -> Calibration:
    """`Calibration.load` with a shared result, which callers must not change."""
    return _loaded.get(find_file(source), lambda: Calibration.load(source))


def user_folder() -> Path:
    """The user's folder of calibrations, below `folders.cache_root`."""
    return cache_root() / "calibrations"


def user_file(model: Mapping[str, Any]) -> Path:
    """The file of a model in the user's folder. Its name contains the name and a hash of `model` (`describe_model`)."""
    weights = {
        kind: {name: f"{x[-1]:.2g}" for name, x in sums.items()} for kind, sums in model.get("weights", {}).items()
    }
    marks = [model["model_type"], model["layers"], [f"{x:.2g}" for x in model.get("marks", [])], weights]
    return user_folder() / f"{model['name']}-{hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:16]}.safetensors"


def bundled_folder() -> Path:
    """The folder of calibrations in the package."""
    return Path(__file__).parent.parent / "bundled"


def find(
    model: Mapping[str, Any],
    load: Callable[[Path], Calibration] = Calibration.load,
    allow_other_weights: bool = False,
    refused: list[str] | None = None,
) -> Iterator[Calibration]:
    """Calibrations made for `model`: the user's, then the bundled ones. Every call searches both folders. Unusable files
    are skipped with a warning.

    Args:
        allow_other_weights: then also yield those for other attention weights of the same sizes. Embeddings must agree.
        refused: gets a sentence for each file that is skipped because of its attention weights.
    """
    if "marks" not in model:  # a configuration does not identify a model
        return
    others = []
    for folder in (user_folder(), bundled_folder()):
        for path in sorted(folder.glob("*.safetensors")):
            made_for = _usable(path, lambda path=path: _descriptions.get(path, lambda: _model_of(path)))  # type: ignore[misc]
            if made_for is None or difference(made_for, model, other_weights=True) is not None:
                continue
            if marks_difference(made_for, model) is not None:
                continue
            if (reason := weights_difference(made_for, model)) is not None:
                others.append((path, reason))
            elif (calibration := _usable(path, lambda path=path: load(path))) is not None:  # type: ignore[misc]
                yield calibration
    for path, reason in others:
        if not allow_other_weights:
            if refused is not None:
                refused.append(f"{str(path)!r} was made for other weights: {reason}; {ACCEPTING}")
        elif (calibration := _usable(path, lambda path=path: load(path))) is not None:  # type: ignore[misc]
            yield calibration


def _model_of(path: Path) -> dict[str, Any]:
    """The description of the model in a file."""
    with opened(path, "the file") as file:
        return file.model


#: files that a warning has already named
_skipped: set[Path] = set()
_skipping = threading.Lock()


def _usable(path: Path, read: Callable[[], T]) -> T | None:
    """The result of `read` for a file of a searched folder. `None` if the file has been removed or is damaged; a damaged
    file causes a warning the first time."""
    try:
        return read()
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        reason = "it is a broken link"
    except (ValueError, OSError) as error:
        reason = str(error)
    _skip(path, reason)
    return None


def _skip(path: Path, reason: str) -> None:
    """Warn once per file that it is not used."""
    with _skipping:
        warned = path in _skipped
        _skipped.add(path)
    if not warned:
        warnings.warn(
            f"calibration {str(path)!r} is skipped: {reason}. Delete it, or make it again with `hf-lowbit-kv calibrate`",
            stacklevel=2,
        )


class CalibratedParameters(NamedTuple):
    """Tensors by layer and full name (`LayerSpec.parameters`), a remark for `summary()`, and the model that the calibration
    was made for."""

    tensors: dict[int, dict[str, torch.Tensor]]
    remark: str | None = None
    made_for: MadeFor | None = None


def parameters_for(
    calibration: Calibration | str | Path | Borrowed | None,
    model_or_config: Any,
    specs: Mapping[int, Any],
    sizes: Mapping[int, tuple[int | None, ...]],
    preset: str | None,
    allow_other_weights: bool = False,
) -> CalibratedParameters:
    """The tensors that each layer's `LayerSpec` needs.

    Args:
        calibration: the user's argument. `None`: search the user's own files, then the bundled ones.
        specs: by packed layer.
        sizes: by packed layer, the number of KV heads, and the sizes of key and value heads.
        preset: name for messages.
        allow_other_weights: accept calibrations for other weights of the same sizes.

    Raises:
        ValueError: there is no calibration, it was made for another model, or a tensor is missing.
    """
    load: Callable[[Any], Calibration] = Calibration.load
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to
    if isinstance(calibration, Borrowed):
        calibration, load, convert = calibration.source, _load_once, converted
    needs = {layer: tensors for layer, spec in specs.items() if (tensors := list(needs_of(spec)))}
    if calibration is None and not needs:
        return CalibratedParameters({})
    model = describe_model(model_or_config, sizes)
    name = getattr(model_or_config, "name_or_path", "") or "NAME"
    if calibration is not None:
        loaded = calibration if isinstance(calibration, Calibration) else load(calibration)
        loaded.check(model, allow_other_weights)
        try:
            found = _parameters(loaded, needs, convert)
            return CalibratedParameters(found, _remark(loaded, specs, model), loaded.made_for)
        except ValueError as error:
            raise ValueError(f"{error}; {_how_to_make(needs, specs, name, preset, loaded.path)}") from error
    reasons, refused = list[str](), list[str]()
    for candidate in find(model, load, allow_other_weights, refused):
        try:
            found = _parameters(candidate, needs, convert)
            return CalibratedParameters(found, _remark(candidate, specs, model), candidate.made_for)
        except ValueError as error:
            reasons.append(str(error))
    layer, spec = next((layer, specs[layer]) for layer in needs)
    user = f"preset={preset!r}" if preset else f"{spec.key_format} / {spec.value_format}"
    if len(needs) < len(specs) and not (preset and list(needs_of(get_preset(preset).spec()))):
        user, preset = f"per_layer[{layer}] ({spec.key_format} / {spec.value_format})", None
    lack = "; ".join(refused) + ". To calibrate" if refused else "there is none"
    raise ValueError(
        f"{user} needs a calibration for {model['name']}, and {lack}: {_how_to_make(needs, specs, name, preset)}"
        + (f" ({'; '.join(reasons)})" if reasons else "")
    )


def _how_to_make(
    needs: Mapping[int, Iterable[Any]],
    specs: Mapping[int, Any],
    model: str,
    preset: str | None,
    path: str | None = None,
) -> str:
    """The command that makes the missing tensors, or a Python call if no preset has them. path: file to add to."""
    candidates = [*filter(None, [preset]), *preset_names(), *PAPER_PRESETS]
    by_preset = {name: set(needs_of(get_preset(name).spec())) for name in candidates}
    makers = [
        next((name for name, parts in by_preset.items() if parts.issuperset(tensors)), None)
        for tensors in needs.values()
    ]
    if None in makers:
        own_specs = ", ".join(dict.fromkeys(f"lb.LayerSpec.parse({specs[layer].key!r})" for layer in needs))
        return f"calibration=lb.calibrate(model, tokenizer, texts, [{own_specs}]) makes it"
    file, names = path or "FILE.safetensors", ",".join(dict.fromkeys(filter(None, makers)))
    command = f"hf-lowbit-kv calibrate --model {quote(model)} --text FILE --preset {names} -o {quote(file)}"
    return f"{command}, then calibration={file!r} (--calibration {quote(file)})"


def needs_of(spec: Any) -> Iterable[tuple[str, str, tuple[str, ...], torch.dtype]]:
    """The tensors that a spec needs: full name, side, names in the file, and dtype."""
    for side, role in (("keys", "key"), ("values", "value")):
        transform, fmt = getattr(spec, f"{role}_transform"), getattr(spec, f"{role}_format")
        for name, dtype in transform.parameter_kinds:
            yield f"{role}_transform.{name}", side, (transform.name, name), dtype
        for name, dtype in fmt.parameter_kinds:
            yield f"{role}_format.{name}", side, (transform.name, fmt.name, name), dtype


def _remark(calibration: Calibration, specs: Mapping[int, Any], model: Mapping[str, Any]) -> str | None:
    """Remarks for users, or `None`: the calibration was made without attention weights that layers use; the rule that chose
    its steps; it was made for other weights, or some weights were not compared."""
    weights = weights_difference(calibration.model, model)
    weights = f"made for other weights ({weights})" if weights else weight_sums.remark(calibration.model, model)
    remarks = _without_attention(calibration, specs), _rule_of_steps(calibration, specs), weights
    return "; ".join(filter(None, remarks)) or None


def _rule_of_steps(calibration: Calibration, specs: Mapping[int, Any]) -> str | None:
    """The power of errors by which the steps of wide channels were chosen, or `None` if no layer has such steps. Runs that
    name no power are older than the rule of `calibrators.POWER`, and chose all steps by squared errors."""
    of_tensor = {name: run.get("power", 2) for run in calibration.source for name in run.get("tensors", [])}
    powers = {
        of_tensor.get(".".join(("layers", str(layer), side, *names)), 2)
        for layer, spec in specs.items()
        for full, side, names, _ in needs_of(spec)
        if full.endswith("_format.step") and not getattr(spec, full.removesuffix(".step")).token_scale
    }
    rules = ("squared errors" if power == 2 else f"errors to the power of {power}" for power in sorted(powers))
    return f"steps of 4 bits and more chosen by {' or '.join(rules)}" if powers else None


def _without_attention(calibration: Calibration, specs: Mapping[int, Any]) -> str | None:
    weighted = {name for run in calibration.source if run.get("attention") for name in run.get("tensors", [])}
    for layer, spec in specs.items():
        for side, role in (("keys", "key"), ("values", "value")):
            transform, fmt = getattr(spec, f"{role}_transform"), getattr(spec, f"{role}_format")
            for part, names in ((transform, ()), (fmt, (fmt.name,))):
                tensors = part.parameter_kinds if part.weighted else ()
                names = ("layers", str(layer), side, transform.name, *names)
                if any(".".join((*names, name)) not in weighted for name, _ in tensors):
                    return "calibrated without attention"
    return None


def _parameters(
    calibration: Calibration,
    needs: Mapping[int, Iterable[tuple[str, str, tuple[str, ...], torch.dtype]]],
    convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
) -> dict[int, dict[str, torch.Tensor]]:
    return {
        layer: {name: convert(calibration.get(layer, side, names), dtype) for name, side, names, dtype in tensors}
        for layer, tensors in needs.items()
    }
