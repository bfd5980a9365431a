"""A reference to the model that a cache was made for. It does not keep the model alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class ModelRef:
    """A reference that is copied together with the model refers to the copied model. A pickled reference refers to no
    model."""

    def __init__(self, model_or_config: Any = None):
        self._model = weakref.ref(model_or_config) if isinstance(model_or_config, torch.nn.Module) else None

    def get(self, use: str) -> Any:
        """The model. Raises `ValueError` if there is none. use: the action that is then impossible."""
        model = self.alive()
        if model is None:
            raise ValueError(
                f"this cache cannot be {use}: it was made from a configuration or loaded from a pickle, or its model is gone, "
                "so the model of its tokens is unknown. Make the cache from the model"
            )
        return model

    def alive(self) -> Any:
        """The model, or `None` if there is none."""
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        model = self.alive()
        return ModelRef(memo.get(id(model), model))

    def __reduce__(self):
        return ModelRef, ()
