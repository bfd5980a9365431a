"""Computed sizes of caches at any length, from the layers of a cache of one token. Windows count in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from hf_lowbit_kv.cache.cache_argument import as_argument

#: a function that makes an empty cache
Factory = Callable[[], Any]
#: the length at which presets are compared, tokens
LONG = 32768


class Size(NamedTuple):
    """Size of a preset's cache at `context` tokens: bits per value, and bytes of all rows. Only packed layers are
    counted."""

    bits: float
    nbytes: int
    nbytes_full: int
    """bytes of a 16-bit cache"""


def sizes(factories: Mapping[str, Factory], model: Any, context: int, batch: int = 1) -> dict[str, Size]:
    """Computed size of each cache at `batch` rows of `context` tokens. Metadata, parameters and the window in 16 bits
    are counted. Layers that are not packed (sliding, recurrent) are not counted, because no preset changes them."""
    dtype = model.dtype if model.dtype.itemsize == 2 else torch.float16
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    by_preset = {}
    for name, factory in factories.items():
        cache = factory()
        with torch.no_grad():
            model(token, **as_argument(cache), use_cache=True)  # afterwards layers know their sizes
        stored = full = 0
        for layer in cache.packed_layers:
            store, spec = layer.store, layer.spec
            paged = spec.paged_after(context - spec.sink)
            width = store.head_dim_k + store.head_dim_v
            pages = -(-paged // spec.page_size) * sum(spec.part_bytes(store.head_dim_k, store.head_dim_v, dtype))
            stored += store.num_heads * (pages + (context - paged) * width * dtype.itemsize)
            full += store.num_heads * context * width * dtype.itemsize
        stored = batch * stored + cache.nbytes.parameters  # e.g. codebooks: the same for any number of rows
        by_preset[name] = Size(8 * dtype.itemsize * stored / (batch * full), stored, batch * full)
    return by_preset
