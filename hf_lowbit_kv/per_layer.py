"""Options of single layers: `per_layer=` and `dense_layers=` of a cache, and the `parameters=` of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from .formats import parse_format
from .presets import Preset, get_preset
from .storage.layer_spec import LayerSpec
from .storage.model_sides import ModelSide, StreamSizes
from .storage.transforms import parse_transform

#: a preset or its name, which replaces all options of the cache except `page_size`; or a mapping of the `OPTIONS` to
#: replace
Choice = str | Preset | Mapping[str, Any]
#: choices by layer index (negative ones count from the last layer), or a function of index and configuration, which
#: returns `None` for layers that keep the options of the cache
PerLayer = Mapping[int, Choice] | Callable[[int, Any], Choice | None]
#: argument of a cache -> field of a `LayerSpec`, and the function that parses the argument
OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "key_format": ("key_format", parse_format),
    "value_format": ("value_format", parse_format),
    "sink": ("sink", lambda x: x),
    "residual": ("residual", lambda x: x),
    "page_size": ("page_size", lambda x: x),
    "transform": ("key_transform", parse_transform),
    "value_transform": ("value_transform", parse_transform),
}
#: the options of layers in `dense_layers`
DENSE = {"key_format": "dense", "value_format": "dense", "transform": "none", "value_transform": "none"}


class LayerTensors(Protocol):
    """The tensors of each layer: an alternative to a mapping for `parameters=`."""

    def for_layer(self, index: int) -> Mapping[str, torch.Tensor]:
        """Tensors of all KV heads by full name (`LayerSpec.parameters`). Empty if the layer has no tensors."""


def layer_specs(
    spec: LayerSpec,
    per_layer: PerLayer | None,
    dense_layers: Iterable[int],
    config: Any,
    model_sides: Mapping[int, ModelSide],
) -> dict[int, LayerSpec]:
    """The spec of each packed layer.

    Args:
        spec: the spec of the cache.
        config: the configuration of the model.
        model_sides: by index, for the packed layers.

    Raises:
        ValueError: an index is not a packed layer, a layer is in both arguments, a preset or option is unknown, or a preset
            does not fit the layer.
    """
    choices = _by_index("dense_layers", dict.fromkeys(dense_layers, DENSE), config, model_sides)
    if callable(per_layer):
        per_layer_choices = {index: choice for index in model_sides if (choice := per_layer(index, config)) is not None}
    else:
        per_layer_choices = _by_index("per_layer", per_layer or {}, config, model_sides)
    if doubled := sorted(choices.keys() & per_layer_choices.keys()):
        raise ValueError(f"layers {doubled} are in dense_layers and in per_layer; name each layer once")
    choices |= per_layer_choices
    by_layer = {}
    for index, model_side in model_sides.items():
        layer_spec = _changed(spec, choices[index], index, config, model_side) if index in choices else spec
        by_layer[index] = (
            layer_spec
            if layer_spec.attention_kind == model_side.attention_kind
            else dataclasses.replace(layer_spec, attention_kind=model_side.attention_kind)
        )
    return by_layer


def _by_index(
    argument: str, choices: Mapping[int, Choice], config: Any, model_sides: Mapping[int, ModelSide]
) -> dict[int, Choice]:
    """`choices` with layer indices that count from 0."""
    count, by_index = config.num_hidden_layers, dict[int, Choice]()
    for key, choice in choices.items():
        index = key + count if key < 0 else key
        if index not in model_sides:
            raise ValueError(
                f"{argument} has the index {key}, which is not a full-attention layer of this model; allowed: "
                f"{sorted(model_sides)} (negative ones count from layer {count - 1})"
            )
        by_index[index] = choice
    return by_index


def _changed(spec: LayerSpec, choice: Choice, index: int, config: Any, model_side: ModelSide) -> LayerSpec:
    """`spec` with the changes of `choice` for layer `index`."""
    where = f"per_layer[{index}]"
    try:
        return (
            _by_options(spec, choice) if isinstance(choice, Mapping) else _by_preset(spec, choice, config, model_side)
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _by_preset(spec: LayerSpec, choice: str | Preset, config: Any, model_side: ModelSide) -> LayerSpec:
    preset = choice if isinstance(choice, Preset) else get_preset(choice)
    if preset.attention_kind not in (None, model_side.attention_kind.name):
        raise ValueError(
            f"{preset.name!r} does not fit: this layer of model_type={config.model_type!r} is "
            f"{model_side.attention_kind.name!r}, "
            f"but the preset is for {preset.attention_kind!r}"
        )
    return dataclasses.replace(preset.spec(), page_size=spec.page_size)


def _by_options(spec: LayerSpec, choice: Mapping[str, Any]) -> LayerSpec:
    if unknown := [name for name in choice if name not in OPTIONS]:
        raise ValueError(f"the option {unknown[0]!r} is not known; allowed: {tuple(OPTIONS)}")
    changes = {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in choice.items()}
    return dataclasses.replace(spec, **changes)


def layer_parameters(
    parameters: Mapping[int, Mapping[str, torch.Tensor]] | LayerTensors | None, specs: Mapping[int, LayerSpec]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Tensors of each layer of `specs`, by full name.

    Raises:
        ValueError: `parameters` names a layer that is not packed.
    """
    if parameters is None:
        return {index: {} for index in specs}
    if isinstance(parameters, Mapping):
        if unknown := [index for index in parameters if index not in specs]:
            raise ValueError(f"parameters are given for layer {unknown[0]!r}; layers that are packed: {sorted(specs)}")
        return {index: parameters.get(index, {}) for index in specs}
    return {index: parameters.for_layer(index) for index in specs}


def check_layer(
    index: int, spec: LayerSpec, sizes: StreamSizes, parameters: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise `ValueError` if the heads or parameters of a layer do not fit its spec. Unknown `sizes` are not checked.

    Args:
        parameters: `None`: not checked.
    """
    if sizes.first is None or sizes.second is None:
        return
    try:
        spec.validate(sizes.first, sizes.second)
        if parameters is not None and sizes.heads is not None:
            spec.check_parameters(parameters, (sizes.first, sizes.second), sizes.heads)
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from None
