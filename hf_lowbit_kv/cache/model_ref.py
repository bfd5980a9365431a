"""The model that a cache was made for, which the cache does not keep alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class ModelRef:
    """A copy made along with the model refers to the copied model; a pickled one refers to none."""

    def __init__(self, model_or_config: Any = None):
        self._model = weakref.ref(model_or_config) if isinstance(model_or_config, torch.nn.Module) else None

    def get(self, use: str) -> Any:
        """The model. Raises `ValueError` where there is none; what: what cannot be done then."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError(
                f"this cache cannot be {use}: it was made from a configuration or loaded from a pickle, or its model is gone, "
                "and nothing tells which model its tokens belong to. Make the cache from the model"
            )
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        model = None if self._model is None else self._model()
        return ModelRef(memo.get(id(model), model))

    def __reduce__(self):
        return ModelRef, ()
