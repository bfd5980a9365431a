"""A cache's options: their types, for editors and type checkers. `LowBitCache` says what each option means.

When code runs, only the names count: one that does not exist raises `TypeError`, as in every call, with the nearest
name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from ..calibration_files.calibration_file import Calibration
from ..formats import Format
from ..formats.boosted import Score
from ..per_layer import LayerTensors, PerLayer
from ..storage.transforms import Transform

#: names of `backends.choice.BACKENDS`
BackendName = Literal["torch", "cpu", "triton", "cuda"]


class LayerOptions(TypedDict, total=False):
    """Options that every cache takes. `max_cache_len` is separate, because presets do not have it."""

    page_size: int
    value_transform: str | Transform | None
    backend: BackendName | str | None
    dense_layers: Sequence[int]
    per_layer: PerLayer | None
    parameters: Mapping[int, Mapping[str, torch.Tensor]] | LayerTensors | None


class WindowOptions(LayerOptions, total=False):
    """These, and the number of newest tokens that stay in the model's dtype. transformers calls it `residual_length`."""

    residual: int | None
    residual_length: int | None


class CalibratedOptions(WindowOptions, total=False):
    """These, the transform of keys, and a calibration."""

    transform: str | Transform | None
    calibration: Calibration | str | Path | None
    allow_other_weights: bool


class PresetOptions(CalibratedOptions, total=False):
    """Options that change a preset. transformers calls `bits_k` and `bits_v` together `nbits`."""

    sink: int | None
    key_format: str | Format
    value_format: str | Format
    bits_k: int
    bits_v: int
    nbits: int
    group_size: int | None
    boost: float
    score: Score


class PresetCacheOptions(PresetOptions, total=False):
    """Options of `from_preset`."""

    max_cache_len: int | None


class LatentCacheOptions(LayerOptions, total=False):
    """Options of `MLAFP8Cache`."""

    sink: int | None
    max_cache_len: int | None


class MethodCacheOptions(CalibratedOptions, total=False):
    """Options of `KIVICache` and `KittyCache`."""

    max_cache_len: int | None


class IntCacheOptions(MethodCacheOptions, total=False):
    """Options of `IntCache`."""

    sink: int | None


class VecInferCacheOptions(WindowOptions, total=False):
    """Options of `VecInferCache`."""

    allow_other_weights: bool
    max_cache_len: int | None


def unknown_option(name: str) -> str:
    """The message for an option that no cache takes."""
    known = sorted(PresetCacheOptions.__annotations__)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = "".join(f"; did you mean {each!r}?" for each in close) or f"; allowed: {', '.join(known)}"
    return f"{name!r} is not an option of a cache{hint}"


def check_choice(name: str, value: Any) -> None:
    """Raise `ValueError` for anything but `True` and `False`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed; allowed: True, False")


def one_of(name: str, value: Any, other_name: str, other: Any, default: Any) -> Any:
    """The value of an argument that has two names. Raises `ValueError` if both are given (not `None`)."""
    if value is not None and other is not None:
        raise ValueError(
            f"{name}={value!r} and {other_name}={other!r} are both given, and mean the same; give one of them"
        )
    return next((candidate for candidate in (value, other) if candidate is not None), default)
