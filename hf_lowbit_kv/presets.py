"""Presets: named combinations of formats, transforms and full-precision window.

This file does not import torch: the command `hf-lowbit-kv` uses names before it knows whether it needs torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from .formats import Format
    from .storage.layer_spec import LayerSpec

#: listed presets, in the order of the documentation; `get_preset` also accepts these names with suffixes
PresetName = Literal[
    "dense",
    "kivi-2",
    "kivi-4",
    "kivi-4-sink",
    "kivi-2-sink",
    "kivi-2-hadamard",
    "kivi-2-hadamard-sink",
    "int8",
    "int6",
    "int5",
    "k4v2",
    "k2v4",
    "k8v4",
    "k4v2-sink",
    "k2v4-sink",
    "kitty",
    "kitty-pro",
    "kitty-hadamard",
    "eigen-2",
    "eigen-3",
    "eigen-4",
    "fp8",
    "snapmla",
    "mla",
]

#: the package's own presets
LISTED: tuple[PresetName, ...] = get_args(PresetName)
#: presets as in the papers, for comparisons: every function accepts their names, but lists omit them. Either their formats
#: are those of a listed preset, or large key biases spoil their keys, which have a range per token or a codebook
PAPER_PRESETS = (
    *("bitdecoding-kc-4", "bitdecoding-kc-2", "bitdecoding-kt-4", "kv8", "kv4", "kv4-hadamard"),
    *("vecinfer-4", "vecinfer-3", "vecinfer-2", "vecinfer-1.5", "vecinfer-1.25"),
)
#: default of `generate` and `enable`
DEFAULT_PRESET: PresetName = "kivi-4-sink"
#: presets that the documentation recommends, the default first: tables show these first
RECOMMENDED: tuple[PresetName, ...] = (
    DEFAULT_PRESET,
    "int8",
    "int6",
    "k4v2-sink",
    "kitty-pro",
    "kitty",
    "kivi-2-hadamard-sink",
    "eigen-4",
    "eigen-3",
    "eigen-2",
    "snapmla",
)
#: largest number of rows of a table that does not list all presets
MAX_SHOWN = 12
#: not names of presets: "16-bit" and "full" are transformers' own cache in tables and measurements, "all" is every preset
#: on the command line. A preset with such a name would be ignored, or shown as the 16-bit cache
RESERVED = ("16-bit", "full", "all")
#: sink tokens of a `*-sink` preset
SINK_TOKENS = 32
#: key transform of the VecInfer presets: the most accurate one measured (docs/dev/vecinfer.md); the paper uses
#: "smooth+hadamard"
VECINFER_TRANSFORM = "hadamard"
#: scores by which Kitty's formats choose channels with more bits; the first is the default (`formats.boosted.SCORES`)
SCORES = ("magnitude", "variance", "range", "random")


@dataclass(frozen=True)
class Preset:
    """A named combination. `key_format` and `value_format` are names of formats. `sink` and `residual` are numbers of
    tokens. `note` is the origin of the preset.

    Example:
        >>> preset = lb.get_preset("kivi-4-sink")
        >>> preset.key_format, preset.value_format, preset.sink, preset.residual
        ('int4-channel', 'int4-token', 32, 128)
        >>> round(preset.spec().bits_per_value(32768, 128), 2)
        4.34
    """

    name: str
    key_format: str
    value_format: str
    note: str
    sink: int = 0
    residual: int = 128
    transform: str = "none"
    value_transform: str = "none"
    attention_kind: str | None = None
    """attention kind of the layers, "separate" or "latent"; `None`: either"""

    def spec(self) -> LayerSpec:
        """The `LayerSpec` of this preset."""
        from .formats import parse_format
        from .storage.attention_kinds import parse_attention_kind
        from .storage.layer_spec import LayerSpec
        from .storage.transforms import parse_transform

        formats = parse_format(self.key_format), parse_format(self.value_format)
        parts = (
            parse_transform(self.transform),
            parse_transform(self.value_transform),
            parse_attention_kind(self.attention_kind or "separate"),
        )
        return LayerSpec(
            *formats,
            self.sink,
            self.residual,
            key_transform=parts[0],
            value_transform=parts[1],
            attention_kind=parts[2],
        )


def _eigen(name: str, key_format: str, value_format: str) -> Preset:
    note = "own: calibrated transform, static steps"
    return Preset(name, key_format, value_format, note, sink=SINK_TOKENS, transform="eigen", value_transform="hadamard")


_PLAIN = {
    preset.name: preset
    for preset in (
        Preset("dense", "dense", "dense", "the model's dtype, paged"),
        Preset("kivi-2", "int2-channel", "int2-token", "KIVI"),
        Preset("kivi-4", "int4-channel", "int4-token", "KIVI"),
        Preset("bitdecoding-kc-4", "int4-channel", "int4-token", "BitDecoding, keys per channel"),
        Preset("bitdecoding-kc-2", "int2-channel", "int2-token", "BitDecoding, keys per channel"),
        Preset("bitdecoding-kt-4", "int4-token", "int4-token", "BitDecoding, keys per token"),
        Preset("int8", "int8-channel", "int8-token", "8 bits: keys per channel, values per token"),
        Preset("int6", "int6-channel", "int6-token", "6 bits: keys per channel, values per token"),
        Preset("int5", "int5-channel", "int5-token", "5 bits: keys per channel, values per token"),
        Preset("kv8", "int8-token", "int8-token", "TurboMind"),
        Preset("kv4", "int4-token", "int4-token", "TurboMind"),
        Preset("k4v2", "int4-channel", "int2-token", "keys finer than values"),
        Preset("k2v4", "int2-channel", "int4-token", "values finer than keys"),
        Preset("k8v4", "int8-channel", "int4-token", "keys finer than values"),
        Preset(
            "fp8",
            "fp8-centered",
            "fp8",
            "FP8 (e4m3), a scale per token, keys minus a center",
            attention_kind="separate",
        ),
        Preset("snapmla", "fp8", "dense", "SnapMLA: latent in FP8", residual=0, attention_kind="latent"),
        Preset("mla", "dense", "dense", "latent in the model's dtype", residual=0, attention_kind="latent"),
        _eigen("eigen-2", "static-54222100", "static-2-tn"),
        _eigen("eigen-3", "static-64332222", "static-3-tn"),
        _eigen("eigen-4", "static-65444333", "static-4-tn"),
        Preset("vecinfer-4", "vq-d2b8", "vq-d2b8", "VecInfer", sink=SINK_TOKENS, transform=VECINFER_TRANSFORM),
        Preset("vecinfer-3", "vq-d4b12", "vq-d4b12", "VecInfer", sink=SINK_TOKENS, transform=VECINFER_TRANSFORM),
        Preset("vecinfer-2", "vq-d4b8", "vq-d4b8", "VecInfer", sink=SINK_TOKENS, transform=VECINFER_TRANSFORM),
        Preset("vecinfer-1.5", "vq-d8b12", "vq-d8b12", "VecInfer", sink=SINK_TOKENS, transform=VECINFER_TRANSFORM),
        Preset("vecinfer-1.25", "vq-d8b12", "vq-d8b8", "VecInfer", sink=SINK_TOKENS, transform=VECINFER_TRANSFORM),
        Preset("kitty", "boosted2-r0.125", "int2-token", "Kitty", sink=SINK_TOKENS),
        Preset("kitty-pro", "boosted2-r0.25", "int2-token", "Kitty-Pro", sink=SINK_TOKENS),
    )
}


def _with_score(score: str) -> Callable[[Preset], Preset]:
    def change(preset: Preset) -> Preset:
        from .formats import parse_format

        fmt = parse_format(preset.key_format)
        if "score" not in fmt.tunable:
            raise ValueError(f"preset={preset.name!r} boosts no channels: '-{score}' has no meaning there")
        key_format = dataclasses.replace(fmt, score=score).name  # type: ignore[type-var]
        return dataclasses.replace(preset, key_format=key_format, note=f"{preset.note}, channels by {score}")

    return change


def _with_rotation(preset: Preset) -> Preset:
    if preset.transform != "none" or preset.attention_kind == "latent":
        has = "latents" if preset.attention_kind == "latent" else f"transform={preset.transform!r}"
        raise ValueError(f"preset={preset.name!r} has {has}: '-hadamard' has no meaning there")
    return dataclasses.replace(preset, transform="hadamard", note=f"{preset.note} with rotated keys")


#: suffix of a name -> its effect; a name may have one suffix of each kind, in any order
SUFFIXES: dict[str, Callable[[Preset], Preset]] = {
    "sink": lambda p: dataclasses.replace(p, sink=SINK_TOKENS, note=f"{p.note} with full-precision sinks"),
    "hadamard": _with_rotation,
    **{score: _with_score(score) for score in SCORES[1:]},
}


def _derive(name: str) -> Preset | None:
    """The preset of a name with or without suffixes, or `None` if there is none."""
    base, suffixes = name, list[str]()
    while base not in _PLAIN:
        base, _, suffix = base.rpartition("-")
        if suffix not in SUFFIXES:
            return None
        suffixes.insert(0, suffix)
    kinds = ["score" if suffix in SCORES else suffix for suffix in suffixes]
    if len(set(kinds)) < len(kinds):
        return None  # of two suffixes of a kind, one would have no effect
    preset = _PLAIN[base]
    for suffix in suffixes:
        preset = SUFFIXES[suffix](preset)
    return dataclasses.replace(preset, name=name)


#: the listed presets: those of `PresetName`, and registered presets
PRESETS: dict[str, Preset] = {name: preset for name in LISTED if (preset := _derive(name)) is not None}


def register_preset(
    name: str,
    key_format: str,
    value_format: str,
    *,
    sink: int = 0,
    residual: int = 128,
    transform: str = "none",
    value_transform: str = "none",
    attention_kind: Literal["separate", "latent"] | None = None,
    note: str = "registered",
) -> Preset:
    """Register a preset. `from_preset`, `generate`, `enable` and all commands then accept its name, also with suffixes.

    Args:
        name: a new name. Names of other presets with suffixes are taken.
        key_format, value_format, transform, value_transform: names.
        sink, residual: numbers of tokens.
        attention_kind: of the layers; `None`: either.
        note: origin of the preset, for tables.

    Raises:
        ValueError: the name is taken, reserved or not a word, or a format, a transform or a number is not allowed. Nothing is
            registered.

    Example:
        >>> preset = lb.register_preset("mine-3", "int4-channel", "int2-token", sink=64)
        >>> cache = lb.from_preset("mine-3", model)
    """
    if not name or name != name.strip() or any(character in name for character in "|/, "):
        raise ValueError(f"name={name!r} is not allowed; it must be a word without spaces, commas, '|' and '/'")
    if name in RESERVED:
        raise ValueError(f"name={name!r} is not allowed; these names have another meaning: {', '.join(RESERVED)}")
    if (taken := _derive(name)) is not None:
        raise ValueError(f"preset name {name!r} is taken (keys {taken.key_format!r}, values {taken.value_format!r})")
    preset = Preset(name, key_format, value_format, note, sink, residual, transform, value_transform, attention_kind)
    preset.spec()  # raises if a part is not allowed
    _PLAIN[name] = PRESETS[name] = preset
    return preset


def recommended_first(names: Iterable[str]) -> list[str]:
    """These names in the order of tables: `RECOMMENDED`, then registered presets, then others."""
    order: list[str] = [*RECOMMENDED, *(name for name in PRESETS if name not in LISTED)]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def short_list(names: Iterable[str]) -> list[str]:
    """The names in a table that does not list all presets: recommended and registered ones, at most `MAX_SHOWN`."""
    return [name for name in recommended_first(names) if name in RECOMMENDED or name not in LISTED][:MAX_SHOWN]


def preset_with(key_format: Format, spec: LayerSpec) -> str | None:
    """The name of the listed preset with this key format that is nearest to `spec` in values, sink and transforms; `None`
    if there is none."""
    values = spec.value_format.with_layout("planar-1")

    def distance(name: str) -> tuple[bool, bool, bool]:
        each = specs[name]
        return each.value_format != values, each.sink != spec.sink, not each.untransformed

    specs = {name: preset.spec() for name, preset in PRESETS.items()}
    return min((name for name in specs if specs[name].key_format == key_format), key=distance, default=None)


def why_not_of(preset: str, name: str | None, specs: Iterable[LayerSpec]) -> str | None:
    """The reason why a cache with these layer specs is not one of `preset`, or `None` if it is.

    name: the preset name of the cache. If it is `preset`, only formats are compared: options may have changed window and
    transforms. Comparing names is not enough, because a cache of an older release may store something else under the
    same name.
    """
    target = get_preset(preset).spec()
    plain = [spec.with_layouts("planar-1", "planar-1") for spec in specs]
    if name == preset:
        if any(spec.formats == target.formats for spec in plain):
            return None
    elif any(dataclasses.replace(spec, page_size=target.page_size) == target for spec in plain):
        return None
    stored = f"keys {str(plain[0].key_format)!r}, values {str(plain[0].value_format)!r}, sink {plain[0].sink}"
    requested = f"keys {str(target.key_format)!r}, values {str(target.value_format)!r}, sink {target.sink}"
    return f"preset={name!r} ({stored}), not of preset={preset!r} ({requested})"


def preset_names() -> list[str]:
    """The presets, in the order of the documentation. A name takes the suffixes `-sink` (32 sink tokens) and, if it has no
    transform and no latents, `-hadamard` (rotated keys), each once. Kitty's also take `-variance`, `-range` or `-random`
    (how channels are chosen).

    Example:
        >>> "kivi-4-sink" in lb.preset_names()
        True
    """
    return list(PRESETS)


def get_preset(name: str) -> Preset:
    """The preset with this name.

    Raises:
        ValueError: the name is unknown; the message suggests similar names.
        TypeError: the name is not a string.

    Example:
        >>> lb.get_preset("k4v2-sink").value_format
        'int2-token'
        >>> lb.get_preset("kivi4")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ValueError: preset='kivi4' is not known; did you mean 'kivi-4', ...
    """
    if not isinstance(name, str):
        raise TypeError(f"preset must be a name such as 'kivi-2', not {type(name)}")
    if (preset := _derive(name)) is not None:
        return preset
    from .formats import where_read

    lower = name.lower()
    close = [lower] if _derive(lower) else difflib.get_close_matches(lower, [*PRESETS, *PAPER_PRESETS], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, close))}? " if close else ""
    raise ValueError(
        f"preset={name!r} is not known; {where_read(name)}{hint}allowed: {', '.join(PRESETS)} (each also with '-sink', "
        "'-hadamard'). "
        "Register your own presets first (lb.register_preset; on the command line --import FILE)"
    )
