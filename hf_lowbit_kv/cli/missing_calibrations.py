"""Finds presets within a budget that only lack a calibration of the model, and calibrates them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cache.packed_layers import packed_sizes
from ..cache.preset_cache import cache_of_preset
from ..calibration.calibrate import calibrate
from ..calibration.calibration_target import add_to_file
from ..calibration.progress import Report
from ..calibration_files.calibration_lookup import user_file
from ..calibration_files.model_description import describe_model
from ..eval.cache_sizes import Size
from ..eval.preset_search import Budget
from ..eval.texts import read_text
from ..presets import get_preset, preset_names


def lacking(model: Any, budget: Budget, names: Sequence[str] | None, overrides: dict[str, Any]) -> list[str]:
    """Presets within the budget that only lack a calibration, of `names` or else of all listed presets."""
    dense = cache_of_preset("dense", model)
    if dense.spec.attention_kind.name != "separate":
        return []  # presets for latents have no parameters
    sizes: dict[int, Any] = dense.packed_sizes
    uncalibrated = list[str]()
    for name in names or preset_names():
        spec = get_preset(name).spec()
        try:
            has_parameters = [bool(spec.parameters(dims[0], dims[1], heads)) for heads, *dims in sizes.values()]
            for _, *dims in sizes.values():
                spec.validate(*dims)
        except ValueError:
            continue  # the preset does not fit the model
        if spec.attention_kind.name != "separate" or not any(has_parameters):
            continue
        try:
            cache_of_preset(name, model, **overrides)
        except ValueError:
            if budget.holds(_size(spec, sizes, budget)):
                uncalibrated.append(name)
    return uncalibrated


def _size(spec: Any, sizes: dict[int, Any], budget: Budget) -> Size:
    """The size of a preset's cache at the budget's context, without parameters."""
    numbers = bits = 0.0
    for heads, *dims in sizes.values():
        count = heads * sum(dims) * budget.context * budget.batch
        numbers, bits = numbers + count, bits + count * spec.bits_per_value(budget.context, dims[0])
    return Size(bits / numbers, int(bits / 8), int(numbers * 2))


def make(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    texts: Sequence[Path],
    measured: Path,
    progress: bool | Report = True,
) -> Path:
    """Calibrate presets, and add the result to the user's file of this model, where caches find it.

    Args:
        texts: files for the calibration.
        measured: the file on which accuracy is measured.

    Raises:
        ValueError: `measured` is one of `texts`, or `texts` are too short.
    """
    if measured.resolve() in [path.resolve() for path in texts]:
        raise ValueError(f"{str(measured)!r} is the text for accuracy: calibrate on other texts")
    contents = [read_text(path).content for path in texts]
    path = user_file(describe_model(model, packed_sizes(model)))
    add_to_file(
        calibrate(model, tokenizer, contents, list(names), text_names=[text.name for text in texts], progress=progress),
        path,
    )
    return path
