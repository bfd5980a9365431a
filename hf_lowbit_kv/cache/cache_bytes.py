"""How many bytes a cache has allocated, and for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .low_bit_cache import LowBitCache

BYTE_KINDS = ("codes", "metadata", "window", "parameters", "unused", "transformers")


class CacheBytes(int):
    """Allocated bytes of a cache: the total, with its parts as attributes.

    Attributes:
        codes: packed values in use.
        metadata: their scales, zero points and maps.
        window: sink and tail in use, in the model's dtype.
        parameters: read-only tensors of layers (codebooks, factors).
        unused: capacity without tokens, page tables, counters.
        transformers: layers that stay transformers' own.
        shared: pages and parameters in use that count as another cache's (see `LowBitCache.fork`); no part of the
            total.

    Example:
        >>> cache = lb.from_preset("kivi-4", model)
        >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
        >>> size = cache.nbytes
        >>> int(size) == size.codes + size.metadata + size.window + size.parameters + size.unused + size.transformers
        True
    """

    codes: int
    metadata: int
    window: int
    parameters: int
    unused: int
    transformers: int
    shared: int

    def __new__(cls, *parts: int, shared: int = 0, **named: int):
        """The kinds' bytes, in the order of `BYTE_KINDS` or by name; a kind that is left out has none."""
        by_kind = dict.fromkeys(BYTE_KINDS, 0) | dict(zip(BYTE_KINDS, parts, strict=False)) | named
        self = super().__new__(cls, sum(by_kind.values()))
        self.__dict__.update(by_kind, shared=shared)
        return self

    @property
    def parts(self) -> dict[str, int]:
        """Kind to bytes, in the order of `BYTE_KINDS`."""
        return {kind: getattr(self, kind) for kind in BYTE_KINDS}

    def __getnewargs_ex__(self):
        return tuple(self.parts.values()), {"shared": self.shared}


def bits_in_16_bits(cache: LowBitCache) -> float:
    """`bits_per_value` if the model's dtype had 16 bits: for models in float32, whose window takes twice as much. 0.0: no
    token is stored. Reads lengths from the device."""
    stored = values = 0.0
    for layer in cache.packed_layers:
        if (store := layer.store) is None:
            continue
        head_dims = store.head_dim_k, store.head_dim_v
        window, parameters = store.nbytes()["window"], sum(record.nbytes for record in store.state.parameters)
        pages = store.stored_bytes() - window - parameters
        page_bytes, page_bytes_16 = (
            sum(store.spec.part_bytes(*head_dims, dtype)) for dtype in (store.dtype, torch.float16)
        )
        stored += (
            pages * page_bytes_16 / page_bytes + window * torch.float16.itemsize / store.dtype.itemsize + parameters
        )
        values += int(store.state.length.sum()) * sum(head_dims)
    return 8 * stored / values if values else 0.0
