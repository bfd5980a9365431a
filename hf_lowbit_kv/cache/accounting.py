"""What a cache takes and says of itself: bytes by kind, bits per value, the table of `summary()`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from transformers.cache_utils import Cache

from ..storage.layer_spec import LayerSpec
from . import summary
from .low_bit_layer import LowBitLayer
from .own_layers import tensors_of
from .pass_checks import OverrunError

BYTE_KINDS = ("codes", "metadata", "window", "parameters", "unused", "transformers")


class CacheBytes(int):
    """Allocated bytes of a cache: the total, with its parts as attributes.

    Attributes:
        codes: packed values in use. metadata: their scales, zero points and maps. window: sink and tail in use, in the
        model's dtype. parameters: read-only tensors of layers (codebooks, factors). unused: capacity without tokens, page
        tables, counters. transformers: layers that stay transformers' own.
    """

    codes: int
    metadata: int
    window: int
    parameters: int
    unused: int
    transformers: int

    def __new__(cls, *parts: int, **named: int):
        """The kinds' bytes, in the order of `BYTE_KINDS` or by name; a kind that is left out has none."""
        found = dict.fromkeys(BYTE_KINDS, 0) | dict(zip(BYTE_KINDS, parts, strict=False)) | named
        self = super().__new__(cls, sum(found.values()))
        self.__dict__.update(found)
        return self

    @property
    def parts(self) -> dict[str, int]:
        """Kind to bytes, in the order of `BYTE_KINDS`."""
        return {kind: getattr(self, kind) for kind in BYTE_KINDS}

    def __getnewargs__(self):
        return tuple(self.parts.values())


class Accounted(Cache, ABC):
    """A cache that counts its bytes. `LowBitCache` supplies the attributes and what is abstract."""

    spec: LayerSpec
    preset: str | None
    config: Any

    @property
    @abstractmethod
    def packed_layers(self) -> list[LowBitLayer]:
        """The layers that are packed, without those that stay transformers' own."""

    @property
    @abstractmethod
    def _first(self) -> LowBitLayer:
        """The first packed layer."""

    @abstractmethod
    def check_overrun(self, wait: bool = True) -> None:
        """Raise `OverrunError` where tokens are lost. wait: for steps that are queued on the device."""

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes allocated, by kind. Reads lengths from the device; raises as `check_overrun` does."""
        self.check_overrun()
        parts = dict.fromkeys(BYTE_KINDS, 0)
        for layer in self.layers:
            if not isinstance(layer, LowBitLayer):
                parts["transformers"] += sum(tensor.nbytes for tensor in tensors_of(layer))
            elif layer.store is not None:
                for kind, count in layer.store.nbytes().items():
                    parts[kind] += count
        return CacheBytes(**parts)

    @property
    def nbytes_full(self) -> int:
        """Bytes the tokens of the packed layers would take in the model's dtype."""
        stores = [layer.store for layer in self.packed_layers if layer.store is not None]
        return sum(int(s.state.length.sum()) * (s.head_dim_k + s.head_dim_v) * s.dtype.itemsize for s in stores)

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number in the packed layers: codes, metadata, window and parameters."""
        nbytes, values = self.nbytes, 0
        for layer in self.packed_layers:
            if (store := layer.store) is not None:
                values += int(store.state.length.sum()) * (store.head_dim_k + store.head_dim_v)
        stored = nbytes.codes + nbytes.metadata + nbytes.window + nbytes.parameters
        return 8 * stored / values if values else 0.0

    def summary(self) -> str:
        """A table of what is stored, where, and in how many bytes."""
        return summary.as_text(self)

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        return summary.as_html(self)

    def __repr__(self) -> str:
        name = f"preset={self.preset!r}, " if self.preset else ""
        transform = "" if self.spec.key_transform.identity else f"transform={self.spec.key_transform}, "
        if not self.spec.value_transform.identity:
            transform += f"value_transform={self.spec.value_transform}, "
        try:
            held = (
                f"bits={self.bits_per_value:.2f}, length={int(self._first.get_seq_length())}, bytes={int(self.nbytes)}"
            )
        except OverrunError:
            held = "overrun: tokens are lost"
        return f"{type(self).__name__}({name}keys={self.spec.key_format}, values={self.spec.value_format}, {transform}{held})"
