"""Caches by preset, and caches named after the methods of papers. They choose formats, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration_files.calibration_file import Calibration
from ..formats import Affine, Boosted, Format, parse_format
from ..formats.boosted import Score
from ..presets import SINK_TOKENS, VECINFER_TRANSFORM, PresetName, get_preset
from ..storage.transforms import Transform
from .cache_options import (
    IntCacheOptions,
    LatentCacheOptions,
    MethodCacheOptions,
    PresetCacheOptions,
    VecInferCacheOptions,
    one_of,
)
from .length_rope import warn_of_drop
from .low_bit_cache import LowBitCache

#: arguments of `from_preset` -> the parameters of formats that they change
KEY_PARAMETERS = {"bits_k": "bits", "group_size": "group_size", "boost": "ratio", "score": "score"}
VALUE_PARAMETERS = {"bits_v": "bits", "group_size": "group_size"}


def from_preset(
    name: PresetName | str,
    model_or_config: PreTrainedModel | PreTrainedConfig,
    **overrides: Unpack[PresetCacheOptions],
) -> LowBitCache:
    """A cache by name, e.g. `from_preset("kivi-2", model, sink=32)`.

    Args:
        name: see `preset_names`.
        model_or_config: as for `LowBitCache`.
        **overrides: any argument of `LowBitCache`. Integer formats also have `bits_k`, `bits_v`, `nbits` (both sides) and
            `group_size`; Kitty's formats have `boost` (share of key channels) and `score`.

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
    preset = get_preset(name)
    fields = ("sink", "residual", "transform", "value_transform")
    options: dict[str, Any] = {field: getattr(preset, field) for field in fields}
    if overrides.get("residual_length") is not None and "residual" not in overrides:
        del options["residual"]
    options |= {"preset": preset.name, "attention_kind": preset.attention_kind, **overrides}
    if (nbits := options.pop("nbits", None)) is not None:
        for name_of_side in ("bits_k", "bits_v"):
            options[name_of_side] = one_of(name_of_side, options.get(name_of_side), "nbits", nbits, None)
    names = ("group_size", "bits_k", "bits_v", "boost", "score")
    parameters = {name: value for name in names if (value := options.pop(name, None)) is not None}
    keys, values = (parse_format(options.pop(side, getattr(preset, side))) for side in ("key_format", "value_format"))
    keys = _changed(keys, f"key_format {keys.name!r} of preset {name!r}", parameters, KEY_PARAMETERS)
    values = _changed(values, f"value_format {values.name!r} of preset {name!r}", parameters, VALUE_PARAMETERS)
    return LowBitCache(model_or_config, keys, values, **options)


def _changed(fmt: Format, title: str, values: dict[str, Any], parameters: dict[str, str]) -> Format:
    """`fmt` with these values of its parameters. title: the name of the format in messages."""
    able = [name for name, parameter in parameters.items() if parameter in fmt.tunable]
    changes = {name: value for name, value in values.items() if name in parameters}
    if unable := [name for name in changes if name not in able]:
        allowed = ", ".join(able) or "none"
        raise ValueError(
            f"{unable[0]}={changes[unable[0]]!r} is not allowed: {title} has no such parameter; allowed: {allowed}"
        )
    return dataclasses.replace(fmt, **{parameters[name]: value for name, value in changes.items()}) if changes else fmt  # type: ignore[type-var]


class KIVICache(LowBitCache):
    """KIVI (arXiv 2402.02750): keys per channel, values per token, first and newest tokens in full precision.

    Args:
        bits, or nbits as in transformers: bits of keys and values, 4 by default; `bits_k` and `bits_v` override them.
        group_size: 32, 64 or 128 tokens (keys) and channels (values); `None`: the whole page and the whole head.
        sink: number of sink tokens. The paper has none: `sink=0`.
        **options: as for `LowBitCache`.

    Example:
        >>> cache = lb.KIVICache(model, nbits=2, group_size=32)
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        bits: int | None = None,
        *,
        nbits: int | None = None,
        bits_k: int | None = None,
        bits_v: int | None = None,
        group_size: int | None = None,
        sink: int | None = SINK_TOKENS,
        **options: Unpack[MethodCacheOptions],
    ):
        bits = one_of("bits", bits, "nbits", nbits, default=4)
        bits_k, bits_v = (bits if b is None else b for b in (bits_k, bits_v))
        keys, values = Affine(bits_k, "channel", group_size), Affine(bits_v, "token", group_size)
        super().__init__(model_or_config, keys, values, sink=sink, **options)


class KittyCache(LowBitCache):
    """Kitty: 2-bit keys per channel, 2-bit values per token. A share of the key channels, chosen per page, has 4 bits.
    Sink and newest tokens stay in full precision.

    Args:
        boost: share of the key channels with 4 bits, 0 to 1: 0.125 is Kitty, 0.25 Kitty-Pro.
        score: how channels are chosen; see `formats.Boosted`.
        bits_v: 2, 4, 5, 6 or 8.
        group_size: 32, 64 or 128 channels of a value; `None`: the whole head.
        **options: as for `LowBitCache`.

    Example:
        >>> cache = lb.KittyCache(model, boost=0.25)
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        boost: float = 0.125,
        *,
        score: Score = "magnitude",
        bits_v: int = 2,
        group_size: int | None = None,
        sink: int | None = 32,
        **options: Unpack[MethodCacheOptions],
    ):
        keys, values = Boosted(boost, score), Affine(bits_v, "token", group_size)
        super().__init__(model_or_config, keys, values, sink=sink, **options)


