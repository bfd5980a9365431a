"""Which models a pool of rows can serve."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.method_caches import from_preset
from ..presets import DEFAULT_PRESET

#: rotary embeddings that depend on the longest row of a batch
BATCH_ROPE = ("dynamic", "longrope")


def empty_caches(
    model: Any, preset: str | None, cache_options: Mapping[str, Any] | None
) -> Callable[[int], LowBitCache]:
    """A function that makes an empty cache for a number of tokens. Checks first that a pool can serve the model;
    allocates nothing.

    Args:
        model: unwrapped. preset: `None`: the default one. cache_options: for `from_preset`.

    Raises:
        ValueError: a pool cannot serve the model. The message names the layer or the reason.
    """
    options = dict(cache_options or {})
    if "max_cache_len" in options:
        raise ValueError("cache_options={'max_cache_len': ...} is not allowed: every row is as long as its request")
    name = DEFAULT_PRESET if preset is None else preset

    def make(tokens: int) -> LowBitCache:
        return from_preset(name, model, max_cache_len=tokens, **options)

    for index, layer in enumerate(make(1).layers):
        if not isinstance(layer, LowBitLayer):
            raise ValueError(
                f"layer {index} of {type(model).__name__} is not packed (its cache is a {type(layer).__name__}), and a pool of "
                "rows has packed layers alone; use lb.generate"
            )
    config = model.config.get_text_config(decoder=True)
    if config is not model.config:
        raise ValueError(
            f"{type(model).__name__} reads more than text, which a pool of rows does not serve; use lb.generate"
        )
    if (kind := _batch_rope(config)) is not None:
        raise ValueError(
            f"the rotary embeddings of {type(model).__name__} are {kind!r}: they look at the longest row of a batch, so a "
            "request's text would depend on its neighbours; use lb.generate"
        )
    accepted = inspect.signature(model.forward).parameters
    if lacking := [name for name in ("position_ids", "logits_to_keep") if name not in accepted]:
        raise ValueError(f"{type(model).__name__} takes no {lacking[0]}, which a pool of rows needs; use lb.generate")
    return make


def _batch_rope(config: Any) -> str | None:
    """The kind of the model's rotary embedding if it depends on the longest row, otherwise `None`."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in BATCH_ROPE:
            return kind
    return None
