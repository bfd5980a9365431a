"""What makes the parameters of one transform or format: the base class. `calibrators` has the classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

#: tokens of a page where nothing else is said
PAGE = 128


class Calibrator(ABC):
    """Makes the parameters of one transform or format, for one layer and one side (keys or values).

    `observe` sees every window that is read, `observe_gradients` those of further windows; `fit` then gets some of the tokens.

    Args:
        part: the transform or format. head_dim, num_kv_heads: of the layer.
        per_head: whether each KV head gets parameters of its own; `None`: what suits the part.
        page_size: tokens of a page.
    """

    #: whether it wants `observe_gradients`
    gradients: ClassVar[bool] = False
    #: tokens of a window, where the user says nothing
    length: ClassVar[int] = 512

    def __init__(
        self, part: Any, head_dim: int, num_kv_heads: int, per_head: bool | None = None, page_size: int = PAGE
    ):
        self.part, self.head_dim, self.num_kv_heads = part, head_dim, num_kv_heads
        self.per_head, self.page_size = per_head, page_size

    @property
    def pages(self) -> int:
        """Pages that `fit` wants of each KV head, at most; 0: all that there are."""
        return 0

    def check(self, device: str, tokens: int) -> None:  # noqa: B027
        """Raise what `fit` would raise for want of a package or of tokens, before the model reads anything.

        Args:
            device: type of the model's, e.g. `"cpu"`. tokens: of each KV head that `fit` will get.
        """

    def observe(self, tokens: torch.Tensor) -> None:  # noqa: B027
        """tokens: keys or values of a window, `[1, H, S, D]`, as the transforms in front give them. Nothing need be done."""

    def observe_gradients(self, gradients: torch.Tensor) -> None:  # noqa: B027
        """gradients: of log p(tokens drawn from the model) with respect to keys or values of a window, `[1, H, S, D]`, as
        queries far behind see them (`calibration/gradients.py`). Nothing need be done."""

    @abstractmethod
    def fit(self, pages: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
        """The tensors that `part.parameters` lists, in that order, from pages `[H, n, page_size, D]`, float32, as the
        transforms in front give them. seed: of all that is drawn at random."""
