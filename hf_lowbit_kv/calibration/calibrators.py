"""Calibrators: each computes the parameters of a transform or format from keys and values of a model.

A new calibrator is a class and a line in `CALIBRATORS`. `docs/dev/own-formats.md` explains those of the transform `eigen`
and of the format `static`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ..formats.codebook import Codebook
from ..formats.records import Parametrized
from ..formats.static import STEP, Static, uniform_codes
from ..storage.transforms import Eigen, Smooth
from .kmeans import MOST_POINTS, check_kmeans, check_points, kmeans

#: default tokens per page
PAGE = 128


@contextmanager
def one_thread() -> Iterator[None]:
    """Decompose the matrices of KV heads in one thread. They are small, so several threads mostly wait for each other: a
    second or more for each layer where other programs use the cores. The results are the same, bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Calibrator(ABC):
    """Computes the parameters of one transform or format, for one layer and one side (keys or values).

    `observe` gets every window, and `observe_gradients` the gradients of other windows. At the end `fit` gets the sampled
    pages.

    Args:
        part: the transform or format.
        head_dim, num_kv_heads: those of the layer.
        per_head: whether each KV head gets its own parameters. `None`: the default of the part.
        page_size: tokens per page.
    """

    #: whether this calibrator uses `observe_gradients`
    gradients: ClassVar[bool] = False
    #: default tokens per window
    length: ClassVar[int] = 512

    def __init__(
        self, part: Any, head_dim: int, num_kv_heads: int, per_head: bool | None = None, page_size: int = PAGE
    ):
        self.part, self.head_dim, self.num_kv_heads = part, head_dim, num_kv_heads
        self.per_head, self.page_size = per_head, page_size

    @property
    def attention(self) -> bool:
        """Whether this calibrator weights tokens by attention (`attention_weights`). `observe` gets weights of keys only."""
        return self.part.weighted

    @property
    def pages(self) -> int:
        """Largest number of pages per KV head that `fit` uses; 0: all pages."""
        return 0

    def check(self, device: str, tokens: int) -> None:  # noqa: B027
        """Raise the errors of `fit` for a missing package or too few tokens, before the model reads anything.

        Args:
            device: type of the model's device, e.g. `"cpu"`.
            tokens: tokens per KV head that `fit` will get.
        """

    def observe(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> None:  # noqa: B027
        """Observe a window. Does nothing by default.

        Args:
            tokens: keys or values, `[1, H, S, D]`, after earlier transforms.
            weights: the weight of each token, float32 `[H, S]`, 0 if unknown. `None`: all weights are equal.
        """

    def observe_gradients(self, gradients: torch.Tensor) -> None:  # noqa: B027
        """Observe gradients of a window, `[1, H, S, D]`: of log p(tokens drawn from the model) with respect to keys or
        values, through far later queries only (`calibration/gradients.py`). Does nothing by default."""

    @abstractmethod
    def fit(self, pages: torch.Tensor, seed: int, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The tensors that `part.parameters` lists, in that order.

        Args:
            pages: `[H, n, page_size, D]`, float32, after earlier transforms.
            seed: seed of all random choices.
            weights: the weight of each token, float32 `[H, n, page_size]`, 0 if unknown. `None`: all weights are equal.
        """


#: multiple of the identity added to the weights of a head, so that errors in all directions have a cost
RIDGE = 0.3
#: multiples of the Gaussian step that are tried for each channel
FACTORS = (*(0.6 + i / 15 for i in range(13)), 1.5, 1.65, 1.8, 2.0, 2.25, 2.5, 2.8, 3.2, 3.6, 4.0)
#: channels of at least so many bits get the step with the smallest error to this power. In other texts pages spread wider than
#: in those of the calibration, and numbers beyond the range of a channel with a small step have large errors
WIDE_BITS, POWER = 4, 4
#: tokens per KV head on which steps are fitted
TOKENS = 128 * 128
SMALLEST_SIZE = 1e-6
FP16_MAX = 65504.0
#: share of the unweighted statistics; the rest is weighted by attention
ALIKE = 0.4


class EigenCalibrator(Calibrator):
    """A map to channels that are uncorrelated inside a page, sorted by variance, largest first.

    C is the covariance of keys around the mean of their page. It mixes two covariances, with shares `ALIKE` and 1 -
    `ALIKE`. The first is unweighted. In the second each key has its attention weight, normalized within each window.
    W is the mean of g g^T plus a ridge, where g is the gradient of log p(tokens drawn from the model) with respect to a
    key, through far later queries only. Without gradients W is the identity. The center c is the mean of all keys.
    The eigenvectors U of W^1/2 C W^1/2 give k' = U^T W^1/2 (k - c). Equal errors then have the same cost in each channel,
    to second order.
    """

    gradients = True
    length = 4096  # the variance of keys depends on their positions

    def __init__(self, part, head_dim, num_kv_heads, *options, **named):
        super().__init__(part, head_dim, num_kv_heads, *options, **named)
        self.covariance = torch.zeros(num_kv_heads, head_dim, head_dim, dtype=torch.float64)
        self.attended, self.weights = torch.zeros_like(self.covariance), torch.zeros_like(self.covariance)
        self.total = torch.zeros(num_kv_heads, head_dim, dtype=torch.float64)
        self.tokens = self.windows = 0

    def observe(self, tokens, weights=None):
        count = tokens.shape[2] // self.page_size * self.page_size
        pages = tokens[0, :, :count].double().unflatten(1, (-1, self.page_size))
        self.total += pages.sum((1, 2)).cpu()
        rest = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        self.covariance += (rest.mT @ rest).cpu()
        self.tokens += count
        if weights is not None:
            counts = weights[:, :count].double()
            total = counts.sum(1).clamp(min=1e-300)[:, None, None]
            self.attended += ((rest * counts[..., None]).mT @ rest / total).cpu()
            self.windows += 1

    def observe_gradients(self, gradients):
        g = gradients[0].double()
        self.weights += (g.mT @ g).cpu()

    def fit(self, pages, seed, weights=None):
        if not bool(self.covariance.isfinite().all()):
            raise ValueError("the keys are not all finite")
        covariance = self.covariance / max(self.tokens, 1)
        if self.windows:
            covariance = ALIKE * covariance + (1 - ALIKE) * self.attended / self.windows
        with one_thread():
            matrix = self._matrix(covariance)
        # rounding to half precision makes the file small, and is exact for attention: queries get the inverse of the
        # rounded matrix
        center = (self.total / max(self.tokens, 1)).clamp(-FP16_MAX, FP16_MAX)
        return matrix.half(), center.half()

    def _matrix(self, covariance: torch.Tensor) -> torch.Tensor:
        """W^1/2 U of each KV head, float64 `[H, D, D]`. covariance: C."""
        identity = torch.eye(self.head_dim, dtype=torch.float64)
        mean = self.weights.diagonal(dim1=-2, dim2=-1).mean(-1)
        costs = torch.where(mean[:, None, None] > 0, self.weights / mean.clamp(min=1e-300)[:, None, None], identity)
        root = _square_root(costs + RIDGE * identity)
        vectors = torch.linalg.eigh(root @ covariance @ root).eigenvectors
        # flip: ascending -> descending. Keys are rows: k' = (k - c) (W^1/2 U)
        return root @ vectors.flip(-1)


def _square_root(matrix: torch.Tensor) -> torch.Tensor:
    """The square roots of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12).sqrt().unsqueeze(-2)) @ vectors.mT


