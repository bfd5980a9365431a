"""Which layers of a model a low-bit cache packs, and how large their keys and values are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..storage.model_sides import DIRECT, ModelSide, StreamSizes
from .latent_attention import absorbed_layers
from .own_layers import own_layers
from .served_models import text_config, unwrap


def packed_sides(
    model_or_config: PreTrainedModel | PreTrainedConfig, config: PreTrainedConfig, layers: Sequence[Any]
) -> dict[int, ModelSide]:
    """The model's side of each layer that is packed. layers: those that transformers itself would make."""
    special = absorbed_layers(model_or_config, config)
    packed = [index for index, layer in enumerate(layers) if type(layer) in (DynamicLayer, StaticLayer)]
    if not packed:
        raise ValueError(
            f"model_type={config.model_type!r} has no layer with full attention alone: there is nothing to pack"
        )
    return {index: special.get(index, DIRECT) for index in packed}


def stream_sizes(config: PreTrainedConfig, sides: Mapping[int, ModelSide]) -> dict[int, StreamSizes]:
    """KV heads and widths of each layer's streams; they may differ between layers (Gemma 4)."""
    return {index: side.sizes(config.per_layer_config[index]) for index, side in sides.items()}


def packed_sizes(model: PreTrainedModel | PreTrainedConfig) -> dict[int, Any]:
    """The number of KV heads of each packed layer, and the sizes of their keys and values. Makes no cache.

    Raises:
        ValueError: a model that a low-bit cache cannot serve.
    """
    if isinstance(model, torch.nn.Module):
        model = unwrap(model)
    config = text_config(model)
    sides = packed_sides(model, config, own_layers(config, None))
    return {index: tuple(size) for index, size in stream_sizes(config, sides).items()}