class IntCache(LowBitCache):
    """TurboMind's integer cache (paper section 4): keys and values per token and head, asymmetric; `residual=0` is allowed.

    Args:
        bits, or nbits as in transformers: bits of keys and values, 8 by default; `bits_k` and `bits_v` override them.
        group_size: 32, 64 or 128 channels; `None`: the whole head.
        **options: as for `LowBitCache`.

    Example:
        >>> cache = lb.IntCache(model, bits_k=8, bits_v=4)
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        bits: int | None = None,
        *,
        nbits: int | None = None,
        bits_k: int | None = None,
        bits_v: int | None = None,
        group_size: int | None = None,
        **options: Unpack[IntCacheOptions],
    ):
        bits = one_of("bits", bits, "nbits", nbits, default=8)
        bits_k, bits_v = (bits if b is None else b for b in (bits_k, bits_v))
        keys, values = Affine(bits_k, "token", group_size), Affine(bits_v, "token", group_size)
        super().__init__(model_or_config, keys, values, **options)


class MLAFP8Cache(LowBitCache):
    """SnapMLA (paper section 3.1) for models with multi-head latent attention: the latent in FP8 (e4m3) with a float32
    scale per token, the RoPE part in the model's dtype. Attention reads the latent itself, see `docs/dev/mla.md`.

    Args:
        model: the model, not its configuration, because the cache needs its attention layers.
        **options: as for `LowBitCache`. By default there are no recent tokens in 16 bits (`residual=0`).

    Raises:
        ValueError: only a configuration is given, or the model has no MLA, sparse MLA, a latent rank that is not a
            multiple of 64, or RoPE channels that are not a multiple of 8.

    Example:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        ...          "first_k_dense_replace": 1, "intermediate_size": 64, "vocab_size": 64, "q_lora_rank": None}
        >>> deepseek = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **sizes))
        >>> deepseek.set_attn_implementation("lowbit_kv")
        >>> cache = lb.MLAFP8Cache(deepseek)
        >>> tokens = deepseek.generate(torch.arange(8)[None], past_key_values=cache, max_new_tokens=2)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        residual: int | None = None,
        residual_length: int | None = None,
        **options: Unpack[LatentCacheOptions],
    ):
        residual = one_of("residual", residual, "residual_length", residual_length, default=0)
        super().__init__(model, "fp8", "dense", residual=residual, attention_kind="latent", **options)


class VecInferCache(LowBitCache):
    """VecInfer (arXiv 2510.06175): sub-vectors of keys and values as indices of codebook entries, keys rotated.

    Args:
        calibration: a file of `hf-lowbit-kv calibrate`, a folder or hub repository that has one, or the result of
            `calibrate`; `None`: search the user's and the bundled calibrations.
        key_format, value_format: `vq-d<channels of a sub-vector>b<bits of an index>`.
        transform: key transform, as for `LowBitCache`. The default is that of the presets; the paper uses
            "smooth+hadamard".
        **options: as for `LowBitCache`.

    Example:
        >>> calibration = lb.calibrate(model, tokenizer, [long_text], ["million-2"], samples=2, length=256, progress=False)
        >>> cache = lb.from_preset("million-2", model, calibration=calibration)  # VecInferCache has other pairs of formats
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        *,
        calibration: Calibration | str | Path | None = None,
        key_format: str | Format = "vq-d4b8",
        value_format: str | Format = "vq-d4b8",
        transform: str | Transform | None = VECINFER_TRANSFORM,
        sink: int | None = 32,
        **options: Unpack[VecInferCacheOptions],
    ):
        super().__init__(
            model_or_config,
            key_format,
            value_format,
            calibration=calibration,
            transform=transform,
            sink=sink,
            **options,
        )
