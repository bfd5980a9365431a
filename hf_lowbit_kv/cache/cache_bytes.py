"""How many bytes a cache has allocated, and for what."""

from __future__ import annotations

BYTE_KINDS = ("codes", "metadata", "window", "parameters", "unused", "transformers")


class CacheBytes(int):
    """Allocated bytes of a cache: the total, with its parts as attributes.

    Attributes:
        codes: packed values in use. metadata: their scales, zero points and maps. window: sink and tail in use, in the
            model's dtype. parameters: read-only tensors of layers (codebooks, factors). unused: capacity without tokens, page
            tables, counters. transformers: layers that stay transformers' own. shared: pages and parameters in use that
            count as another cache's (see `LowBitCache.fork`); no part of the total.

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
