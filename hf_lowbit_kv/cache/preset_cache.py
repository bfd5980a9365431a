"""A cache by the name of a preset, and the arguments of `LowBitCache` that a preset with changes stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedModel

from ..formats import parse_format
from ..presets import PresetName, get_preset
from .cache_options import PresetCacheOptions
from .length_rope import warn_of_drop
from .low_bit_cache import LowBitCache

#: fields of a preset that are arguments of `LowBitCache`
FIELDS = ("key_format", "value_format", "sink", "residual", "transform", "value_transform", "attention_kind")
#: format -> arguments that change it, and the parameters of the format that they set
PARAMETERS = {
    "key_format": {"bits_k": "bits", "group_size": "group_size", "boost": "ratio", "score": "score"},
    "value_format": {"bits_v": "bits", "group_size": "group_size"},
}


def from_preset(
    name: PresetName | str,
    model_or_config: PreTrainedModel | PreTrainedConfig,
    **overrides: Unpack[PresetCacheOptions],
) -> LowBitCache:
    """A cache by name, e.g. `from_preset("kivi-2", model, sink=32)`.

    Args:
        name: see `preset_names`.
        model_or_config: as for `LowBitCache`.
        **overrides: any argument of `LowBitCache`; `None` is the preset's value. Integer formats also have `bits_k`,
            `bits_v`, `nbits` (of the sides without one of these two) and `group_size`; Kitty's formats have `boost` (share
            of key channels) and `score`.

    Raises:
        ValueError: the preset is unknown, or an argument is not allowed.
        TypeError: an argument does not exist or has another type.
        OSError, ImportError: as for `LowBitCache`.

    Example:
        >>> cache = lb.from_preset("kivi-4-sink", model, residual=256)
        >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
    """
    cache = cache_of_preset(name, model_or_config, **overrides)
    warn_of_drop(cache.model.alive() or model_or_config)
    return cache


def cache_of_preset(
    name: str, model_or_config: PreTrainedModel | PreTrainedConfig, **overrides: Unpack[PresetCacheOptions]
) -> LowBitCache:
    """`from_preset` for code of this package, which does not lose its caches beyond the length that `warn_of_drop` names."""
    return LowBitCache(model_or_config, **{"preset": name, **cache_arguments(name, overrides)})


def cache_arguments(preset: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LowBitCache` for a preset. overrides: options of `from_preset`, which has the errors."""
    options = {field: getattr(get_preset(preset), field) for field in FIELDS}
    if overrides.get("residual_length") is not None:  # another name of `residual`; `LowBitCache` refuses both
        del options["residual"]
    options |= {name: value for name, value in overrides.items() if value is not None or name not in FIELDS}
    bits = options.pop("nbits", None)
    formats = {side: parse_format(options[side]) for side in PARAMETERS}
    changes: dict[str, dict[str, Any]] = {side: {} for side in PARAMETERS}
    for name in dict.fromkeys(name for names in PARAMETERS.values() for name in names):
        value = options.pop(name, None)
        value = bits if value is None and name in ("bits_k", "bits_v") else value
        if value is None:
            continue
        sides = [side for side, names in PARAMETERS.items() if name in names]
        able = [side for side in sides if PARAMETERS[side][name] in formats[side].tunable]
        if not able:
            side, tunable = sides[0], formats[sides[0]].tunable
            allowed = ", ".join(name for name, parameter in PARAMETERS[side].items() if parameter in tunable)
            raise ValueError(
                f"{name}={value!r} is not allowed: {side} {formats[side].name!r} has no such parameter; allowed: "
                f"{allowed or 'none'}"
            )
        for side in able:
            changes[side][PARAMETERS[side][name]] = value
    return options | {
        side: dataclasses.replace(fmt, **changes[side]) if changes[side] else fmt  # type: ignore[type-var]
        for side, fmt in formats.items()
    }
