"""Computes layers again in the backward pass instead of keeping their activations.

transformers' own gradient checkpointing drops the cache, which calibration needs. Here a layer keeps only its inputs
(`torch.utils.checkpoint`). Before a layer is computed again, its layer of the cache is reset to the earlier state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer


def recomputable_layers(model: torch.nn.Module, cache: Any) -> dict[torch.nn.Module, int]:
    """The decoder layers that can be computed again, each with the index of the one cache layer that it writes. Layers
    whose cache changes tensors in place (recurrent states) are excluded."""
    layers: dict[torch.nn.Module, int] = {}
    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer) or "forward" in vars(module):
            continue
        named = [getattr(part, "layer_idx", None) for part in module.modules()]
        indices = {index for index in named if isinstance(index, int)}
        if len(indices) != 1 or (index := indices.pop()) >= len(cache.layers):
            continue
        # a `DynamicLayer` replaces its tensors by longer ones, so old tensors stay valid
        if isinstance(cache.layers[index], DynamicLayer):
            layers[module] = index
    return layers


@contextmanager
def recomputed_layers(model: torch.nn.Module, cache: Any) -> Iterator[None]:
    """Within the context, layers of the model keep only their inputs for the backward pass, which must run in it too.

    Args:
        cache: the empty transformers cache with which the model is called.

    Raises:
        ValueError: the model has no layer that can be computed again.
    """
    if not (layers := recomputable_layers(model, cache)):
        raise ValueError(
            f"{type(model).__name__} has no layers that can be computed again in the backward pass: pass offload=False"
        )
    try:
        for module, index in layers.items():
            vars(module)["forward"] = _recomputed(type(module).forward.__get__(module), cache, index)
        yield
    finally:
        for module in layers:
            vars(module).pop("forward", None)


def _recomputed(forward: Callable[..., Any], cache: Any, index: int) -> Callable[..., Any]:
    """A layer's `forward` that keeps only its inputs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, first = dict(vars(cache.layers[index])), True

        def compute(*args: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return forward(*args, **kwargs)
            layer = cache.layers[index]
            now = dict(vars(layer))
            try:
                _set(layer, before)
                return forward(*args, **kwargs)
            finally:  # torch ends this call early with an exception
                _set(layer, now)

        return checkpoint(compute, *args, use_reentrant=False)

    return run


def _set(layer: Any, attributes: dict[str, Any]) -> None:
    vars(layer).clear()
    vars(layer).update(attributes)