class StaticCalibrator(Calibrator):
    """Centers and steps of each channel.

    Centers are means. Steps are fitted to tokens minus the mean of their page: the best multiple (`FACTORS`) of the
    Gaussian step for each channel, by weighted squared error, or by its fourth power in channels of 4 bits and more. With
    token scales the step is the Gaussian step for tokens of typical size.

    If pages have no means, the center of a KV head is either the mean or 0. Tokens with the most attention often have
    small values, which get small token scales around 0 but not around a mean. So the weighted error decides between the
    two; errors of values are weighted by squared attention. Without weights the center is 0 unless the mean halves the
    error, as it does if values have large biases.
    """

    part: Static

    @property
    def pages(self) -> int:
        return TOKENS // self.page_size

    def fit(self, pages, seed, weights=None):
        if not bool(pages.isfinite().all()):
            raise ValueError("the tokens are not all finite")
        center = pages.mean((1, 2)).clamp(-FP16_MAX, FP16_MAX).half()  # zero of a channel; its rounding is no error
        if not self.part.token_scale:
            return center, self._step((pages - pages.mean(2, keepdim=True)).flatten(1, 2), weights)
        centers = torch.zeros_like(center), center
        steps = [self._step((pages - each.float()[:, None, None]).flatten(1, 2), weights) for each in centers]
        errors = [self._error(pages, *each, weights) for each in zip(centers, steps, strict=True)]
        moved = (errors[1] < errors[0] * (1 if weights is not None else 0.5))[:, None]
        return torch.where(moved, *centers[::-1]), torch.where(moved, *steps[::-1])

    def _error(
        self, pages: torch.Tensor, center: torch.Tensor, step: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The weighted squared error of the pages of each KV head, `[H]`."""
        parameters, x = (center.float(), step), pages.transpose(0, 1)
        arrays = self.part.encode_arrays(x, parameters)
        lost = (self.part.decode_arrays(arrays, self.head_dim, parameters) - x).square().sum(-1).transpose(0, 1)
        return (lost if weights is None else lost * weights).sum((1, 2))

    def _step(self, rest: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Steps `[H, D]`. rest: tokens minus their mean or center, `[H, n, D]`. weights: those of `fit`."""
        if self.part.token_scale:
            weights = None
        shares = _shares(weights, rest)
        size = (rest.square() * shares).sum(1).sqrt()
        size = size.clamp(min=float(size.amax()) * SMALLEST_SIZE + 1e-30)
        bits = self.part.bits(self.head_dim).to(rest.device)
        gaussian = torch.tensor([STEP[int(b)] for b in bits], device=rest.device)
        if self.part.token_scale:
            typical = (rest / size[:, None]).square().mean(-1).sqrt().clamp(min=SMALLEST_SIZE).log().mean(-1).exp()
            return size * typical[:, None] * gaussian
        best, step = torch.full_like(size, torch.inf), size * gaussian
        power = torch.where(bits >= WIDE_BITS, POWER, 2)
        for factor in FACTORS:
            candidate = size * gaussian * factor
            lost = (uniform_codes(rest, candidate[:, None], bits) - rest).abs() / size[:, None]
            error = (lost.pow(power) * shares).sum(1)
            step, best = torch.where(error < best, candidate, step), torch.minimum(error, best)
        return step


def _shares(weights: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """The weight of each of the tokens `[H, n, D]`, float32 `[H, n, 1]`, with sum 1 per head. weights: those of `fit`."""
    alike = tokens.new_full((*tokens.shape[:2], 1), 1 / tokens.shape[1])
    if weights is None:
        return alike
    counts = weights.flatten(1)[..., None]
    total = counts.sum(1, keepdim=True)
    return torch.where(total > 0, ALIKE * alike + (1 - ALIKE) * counts / total.clamp(min=1e-30), alike)


#: smallest factor, relative to the largest of the head; smaller factors are clamped to it
SMALLEST_FACTOR = 1e-3


class SmoothCalibrator(Calibrator):
    """Square root of each channel's largest magnitude (VecInfer, section 3.2). A channel that is always 0 gets the
    factor 1."""

    largest: torch.Tensor | None = None

    def observe(self, tokens, weights=None):
        magnitude = tokens.float().abs().amax((0, 2))
        self.largest = magnitude if self.largest is None else torch.maximum(self.largest, magnitude)

    def fit(self, pages, seed, weights=None):
        assert self.largest is not None
        if not bool(self.largest.isfinite().all()):
            raise ValueError("the keys are not all finite")
        factors = self.largest.sqrt()
        floor = SMALLEST_FACTOR * factors.amax(-1, keepdim=True)
        return (torch.where(factors > 0, factors.maximum(floor), 1.0),)


class CodebookCalibrator(Calibrator):
    """k-means of the sub-vectors of each KV head, or of all KV heads together."""

    part: Codebook

    @property
    def separate(self) -> bool:
        return bool(self.per_head)  # the paper has one codebook per layer, which is faster for short rows

    @property
    def pages(self) -> int:
        vectors = self.page_size * self.head_dim // self.part.dim * (1 if self.separate else self.num_kv_heads)
        return -(-MOST_POINTS * self.part.size // vectors)

    def check(self, device, tokens):
        check_points(
            tokens * self.head_dim // self.part.dim * (1 if self.separate else self.num_kv_heads), self.part.size
        )
        check_kmeans(device)

    def fit(self, pages, seed, weights=None):
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
    """The calibrator of a transform or format that has parameters. Raises `ValueError` if there is none."""
    if (cls := CALIBRATORS.get(type(part))) is None:
        raise ValueError(f"{part} has parameters, but no calibrator: pass parameters=")
    return cls(part, head_dim, num_kv_heads, per_head, page_size)
