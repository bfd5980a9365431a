"""Which layers of a model a low-bit cache packs, and how large their keys and values are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..storage.model_sides import DIRECT, ModelSide, StreamSizes
from .latent_attention import absorbed_layers
from .native_layers import native_layers
from .served_models import text_config, unwrap


def packed_sides(
    model_or_config: PreTrainedModel | PreTrainedConfig, config: PreTrainedConfig, layers: Sequence[Any]
) -> dict[int, ModelSide]:
    """The model's side of each layer that is packed. layers: those that transformers itself would make."""
    special = absorbed_layers(model_or_config, config)
    packed = [index for index, layer in enumerate(layers) if type(layer) in (DynamicLayer, StaticLayer)]
    if not packed and getattr(config, "num_kv_shared_layers", None) == config.num_hidden_layers:
        raise ValueError(
            f"model_type={config.model_type!r} has no keys and values of its own: it attends to those of the model that it "
            "assists"
        )
    if not packed and "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"model_type={config.model_type!r} is sparse attention: an indexer chooses the tokens to attend to, which low-bit "
            "caches do not serve"
        )
    if not packed:
        why = f"model_type={config.model_type!r} has no layer with only full attention: there is nothing to pack"
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "layer_types", None) is None:  # then it applies to all layers
            why += (
                f", because sliding_window={window} is set. Load the model with sliding_window=None to pack every layer: texts "
                f"of up to {window} tokens are computed as before, longer ones with full attention"
            )
        raise ValueError(why)
    return {index: special.get(index, DIRECT) for index in packed}


def stream_sizes(config: PreTrainedConfig, sides: Mapping[int, ModelSide]) -> dict[int, StreamSizes]:
    """KV heads and widths of each layer's streams; they may differ between layers (Gemma 4)."""
    return {index: side.sizes(config.per_layer_config[index]) for index, side in sides.items()}


def readers(config: PreTrainedConfig, index: int) -> tuple[int, int]:
    """The first and the last layer that attends to the keys and values of a packed layer: mostly the layer itself. The last
    `num_kv_shared_layers` layers attend to those of the last layer before them that is of their type (Gemma 3n and 4)."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    kinds = list(config.layer_types) if shared else []
    first = len(kinds) - shared
    alike = [i for i, kind in enumerate(kinds) if kind == kinds[index]]
    if not shared or index != max((i for i in alike if i < first), default=None):
        return index, index
    return index, alike[-1]


def packed_sizes(model: PreTrainedModel | PreTrainedConfig) -> dict[int, Any]:
    """The number of KV heads of each packed layer, and the sizes of their keys and values. Makes no cache.

    Raises:
        ValueError: a model that a low-bit cache cannot serve.
    """
    if isinstance(model, torch.nn.Module):
        model = unwrap(model)
    config = text_config(model)
    sides = packed_sides(model, config, native_layers(config, None))
    return {index: tuple(size) for index, size in stream_sizes(config, sides).items()}
