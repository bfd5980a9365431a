"""Which models a low-bit cache can serve, facts about them, and wrappers around models."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import Cache

from ..storage.attention_kinds import parse_attention_kind
from ..storage.model_sides import ModelSide


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside `torch.compile` and PEFT wrappers, with its adapters in place.

    Raises:
        TypeError: there is no transformers model inside.
        ValueError: a PEFT adapter puts its own keys and values in front of the prompt (prompt learning).
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, torch.nn.Module) and hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            if learned := [name for name, config in inner.peft_config.items() if config.is_prompt_learning]:
                raise ValueError(
                    f"adapter {learned[0]!r} is not supported: it puts tokens of its own in front of the prompt, which a "
                    "low-bit cache does not know; adapters that change weights (LoRA and others) are supported"
                )
            inner = inner.get_base_model()
        else:
            raise TypeError(
                f"model must be a transformers model (PEFT or torch.compile may wrap it), not {type(model)}"
            )
    return inner


def unwrap_generating(model: Any) -> Any:
    """As `unwrap`. Raises `TypeError` also for a model that writes no text, because it has no language-model head."""
    inner = unwrap(model)
    if not hasattr(inner, "generate"):
        raise TypeError(
            f"model is a {type(inner).__name__}, which has no language-model head and writes no text; load a decoder with "
            "AutoModelForCausalLM"
        )
    return inner


def generates(model: Any) -> Any:
    """The object whose `generate` to call: the outermost PEFT model, because it may switch adapters; otherwise the
    model inside."""
    while isinstance(model, torch.nn.Module) and hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that loads a model of this configuration: Qwen2-VL and LLaVA are no causal language models there."""
    causal: Any = AutoModelForCausalLM
    multimodal: Any = AutoModelForMultimodalLM
    kind = type(config)
    return multimodal if kind in multimodal._model_mapping and kind not in causal._model_mapping else causal


