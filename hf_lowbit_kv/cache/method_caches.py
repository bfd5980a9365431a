"""Caches that are named after the methods of papers. Each is a preset under another name, with the options of `from_preset`."""

from __future__ import annotations

from typing import Unpack

from transformers import PreTrainedConfig, PreTrainedModel

from .cache_options import PresetCacheOptions, one_of
from .low_bit_cache import LowBitCache
from .preset_cache import cache_arguments


class KIVICache(LowBitCache):
    """KIVI (arXiv 2402.02750): keys per channel, values per token, first and newest tokens in full precision.

    Args:
        bits, or nbits as in transformers: bits of keys and values, 4 by default; `bits_k` and `bits_v` override them.
        **options: as for `from_preset`. `group_size` is a number of tokens (keys) and channels (values); without it a group
            is the whole page or head. The paper has no sink tokens: `sink=0`; the default is 32.

    Example:
        >>> cache = lb.KIVICache(model, nbits=2, group_size=32)
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        bits: int | None = None,
        **options: Unpack[PresetCacheOptions],
    ):
        options["nbits"] = one_of("bits", bits, "nbits", options.get("nbits"), default=None)
        super().__init__(model_or_config, **cache_arguments("kivi-4-sink", options))


class KittyCache(LowBitCache):
    """Kitty: 2-bit keys per channel, 2-bit values per token. A share of the key channels, chosen per page, has 4 bits.
    Sink and newest tokens stay in full precision.

    Args:
        boost: share of the key channels with 4 bits, 0 to 1: 0.125 (default) is Kitty, 0.25 Kitty-Pro.
        **options: as for `from_preset`. `score` is how channels are chosen (see `formats.Boosted`); `bits_v` and
            `group_size` (channels) are of values.

    Example:
        >>> cache = lb.KittyCache(model, boost=0.25)
    """

    def __init__(  # type: ignore[misc]  # boost is an option, too
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        boost: float | None = None,
        **options: Unpack[PresetCacheOptions],
    ):
        super().__init__(model_or_config, **cache_arguments("kitty", {"boost": boost, **options}))


class IntCache(LowBitCache):
    """TurboMind's integer cache (paper section 4): keys and values per token and head, asymmetric; `residual=0` is allowed.

    Args:
        bits, or nbits as in transformers: bits of keys and values, 8 by default; `bits_k` and `bits_v` override them.
        **options: as for `from_preset`. `group_size` is a number of channels; without it a group is the whole head.

    Example:
        >>> cache = lb.IntCache(model, bits_k=8, bits_v=4)
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        bits: int | None = None,
        **options: Unpack[PresetCacheOptions],
    ):
        options["nbits"] = one_of("bits", bits, "nbits", options.get("nbits"), default=None)
        super().__init__(model_or_config, **cache_arguments("kv8", options))


class MLAFP8Cache(LowBitCache):
    """SnapMLA (paper section 3.1) for models with multi-head latent attention: the latent in FP8 (e4m3) with a float32
    scale per token, the RoPE part in the model's dtype. Attention reads the latent itself, see `docs/dev/mla.md`.

    Args:
        model: the model, not its configuration, because the cache needs its attention layers.
        **options: as for `from_preset`. By default there are no recent tokens in 16 bits (`residual=0`).

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

    def __init__(self, model: PreTrainedModel, **options: Unpack[PresetCacheOptions]):
        super().__init__(model, **cache_arguments("snapmla", options))


class VecInferCache(LowBitCache):
    """VecInfer (arXiv 2510.06175): sub-vectors of keys and values as indices of codebook entries, keys rotated.

    Args:
        **options: as for `from_preset`. `calibration` is a file of `hf-lowbit-kv calibrate`, a folder or hub repository that
            has one, or the result of `calibrate`; without it the user's and the bundled calibrations are searched. Names of
            formats are `vq-d<channels of a sub-vector>b<bits of an index>`, `"vq-d4b8"` by default. The `transform` of the
            paper is "smooth+hadamard"; the default is that of the presets.

    Example:
        >>> calibration = lb.calibrate(model, tokenizer, [long_text], ["vecinfer-2"], samples=2, length=256, progress=False)
        >>> cache = lb.from_preset("vecinfer-2", model, calibration=calibration)  # VecInferCache has other pairs of formats
    """

    def __init__(self, model_or_config: PreTrainedModel | PreTrainedConfig, **options: Unpack[PresetCacheOptions]):
        super().__init__(model_or_config, **cache_arguments("vecinfer-2", options))
