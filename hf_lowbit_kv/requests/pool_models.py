"""Which models a pool of rows can serve."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

from ..cache.length_rope import length_rope
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.native_layers import RECURRENT, SLIDING, STORES_NOTHING
from ..cache.preset_cache import cache_of_preset
from ..cache.served_models import longest_text
from ..presets import DEFAULT_PRESET


def empty_caches(
    model: Any, preset: str | None, cache_options: Mapping[str, Any] | None
) -> Callable[[int], LowBitCache]:
    """A function that makes an empty cache for a number of tokens. Checks first that a pool can serve the model;
    allocates nothing.

    Args:
        model: unwrapped.
        preset: `None`: the default one.
        cache_options: for `from_preset`.

    Raises:
        ValueError: a pool cannot serve the model. The message names the layer or the reason.
    """
    options = dict(cache_options or {})
    name = DEFAULT_PRESET if preset is None else preset

    def make(tokens: int) -> LowBitCache:
        return cache_of_preset(name, model, max_cache_len=tokens, **options)

    for index, layer in enumerate(make(1).layers):
        if isinstance(layer, RECURRENT) or not isinstance(layer, (LowBitLayer, *SLIDING, *STORES_NOTHING)):
            raise ValueError(
                f"layer {index} of {type(model).__name__} keeps a state instead of tokens (its cache is a "
                f"{type(layer).__name__}), which a pool of rows does not serve; use lb.generate"
            )
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        raise ValueError(
            f"{type(model).__name__} reads a prompt in both directions, so a pool of rows cannot read it in chunks; use "
            "lb.generate"
        )
    accepted = inspect.signature(model.forward).parameters
    if lacking := [name for name in ("position_ids", "logits_to_keep") if name not in accepted]:
        raise ValueError(f"{type(model).__name__} takes no {lacking[0]}, which a pool of rows needs; use lb.generate")
    return make


def check_tokens(model: Any, tokens: Iterable[Any], where: str = "") -> None:
    """Raise `ValueError` for anything but ids of the model's tokens. where: begins the message."""
    vocabulary = model.get_input_embeddings().num_embeddings
    for token in tokens:
        if not isinstance(token, Integral) or not 0 <= int(token) < vocabulary:
            raise ValueError(f"{where}token {token!r} is not one of the model's {vocabulary}")


def placeholders(config: Any) -> dict[int, str]:
    """The tokens of a prompt that an image, a video or a sound would replace, and which of these."""
    names = {f"{kind}_token_{suffix}": kind for kind in ("image", "video", "audio") for suffix in ("id", "index")}
    return {token: kind for name, kind in names.items() if isinstance(token := getattr(config, name, None), int)}


def longest_row(model: Any) -> int | None:
    """Tokens of the longest row that a pool serves; `None`: the model's configuration does not say. Rotary embeddings that
    depend on the length look at the longest row of a batch beyond their limit."""
    rope = length_rope(model)
    limits = [longest_text(model.config), None if rope is None else rope.limit]
    return min((limit for limit in limits if limit is not None), default=None)
