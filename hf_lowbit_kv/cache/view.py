"""What a layer hands to the model in place of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .implementation import why_not_usable

if TYPE_CHECKING:
    from .low_bit_layer import LowBitLayer


class LayerView(NamedTuple):
    """What `update()` returns as keys and as values when our attention function is selected: the chunk, not stored
    yet, and the layer that the attention function will attend to and store it in."""

    layer: LowBitLayer
    key: torch.Tensor
    value: torch.Tensor

    def __getattr__(self, name: str):
        # while a model is compiled, there are views without fields
        side = self.layer.side if len(self) else None
        raise AttributeError(why_not_usable(f"have no attribute {name!r}", side))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(why_not_usable(f"cannot be passed to {getattr(function, '__name__', function)}"))

    def __getitem__(self, index):  # a tuple's own would do something
        raise TypeError(why_not_usable("cannot be indexed"))

    def __add__(self, other):
        raise TypeError(why_not_usable("cannot be added"))

    def __mul__(self, other):
        raise TypeError(why_not_usable("cannot be multiplied"))

    def __rmul__(self, other):
        return self * other
