"""What makes the parameters of each transform and format from a model's own keys and values. A new one is a class and a line in
`CALIBRATORS`."""

from __future__ import annotations

import torch

from ..formats.codebook import Codebook
from ..formats.records import Parametrized
from ..formats.static import Static
from ..storage.transforms import Eigen, Smooth
from .calibrator import PAGE, Calibrator
from .calibrators_static import EigenCalibrator, StaticCalibrator
from .kmeans import MOST_POINTS, check_kmeans, check_points, kmeans

#: factors below this share of a head's largest are raised to it
SMALLEST_FACTOR = 1e-3
FP16_MAX = 65504.0


class SmoothCalibrator(Calibrator):
    """Square root of each channel's largest magnitude (VecInfer, section 3.2). A channel that is always 0 keeps its size."""

    largest: torch.Tensor | None = None

    def observe(self, tokens):
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
        vectors = self.page_size * self.head_dim // self.part.dim * (1 if self.separate else self.num_kv_heads)
        return -(-MOST_POINTS * self.part.size // vectors)

    def check(self, device, tokens):
        check_points(
            tokens * self.head_dim // self.part.dim * (1 if self.separate else self.num_kv_heads), self.part.size
        )
        check_kmeans(device)

    def fit(self, pages, seed):
        vectors = pages.flatten(1).unflatten(-1, (-1, self.part.dim))
        groups = vectors if self.separate else vectors.flatten(0, 1)[None]
        books = [kmeans(group, self.part.size, seed + number) for number, group in enumerate(groups)]
        return (torch.stack(books).clamp(-FP16_MAX, FP16_MAX).half(),)


CALIBRATORS: dict[type[Parametrized], type[Calibrator]] = {
    Smooth: SmoothCalibrator,
    Codebook: CodebookCalibrator,
    Eigen: EigenCalibrator,
    Static: StaticCalibrator,
}


def calibrator_for(
    part: Parametrized, head_dim: int, num_kv_heads: int, per_head: bool | None = None, page_size: int = PAGE
) -> Calibrator:
    """The calibrator of a transform or format that has parameters. Raises `ValueError` where there is none."""
    if (cls := CALIBRATORS.get(type(part))) is None:
        raise ValueError(f"{part} has parameters, and nothing that calibrates them: pass parameters= yourself")
    return cls(part, head_dim, num_kv_heads, per_head, page_size)
