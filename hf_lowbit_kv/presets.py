"""Names for combinations of formats and window."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from .cache import LowBitCache
from .formats import Affine, Format, parse_format
from .pages import LayerSpec

#: sink tokens of a `*-sink` preset
SINK_TOKENS = 32


@dataclass(frozen=True)
class Preset:
    """A named combination. `key_format` and `value_format` are format names, `sink` and `residual` tokens."""

    name: str
    key_format: str
    value_format: str
    note: str
    sink: int = 0
    residual: int = 128
    transform: str = "none"

    def spec(self) -> LayerSpec:
        return LayerSpec(parse_format(self.key_format), parse_format(self.value_format), self.sink, self.residual)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("dense", "dense", "dense", "the model's dtype, paged"),
        Preset("kivi-2", "int2-channel", "int2-token", "KIVI"),
        Preset("kivi-4", "int4-channel", "int4-token", "KIVI"),
        Preset("kivi-2-sink", "int2-channel", "int2-token", "KIVI with full-precision sinks", sink=SINK_TOKENS),
        Preset("bitdecoding-kc-4", "int4-channel", "int4-token", "BitDecoding, keys per channel"),
        Preset("bitdecoding-kc-2", "int2-channel", "int2-token", "BitDecoding, keys per channel"),
        Preset("bitdecoding-kt-4", "int4-token", "int4-token", "BitDecoding, keys per token"),
        Preset("kv8", "int8-token", "int8-token", "TurboMind"),
        Preset("kv4", "int4-token", "int4-token", "TurboMind"),
        Preset("k4v2", "int4-channel", "int2-token", "keys finer than values"),
        Preset("k2v4", "int2-channel", "int4-token", "values finer than keys"),
        Preset("k8v4", "int8-channel", "int4-token", "keys finer than values"),
    )
}


def preset_names() -> list[str]:
    """The presets, in the order of the documentation. Any of them may carry the suffix `-sink` (32 sink tokens)."""
    return list(PRESETS)


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: unknown; names the close ones.
    """
    if name in PRESETS:
        return PRESETS[name]
    base = str(name).removesuffix("-sink")
    if base != name and base in PRESETS:
        return dataclasses.replace(PRESETS[base], name=name, sink=SINK_TOKENS)
    close = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, close))}? " if close else ""
    raise ValueError(f"preset={name!r} is not known; {hint}allowed: {', '.join(PRESETS)} (each also with '-sink')")


def from_preset(name: str, model_or_config, **overrides) -> LowBitCache:
    """A cache by name, e.g. `from_preset("kivi-2", model, sink=32)`.

    Args:
        name: see `preset_names`.
        model_or_config: as for `LowBitCache`.
        **overrides: any argument of `LowBitCache`; and `bits_k`, `bits_v`, `group_size`, for presets whose formats are
            integers.

    Raises:
        ValueError: unknown preset, or an argument out of range. TypeError: an argument that does not exist.
    """
    preset = get_preset(name)
    group = overrides.pop("group_size", None)
    formats: dict[str, Format] = {}
    for side, bits in (("key_format", overrides.pop("bits_k", None)), ("value_format", overrides.pop("bits_v", None))):
        fmt = parse_format(overrides.pop(side, getattr(preset, side)))
        changes = {key: value for key, value in (("bits", bits), ("group_size", group)) if value is not None}
        if changes and not isinstance(fmt, Affine):
            raise ValueError(f"{', '.join(changes)} cannot be set: {side} {fmt.name!r} of preset {name!r} has none")
        formats[side] = dataclasses.replace(fmt, **changes) if isinstance(fmt, Affine) else fmt
    options = {"sink": preset.sink, "residual": preset.residual, "preset": preset.name, **overrides}
    return LowBitCache(model_or_config, formats["key_format"], formats["value_format"], **options)
