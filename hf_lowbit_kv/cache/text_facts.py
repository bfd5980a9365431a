"""What a cache knows about the text in its rows, besides the stored tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..storage.content_digests import EmbeddedRows, rows_digest
from ..storage.process_stamps import Unstamped
from .filled_by import FilledBy
from .length_rope import ReadLengths
from .model_positions import ModelPositions

if TYPE_CHECKING:
    from .contents import Contents


@dataclass
class TextFacts(Unstamped):
    """The facts of the text in a cache's rows. Its layers share this object.

    A fact that every row or token has of its own is treated in `select` and `crop`. All others concern the whole text, and
    end with it (`reset`).
    """

    read_lengths: ReadLengths | None = None
    """the lengths of the text when its tokens were read; `None`: the model's rotary embeddings do not depend on them"""
    ids: torch.Tensor | None = None
    """int64 `[B, n]` of the stored tokens, if known. For a prompt of embeddings, their sums instead (`stored_text`)"""
    embedded: EmbeddedRows | None = None
    """the rows of the input embedding when these ids became known; `None`: not compared"""
    positions: ModelPositions = field(default_factory=ModelPositions)
    """those that the model keeps outside of its cache"""
    filled_by: FilledBy | None = None
    """the model that computed these tokens"""
    mode: str | None = None
    """"packed" (our attention) or "dense" (any other)"""
    warned: bool = False
    """whether the cache has warned that another attention implementation makes it slow"""

    def know(self, ids: torch.Tensor | None, model: Any) -> None:
        """These are the ids of the whole text. model: the one that has read them; `None`: it is gone."""
        self.ids, self.embedded = ids, None
        if ids is not None and not ids.is_floating_point() and model is not None:
            self.embedded = EmbeddedRows.of(model)
            if self.embedded is not None:
                self.embedded.add(ids)

    def why_other_rows(self, model: Any) -> str | None:
        """How the embedding of the text's tokens differs in this model, in words; `None`: it does not, or is not known. Waits
        for the device."""
        if self.embedded is None or self.ids is None or self.embedded is EmbeddedRows.of(model):
            return None
        if rows_digest(model, self.ids) in (self.embedded.digest(self.ids), None):
            return None
        return "the embedding of a token of the text has other numbers"

    def reset(self) -> None:
        """Nothing is stored."""
        self.__dict__.update(vars(TextFacts(self.read_lengths)))
        if self.read_lengths is not None:
            self.read_lengths.forget()

    def crop(self, left: int) -> None:
        """The first `left` tokens of each row are left, padding included."""
        if left == 0:
            self.reset()
        elif self.ids is not None:
            self.ids = self.ids[:, :left]

    def select(self, rows: torch.Tensor) -> None:
        """Row `b` is row `rows[b]`. rows: int64 `[n]`."""
        if self.ids is not None:
            self.ids = self.ids[rows.to(self.ids.device)]
        self.positions.select(rows)

    def fork(self) -> TextFacts:
        """The same facts, for a text that continues in its own way. Tensors are shared, because they never change."""
        new = copy.copy(self)
        new.positions, new.read_lengths = copy.copy(self.positions), copy.copy(self.read_lengths)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> TextFacts:
        return self.fork()

    # ---- contents -------------------------------------------------------------------------------------------------

    def contents(self, cache: Any, row: int | None = None) -> dict[str, Any]:
        """The facts that outlive a process, as fields of `Contents`. Waits for the device.

        Args:
            row: only those of this row, whose ids the caller knows; `None`: of all rows.
        """
        if row is not None:
            return {"text": None, "positions": self.positions.of_rows([row])}
        lengths = self.read_lengths if cache.packed_layers[0].length.at_least else None
        read = None if lengths is None else (lengths.first_read(cache), lengths.whole(cache) is None)
        mode = self.mode or "packed"
        return {"text": self.ids, "positions": self.positions.values, "read": read, "mode": mode}

    def put(self, contents: Contents, filled_by: FilledBy, model: Any) -> None:
        """The cache has got these contents, whose model this is."""
        self.know(contents.text, model)
        self.filled_by = filled_by
        self.mode = contents.mode if contents.groups else None
        if contents.positions is not None:
            self.positions.values = dict(contents.positions)
            self.positions.give_back(model)
        if self.read_lengths is not None and contents.read is not None:
            self.read_lengths.restored(*contents.read)
