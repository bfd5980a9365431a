"""Shows in which layers a preset makes errors, and which channels make keys hard to store.

The model reads a text once in full precision. Each layer's queries, keys and values then go through the preset's layer
in the order of decoding. The attention outputs are compared with the exact ones. Errors of one layer do not reach the
next layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from hf_lowbit_kv.cache.attention_function import lowbit_attention
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME, LowBitLayer
from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.cache.registration import register
from hf_lowbit_kv.storage.step import StepInputs

from .perplexity import check_packed, check_window, chunk_bounds, window_tokens
from .texts import Text, read_text

#: a function of a layer's module, its queries, keys and values, the options of its attention, and the exact output
Observer = Callable[..., None]


def run(
    presets: Sequence[str],
    text: str | Path | Text,
    model: Any,
    tokenizer: Any,
    context: int = 2048,
    start: int = 512,
    overrides: dict[str, Any] | None = None,
    report: Callable[[int], None] = lambda layer: None,
) -> list[dict[str, Any]]:
    """Errors and channel statistics of each packed layer.

    Args:
        text: the model reads its first `context` tokens. Outputs from `start` on are compared.
        overrides: further arguments of `from_preset`, for every preset.
        report: called with the index of each layer when the layer is done.

    Returns:
        One dict for each layer: `layer`, `key_peak` and `value_peak` (mean magnitude of the largest channel divided by
        that of the median channel, for the KV head with the largest ratio), `first_key` (norm of the first token's key
        divided by the median norm), and `errors` (for each preset, the norm of the difference of outputs divided by the
        norm of the exact outputs).

    Raises:
        ValueError: an unknown preset, a text or `context` that is too short, or a model with latent attention.
    """
    check_window(model, context, start)
    factories = {name: functools.partial(from_preset, name, model, **overrides or {}) for name in presets}
    check_packed(factories, context)
    caches = {name: factory() for name, factory in factories.items()}
    for cache in caches.values():
        if cache.spec.attention_kind.name != "separate":
            raise ValueError(f"model_type={model.config.model_type!r} stores a latent: there are no keys to look at")
    (ids,) = window_tokens(read_text(text), tokenizer, context, 1)
    rows: list[dict[str, Any]] = []

    def observe(module, query, key, value, scaling, softcap, sinks, exact) -> None:
        layers = {name: cache.layers[module.layer_idx] for name, cache in caches.items()}
        packed = {name: layer for name, layer in layers.items() if isinstance(layer, LowBitLayer)}
        if not packed:
            return
        errors = {}
        for name, layer in packed.items():
            bounds = chunk_bounds(layer.spec, context, 128)
            out = _through(layer, query, key, value, bounds, scaling, softcap, sinks)
            off = (out - exact)[:, start:].float().norm() / exact[:, start:].float().norm()
            errors[name] = float(off)
        norms = key[0].float().norm(dim=-1)
        rows.append(
            {
                "layer": module.layer_idx,
                "key_peak": _peak(key),
                "value_peak": _peak(value),
                "first_key": float((norms[:, 0] / norms.median(dim=-1).values).mean()),
                "errors": errors,
            }
        )
        report(module.layer_idx)

    with torch.no_grad(), _observed(observe):
        model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    return rows


def _peak(x: torch.Tensor) -> float:
    """Mean magnitude of the largest channel of `[1, H, n, D]` divided by that of the median channel, for the head with
    the largest ratio."""
    size = x[0].float().abs().mean(-2)
    return float((size.amax(-1) / size.median(dim=-1).values).max())


def _through(layer: LowBitLayer, query, key, value, bounds: Sequence[int], scaling, softcap, sinks) -> torch.Tensor:
    """Outputs `[1, n, Hq, D]` of a layer that reads chunk by chunk. The layer is empty again afterwards."""
    parts = []
    for low, high in itertools.pairwise(bounds):
        q, k, v = query[:, :, low:high], key[:, :, low:high], value[:, :, low:high]
        layer.update(k, v)
        parts.append(layer.step(StepInputs(q, k, v, None, scaling, softcap, sinks)))
    layer.reset()
    return torch.cat(parts, dim=1)


@contextmanager
def _observed(observer: Observer) -> Iterator[None]:
    """Inside this context, `observer` is called for each attention over plain tensors."""

    def attention(
        module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs
    ):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = lowbit_attention(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
        observer(module, query, key, value, scaling, softcap, s_aux, out[0])
        return out

    AttentionInterface.register(ATTENTION_NAME, attention)
    try:
        yield
    finally:
        register()
