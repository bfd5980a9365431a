"""What makes the parameters of each transform and format from a model's own keys and values. A new one is a class and a line in
`CALIBRATORS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from .formats.codebook import Codebook
from .kmeans import MOST_POINTS, kmeans
from .records import Parametrized
from .transforms import Smooth

#: tokens that are kept together
PAGE = 128
#: factors below this share of a head's largest are raised to it
SMALLEST_FACTOR = 1e-3
FP16_MAX = 65504.0


class Calibrator(ABC):
    """Makes the parameters of one transform or format, for one layer and one side (keys or values).

    `observe` sees every window that is read; `fit` then gets a selection of tokens.

    Args:
        part: the transform or format. head_dim, num_kv_heads: of the layer.
        per_head: whether each KV head gets parameters of its own; `None`: what suits the part.
    """

    #: whether `observe` wants gradients of log p(a token drawn from the model)
    gradients: ClassVar[bool] = False

    def __init__(self, part: Any, head_dim: int, num_kv_heads: int, per_head: bool | None = None):
        self.part, self.head_dim, self.num_kv_heads, self.per_head = part, head_dim, num_kv_heads, per_head

    @property
    def pages(self) -> int:
        """Pages of 128 tokens that `fit` wants of each KV head, at most."""
        return 0

    def observe(self, tokens: torch.Tensor, gradients: torch.Tensor | None) -> None:  # noqa: B027
        """tokens: keys or values of a window, `[1, H, S, D]`, as the transforms in front give them. gradients: with respect to
        them, or `None`. Nothing need be done."""

    @abstractmethod
    def fit(self, pages: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
        """The tensors that `part.parameters` lists, in that order, from pages `[H, n, 128, D]`, float32, as the transforms in
        front give them. seed: of all that is drawn at random."""


class SmoothCalibrator(Calibrator):
    """Square root of each channel's largest magnitude (VecInfer, section 3.2). A channel that is always 0 keeps its size."""

    largest: torch.Tensor | None = None

    def observe(self, tokens, gradients):
        most = tokens.float().abs().amax((0, 2))
        self.largest = most if self.largest is None else torch.maximum(self.largest, most)

    def fit(self, pages, seed):
        assert self.largest is not None
        if not bool(self.largest.isfinite().all()):
            raise ValueError("the keys are not all finite")
        factors = self.largest.sqrt()
        least = SMALLEST_FACTOR * factors.amax(-1, keepdim=True)
        return (torch.where(factors > 0, factors.maximum(least), 1.0),)


class CodebookCalibrator(Calibrator):
    """k-means of the sub-vectors: of each KV head, or of all that share a codebook."""

    part: Codebook

    @property
    def separate(self) -> bool:
        return bool(self.per_head)  # one codebook a layer is the paper's choice, and faster where rows are short

    @property
    def pages(self) -> int:
        vectors = PAGE * self.head_dim // self.part.dim * (1 if self.separate else self.num_kv_heads)
        return -(-MOST_POINTS * self.part.size // vectors)

    def fit(self, pages, seed):
        vectors = pages.flatten(1).unflatten(-1, (-1, self.part.dim))
        groups = vectors if self.separate else vectors.flatten(0, 1)[None]
        books = [kmeans(group, self.part.size, seed + number) for number, group in enumerate(groups)]
        return (torch.stack(books).clamp(-FP16_MAX, FP16_MAX).half(),)


CALIBRATORS: dict[type[Parametrized], type[Calibrator]] = {Smooth: SmoothCalibrator, Codebook: CodebookCalibrator}


def calibrator_for(part: Parametrized, head_dim: int, num_kv_heads: int, per_head: bool | None = None) -> Calibrator:
    """The calibrator of a transform or format that has parameters. Raises `ValueError` where there is none."""
    if (cls := CALIBRATORS.get(type(part))) is None:
        raise ValueError(f"{part} has parameters, and nothing that calibrates them: pass parameters= yourself")
    return cls(part, head_dim, num_kv_heads, per_head)
