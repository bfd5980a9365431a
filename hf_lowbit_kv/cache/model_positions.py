"""Positions that a model keeps in its modules instead of in its cache: `rope_deltas` of Qwen-VL and its relatives, the distance
between a token's index in the text and its position after images.

The model has the positions of the text that it processed last. A cache keeps those of its own text. So they can be copied and
saved, and restored in the model before that text continues.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

#: attributes of modules: tensors with a row for each text, numbers, or `None` before the first text
NAMES = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")
#: by module and attribute, e.g. `"model.rope_deltas"`
Values = dict[str, Any]

#: by model: the modules that keep positions, by attribute
_places: weakref.WeakKeyDictionary[Any, list[tuple[str, Any, str]]] = weakref.WeakKeyDictionary()
#: by model: the positions of the text that it processed last with a low-bit cache; the model's own objects
_last: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _places_in(model: Any) -> list[tuple[str, Any, str]]:
    if model not in _places:
        _places[model] = [
            (f"{path}.{name}".lstrip("."), weakref.ref(module), name)
            for path, module in model.named_modules()
            for name in NAMES
            if name in vars(module)
        ]
    return _places[model]


class ModelPositions:
    """The positions of one cache's text.

    Attributes:
        values: by module and attribute, with a row for each row of the cache; `None`: the cache is empty.
    """

    def __init__(self) -> None:
        self.values: Values | None = None
        self._present: list[Any] = []  # the model's own objects

    def note(self, model: Any, rows: int, goes_on: bool) -> None:
        """A pass of the model begins, which has computed its positions. rows: of the cache. goes_on: the cache holds tokens.

        Raises:
            ValueError: the model used the positions of another cache's text.
        """
        if not (places := _places_in(model)):
            return
        present = [getattr(module(), name) for _, module, name in places]
        if _same(present, self._present):
            return
        if goes_on and self.values is not None and _same(present, _last.get(model, [])):
            taken = {place: _of_rows(value, rows) for (place, _, _), value in zip(places, present, strict=True)}
            if not _equal(taken, self.values):
                raise ValueError(
                    f"the model has read another text since, and keeps that text's positions ({places[0][0]}), which "
                    "are wrong for this one. lb.generate, and model.generate under lb.enable, give them back to the model first"
                )
        self.values = {place: _of_rows(value, rows) for (place, _, _), value in zip(places, present, strict=True)}
        self._present = _last[model] = present

    def give_back(self, model: Any) -> None:
        """Let the model continue this text."""
        if self.values is None:
            return
        places = _places_in(model)
        for place, module, name in places:
            setattr(module(), name, self.values.get(place))
        self._present = _last[model] = [getattr(module(), name) for _, module, name in places]

    def of_rows(self, rows: list[int] | torch.Tensor) -> Values | None:
        """The positions of these rows of the cache."""
        if self.values is None:
            return None
        rows = torch.as_tensor(rows)
        return {
            place: value[rows.to(value.device)] if isinstance(value, torch.Tensor) else value
            for place, value in self.values.items()
        }

    def select(self, rows: torch.Tensor) -> None:
        """Row `b` gets the positions of row `rows[b]`."""
        self.values = self.of_rows(rows)


def joined_positions(rows: Sequence[Values | None]) -> Values | None:
    """The positions of a cache with these rows."""
    with_positions = [row for row in rows if row is not None]
    if not with_positions:
        return None
    return {
        place: torch.cat([row[place] for row in with_positions]) if isinstance(value, torch.Tensor) else value
        for place, value in with_positions[0].items()
    }


def keeps_positions(model: Any) -> bool:
    return bool(_places_in(model))


def _of_rows(value: Any, rows: int) -> Any:
    """A row for each row of the cache: `generate` repeats texts for beams, and their positions only when it uses them."""
    if isinstance(value, torch.Tensor) and value.dim() > 0 and 0 < len(value) < rows and rows % len(value) == 0:
        return value.repeat_interleave(rows // len(value), dim=0)
    return value


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: Values, other: Values) -> bool:
    return all(
        torch.equal(value, other[place].to(value.device))
        if isinstance(value, torch.Tensor) and isinstance(other.get(place), torch.Tensor)
        else value is other.get(place) or value == other.get(place)
        for place, value in one.items()
    )
