"""The object that `update()` returns instead of tensors, for the attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .implementation import NOT_USABLE

if TYPE_CHECKING:
    from .low_bit_layer import LowBitLayer


class LayerView(NamedTuple):
    """The result of `update()`, for keys and for values, if our attention function is selected: the new tokens, which are not
    stored yet, and the layer. The attention function attends to the layer and stores the tokens in it. Some models pass it to
    later layers (Gemma 4); the last of them stores the tokens."""

    layer: LowBitLayer
    key: torch.Tensor
    value: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> LayerView:
        """The view itself: layers that attend to it move their queries to its device."""
        return self

    def __getattr__(self, name: str):
        raise AttributeError(NOT_USABLE.format(f"have no attribute {name!r}"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(NOT_USABLE.format(f"cannot be passed to {getattr(function, '__name__', function)}"))

    def __getitem__(self, index):  # otherwise a tuple's method of this name would be used
        raise TypeError(NOT_USABLE.format("cannot be indexed"))
