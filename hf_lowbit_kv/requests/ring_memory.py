"""The rings of a pool's rows: the 16-bit tokens of layers that attend to a sliding window (`cache.ring_layer`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..cache.low_bit_cache import LowBitCache
from ..cache.native_layers import SLIDING, native_layers
from ..cache.ring_layer import Pair, RingLayer

#: slots of a ring that is shorter than its window are a multiple of this, which PyTorch's attention with masks prefers
_STEP = 16


class RingShape(NamedTuple):
    """The sizes of one sliding layer."""

    window: int
    """tokens that a token attends to, itself included"""
    heads: int
    """KV heads of this process"""
    head_dims: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def slots(self, max_length: int) -> int:
        """Slots of a ring for rows of up to `max_length` tokens."""
        return min(self.window, -(-max_length // _STEP) * _STEP)

    def row_bytes(self, max_length: int) -> int:
        return self.heads * sum(self.head_dims) * self.slots(max_length) * self.dtype.itemsize


def sliding_indices(cache: LowBitCache) -> list[int]:
    """The sliding layers of a cache."""
    return [index for index, layer in enumerate(cache.layers) if isinstance(layer, SLIDING)]


def ring_shapes(cache: LowBitCache) -> list[RingShape]:
    """The sizes of a cache's sliding layers, in order. The cache must have read tokens."""
    growing, shapes = native_layers(cache.config, None), list[RingShape]()
    for index in sliding_indices(cache):
        layer: Any = cache.layers[index]
        sizes = layer.keys.shape[1], (layer.keys.shape[3], layer.values.shape[3]), layer.keys.dtype, layer.keys.device
        shapes.append(RingShape(growing[index].sliding_window, *sizes))
    return shapes


class RingMemory:
    """The rings of all slots. Layers of one shape share tensors, so that a few launches move a row.

    Args:
        shapes: of the sliding layers, in order.
        slots: number of rows.
        max_length: largest number of tokens of a row.
    """

    @torch.inference_mode(False)
    def __init__(self, shapes: Sequence[RingShape], slots: int, max_length: int):
        self.shapes = list(shapes)
        #: by shape, keys and values `[layers, slots, heads, ring slots, head_dim]`
        self._groups: dict[RingShape, Pair] = {}
        for shape in dict.fromkeys(self.shapes):
            sizes = self.shapes.count(shape), slots, shape.heads, shape.slots(max_length)
            keys, values = (
                torch.zeros(*sizes, width, dtype=shape.dtype, device=shape.device) for width in shape.head_dims
            )
            self._groups[shape] = keys, values

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All rings. Dimension 1 is the row's slot."""
        return [tensor for pair in self._groups.values() for tensor in pair]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def ring_slots(self) -> list[int]:
        """The different numbers of slots of rings."""
        return list(dict.fromkeys(keys.shape[3] for keys, _ in self._groups.values()))

    def layers(self, rows: slice, new: torch.Tensor | None = None) -> list[RingLayer]:
        """The sliding layers of a cache of these rows, in order.

        Args:
            new: for decode steps, int64 `[1 + n, rows]`: positions of the new tokens, and their slots for each number in
                `ring_slots`. `None`: for chunks of one row.
        """
        out, places = list[RingLayer](), dict.fromkeys(self._groups, 0)
        for shape in self.shapes:
            keys, values = (tensor[places[shape], rows] for tensor in self._groups[shape])
            places[shape] += 1
            step = () if new is None else (new[0], new[1 + self.ring_slots.index(keys.shape[2])])
            out.append(RingLayer(shape.window, keys, values, *step))
        return out

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of a row."""
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]

    def put(self, slot: int, length: int, tokens: Iterable[Pair]) -> None:
        """Fill the rings of a row of `length` tokens. tokens: for each layer, in order, its newest ones, `[1, heads, n,
        head_dim]`."""
        for layer, (keys, values) in zip(self.layers(slice(slot, slot + 1)), tokens, strict=True):
            for ring in (layer.keys, layer.values):
                ring.zero_()
            layer.begin(length - keys.shape[2])
            layer.put(keys.to(layer.keys.device), values.to(layer.keys.device))

    def clear(self) -> None:
        self._groups.clear()
        self.shapes.clear()
