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


class PresetOptions(TypedDict, total=False):
    """Options of a preset's cache. `None` is the preset's value. transformers calls `residual` `residual_length`, and `bits_k`
    and `bits_v` together `nbits`."""

    key_format: str | Format | None
    value_format: str | Format | None
    sink: int | None
    residual: int | None
    residual_length: int | None
    transform: str | Transform | None
    value_transform: str | Transform | None
    bits_k: int | None
    bits_v: int | None
    nbits: int | None
    group_size: int | None
    boost: float | None
    score: Score | None
    page_size: int
    backend: BackendName | str | None
    dense_layers: Sequence[int]
    per_layer: PerLayer | None
    parameters: Mapping[int, Mapping[str, torch.Tensor]] | LayerTensors | None
    calibration: Calibration | str | Path | None
    allow_other_weights: bool


class PresetCacheOptions(PresetOptions, total=False):
    """Options of `from_preset` and of the classes in `method_caches`: these, and the size of a preallocated cache."""

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