def text_config(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration, after checking that a low-bit cache can serve the model."""
    if isinstance(model_or_config, PreTrainedModel):
        config = model_or_config.config
        cls: Any = type(model_or_config)
    elif isinstance(model_or_config, PreTrainedConfig):
        config = model_or_config
        mapping: Any = AutoModelForCausalLM._model_mapping
        cls = mapping.get(type(config), None)  # None: code from a hub repository
    else:
        raise TypeError(f"model_or_config must be a transformers model or configuration, not {type(model_or_config)}")
    if config.is_encoder_decoder:
        raise ValueError(f"model_type={config.model_type!r} is an encoder-decoder model; only decoders are supported")
    if _attends_both_ways(config, cls):
        raise ValueError(
            f"model_type={config.model_type!r} with is_decoder=False attends in both directions and keeps no cache; load it "
            "with is_decoder=True, or take a decoder"
        )
    if cls is not None and not uses_attention_interface(cls):
        raise ValueError(f"{cls.__name__} does not use transformers' attention interface, which low-bit caches need")
    if (own := own_cache(cls)) is not None:
        raise ValueError(f"{cls.__name__} takes no cache but its own ({own})")
    config = config.get_text_config(decoder=True)
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"model_type={config.model_type!r} has no num_hidden_layers: models with several stacks of layers are not supported"
        )
    if (loops := getattr(config, "n_recurrent_loops", 1)) > 1:
        raise ValueError(
            f"model_type={config.model_type!r} runs some layers several times in a pass (n_recurrent_loops={loops}), each time "
            "with other keys and values; a low-bit cache has one layer for each of the model's"
        )
    if getattr(config, "use_bidirectional_attention", None) == "all":
        raise ValueError(
            f"model_type={config.model_type!r} with use_bidirectional_attention='all' attends in both directions, to tokens "
            "that come later too; a cache of earlier tokens does not serve that"
        )
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"model_type={config.model_type!r} has cross-attention layers, whose keys the model itself reads from its cache"
        )
    return config


def _attends_both_ways(config: PreTrainedConfig, cls: type | None) -> bool:
    """Whether this is an encoder such as BERT, which becomes a decoder by the flag `is_decoder`. The flag is not a sufficient
    test, because some decoders ignore it (GPT-NeoX)."""
    if cls is None or getattr(config, "is_decoder", None) is not False:
        return False
    return hasattr(sys.modules[cls.__module__], "create_bidirectional_mask")


def longest_text(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest text that a model was made for, or `None` if its configuration does not say. RoPE scaling whose
    factor reaches beyond `max_position_embeddings` counts. Where kinds of layers differ in it (Gemma 3), the
    configuration's number includes it."""
    decoder = config.get_text_config(decoder=True)
    longest, rope = getattr(decoder, "max_position_embeddings", None), getattr(decoder, "rope_parameters", None) or {}
    if longest is None or (factor := rope.get("factor")) is None:
        return longest
    return max(longest, int(factor * (rope.get("original_max_position_embeddings") or longest)))


def check_in_memory(model: Any, use: str, other: str) -> None:
    """Raise `ValueError` if the model's first weights are offloaded, so that it has no device for tokens.

    Args:
        use, other: what needs the device, and what else may be done, for the message.
    """
    if model.device.type == "meta":
        raise ValueError(
            f"the first weights of {type(model).__name__} are not in memory (offloaded), so there is no device for {use}. Keep "
            f"the embedding in memory (device_map=), or {other}"
        )


def check_attention_kind(
    attention_kind: str | None, config: PreTrainedConfig, model_sides: dict[int, ModelSide]
) -> None:
    """Raise if a layer has another attention kind."""
    if attention_kind is None or all(
        model_side.attention_kind == parse_attention_kind(attention_kind) for model_side in model_sides.values()
    ):
        return
    if attention_kind == "latent":
        raise ValueError(
            f"model_type={config.model_type!r} has no multi-head latent attention (MLA), which this cache is for; use another "
            "one, e.g. from_preset('fp8', model), from_preset('int8', model) or KIVICache(model)"
        )
    raise ValueError(
        f"model_type={config.model_type!r} caches a latent (MLA), and this preset is for keys and values; use "
        "from_preset('snapmla', model) or MLAFP8Cache(model)"
    )


def uses_attention_interface(cls: type) -> bool:
    """Whether the architecture calls the registered attention function. transformers' flag says so for most of these
    architectures, but not for some with linear layers (Qwen 3.5, Jamba); their code is inspected."""
    return getattr(cls, "_supports_attention_backend", False) or hasattr(
        sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS"
    )


def own_cache(cls: Any) -> str | None:
    """The name of the class of caches that an architecture defines for itself (MiniMax), or `None`."""
    defined = vars(sys.modules[cls.__module__]).items() if cls is not None else ()
    caches = (name for name, value in defined if isinstance(value, type) and issubclass(value, Cache))
    return next((name for name in caches if name not in vars(cache_utils)), None)


def tp_size(model_or_config: PreTrainedModel | PreTrainedConfig) -> int:
    """The number of tensor-parallel ranks; 1 without tensor parallelism. transformers writes it into the configuration
    of a model that it loads with a plan."""
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


#: projections whose outputs hold the keys of all heads, as models name them
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def check_split_heads(model_or_config: PreTrainedModel | PreTrainedConfig, heads: int | None) -> None:
    """Raise if tensor parallelism would split a KV head. transformers divides the output channels of the key projection
    evenly among ranks, and does not look at heads. The model's forward pass would then fail because of a shape.

    Args:
        heads: KV heads of a layer, all ranks together; `None`: not known.

    Raises:
        ValueError: the number of ranks does not divide `heads`, and the model's plan splits the key projection.
    """
    ranks = tp_size(model_or_config)
    if heads is None or heads % ranks == 0:
        return
    is_model = isinstance(model_or_config, PreTrainedModel)
    plan = getattr(model_or_config, "tp_plan" if is_model else "base_model_tp_plan", None) or {}
    split = [name for name, style in plan.items() if style == "colwise"]
    if any(name.rsplit(".", 1)[-1] in KEY_PROJECTIONS for name in split):
        fitting = max(count for count in range(1, heads + 1) if heads % count == 0 and count < ranks)
        raise ValueError(
            f"tp_size={ranks} does not divide num_key_value_heads={heads}: transformers would give each rank a part of a KV "
            f"head. Use tp_size={fitting}, or device_map='auto', which spreads whole layers over the GPUs"
        )
