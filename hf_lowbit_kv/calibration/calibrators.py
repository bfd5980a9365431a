"""What makes the parameters of each transform and format from a model's own keys and values. A new one is a class and a line in
`CALIBRATORS`. `docs/dev/own-formats.md` explains those of the transform `eigen` and of the format `static`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ..formats.codebook import Codebook
from ..formats.records import Parametrized
from ..formats.static import STEP, Static, uniform_codes
from ..storage.transforms import Eigen, Smooth
from .kmeans import MOST_POINTS, check_kmeans, check_points, kmeans

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
    def attention(self) -> bool:
        """Whether it wants weights of tokens, by attention (`attention_weights`). `observe` gets those of keys alone."""
        return self.part.weighed

    @property
    def pages(self) -> int:
        """Pages that `fit` wants of each KV head, at most; 0: all that there are."""
        return 0

    def check(self, device: str, tokens: int) -> None:  # noqa: B027
        """Raise what `fit` would raise for want of a package or of tokens, before the model reads anything.

        Args:
            device: type of the model's, e.g. `"cpu"`. tokens: of each KV head that `fit` will get.
        """

    def observe(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> None:  # noqa: B027
        """See a window. Nothing need be done.

        Args:
            tokens: keys or values, `[1, H, S, D]`, as the transforms in front give them.
            weights: what each counts, float32 `[H, S]`, 0 where that is not known; `None`: all count alike.
        """

    def observe_gradients(self, gradients: torch.Tensor) -> None:  # noqa: B027
        """gradients: of log p(tokens drawn from the model) with respect to keys or values of a window, `[1, H, S, D]`, as
        queries far behind see them (`calibration/gradients.py`). Nothing need be done."""

    @abstractmethod
    def fit(self, pages: torch.Tensor, seed: int, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The tensors that `part.parameters` lists, in that order.

        Args:
            pages: `[H, n, page_size, D]`, float32, as the transforms in front give them.
            seed: of all that is drawn at random.
            weights: what each token counts, float32 `[H, n, page_size]`, 0 where that is not known; `None`: all count alike.
        """


#: share of the identity in a head's weights: directions that no calibration text asked for are not free
RIDGE = 0.3
#: factors of the Gaussian step that are tried for each channel
FACTORS = tuple(0.6 + i / 15 for i in range(13))
#: tokens that steps are fitted on, of each KV head
TOKENS = 128 * 128
SMALLEST = 1e-6
FP16_MAX = 65504.0
#: share of all tokens alike, beside the tokens that are weighed by attention
ALIKE = 0.4


class EigenCalibrator(Calibrator):
    """A map to channels that are independent inside a page, sorted by what an error in them costs.

    C is the covariance of keys around the mean of their page: `ALIKE` of it that of all keys alike, and the rest one in which
    a key counts as much as it is attended to, in each window by itself. W is the mean of g g^T plus a ridge, where g is the
    gradient of log p(tokens drawn from the model) with respect to a key, as queries far behind it see it. The eigenvectors U
    of W^1/2 C W^1/2 give k' = U^T W^1/2 k. An error of any channel then costs the same, to second order. Without gradients W
    is the identity.
    """

    gradients = True
    length = 4096  # how keys vary depends on their positions

    def __init__(self, part, head_dim, num_kv_heads, *options, **named):
        super().__init__(part, head_dim, num_kv_heads, *options, **named)
        self.covariance = torch.zeros(num_kv_heads, head_dim, head_dim, dtype=torch.float64)
        self.attended, self.weights = torch.zeros_like(self.covariance), torch.zeros_like(self.covariance)
        self.tokens = self.windows = 0

    def observe(self, tokens, weights=None):
        count = tokens.shape[2] // self.page_size * self.page_size
        pages = tokens[0, :, :count].double().unflatten(1, (-1, self.page_size))
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
        identity = torch.eye(self.head_dim, dtype=torch.float64)
        mean = self.weights.diagonal(dim1=-2, dim2=-1).mean(-1)
        costs = torch.where(mean[:, None, None] > 0, self.weights / mean.clamp(min=1e-300)[:, None, None], identity)
        root = _square_root(costs + RIDGE * identity)
        vectors = torch.linalg.eigh(root @ covariance @ root).eigenvectors
        # ascending -> descending; keys are rows: k' = k (W^1/2 U). Half precision makes the file small: any matrix serves
        return ((root @ vectors.flip(-1)).half(),)


def _square_root(matrix: torch.Tensor) -> torch.Tensor:
    """Of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12).sqrt().unsqueeze(-2)) @ vectors.mT


class StaticCalibrator(Calibrator):
    """Centers are means. Steps are fitted to what remains around the mean of a page: the best of 13 multiples of the Gaussian
    step for each channel, by errors of tokens as they are weighed. With token scales it is the Gaussian step, for tokens of
    typical size.

    Where pages have no means, a KV head's center is the mean or 0. Values of the tokens that are attended to most are often
    small: around 0 they get small token scales, and around a mean they do not. So errors of weighed tokens decide (squared
    attention is what an error of a value counts for). Without weights it is 0, unless the mean halves the error, as it does
    where values have large biases.
    """

    part: Static

    @property
    def pages(self) -> int:
        return TOKENS // self.page_size

    def fit(self, pages, seed, weights=None):
        if not bool(pages.isfinite().all()):
            raise ValueError("the tokens are not all finite")
        center = pages.mean((1, 2)).clamp(-FP16_MAX, FP16_MAX).half()  # where a channel's zero lies; any number serves
        if self.part.page_mean:
            return center, self._step((pages - pages.mean(2, keepdim=True)).flatten(1, 2), weights)
        centers = torch.zeros_like(center), center
        steps = [self._step((pages - each.float()[:, None, None]).flatten(1, 2), weights) for each in centers]
        errors = [self._error(pages, *each, weights) for each in zip(centers, steps, strict=True)]
        moved = (errors[1] < errors[0] * (1 if weights is not None else 0.5))[:, None]
        return torch.where(moved, *centers[::-1]), torch.where(moved, *steps[::-1])

    def _error(
        self, pages: torch.Tensor, center: torch.Tensor, step: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """What each KV head's pages lose, `[H]`: squared errors, as tokens are weighed."""
        parameters, x = (center.float(), step), pages.transpose(0, 1)
        arrays = self.part.encode_arrays(x, parameters)
        lost = (self.part.decode_arrays(arrays, self.head_dim, parameters) - x).square().sum(-1).transpose(0, 1)
        return (lost if weights is None else lost * weights).sum((1, 2))

    def _step(self, rest: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Steps `[H, D]` for what remains of tokens, `[H, n, D]`. weights: as `fit` gets them."""
        if self.part.token_scale:
            weights = None
        shares = _shares(weights, rest)
        size = (rest.square() * shares).sum(1).sqrt()
        size = size.clamp(min=float(size.amax()) * SMALLEST + 1e-30)
        bits = self.part.bits(self.head_dim).to(rest.device)
        gaussian = torch.tensor([STEP[int(b)] for b in bits], device=rest.device)
        if self.part.token_scale:
            typical = (rest / size[:, None]).square().mean(-1).sqrt().clamp(min=SMALLEST).log().mean(-1).exp()
            return size * typical[:, None] * gaussian
        best, step = torch.full_like(size, torch.inf), size * gaussian
        for factor in FACTORS:
            tried = size * gaussian * factor
            error = ((uniform_codes(rest, tried[:, None], bits) - rest).square() * shares).sum(1)
            step, best = torch.where(error < best, tried, step), torch.minimum(error, best)
        return step


def _shares(weights: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """What each of the tokens `[H, n, D]` counts, float32 `[H, n, 1]`, 1 in all for each head. weights: as `fit` gets them."""
    alike = tokens.new_full((*tokens.shape[:2], 1), 1 / tokens.shape[1])
    if weights is None:
        return alike
    counts = weights.flatten(1)[..., None]
    total = counts.sum(1, keepdim=True)
    return torch.where(total > 0, ALIKE * alike + (1 - ALIKE) * counts / total.clamp(min=1e-30), alike)


#: factors below this share of a head's largest are raised to it
SMALLEST_FACTOR = 1e-3


class SmoothCalibrator(Calibrator):
    """Square root of each channel's largest magnitude (VecInfer, section 3.2). A channel that is always 0 keeps its size."""

    largest: torch.Tensor | None = None

    def observe(self, tokens, weights=None):
        most = tokens.float().abs().amax((0, 2))
        self.largest = most if self.largest is None else torch.maximum(self.largest, most)

    def fit(self, pages, seed, weights=None):
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
    """The calibrator of a transform or format that has parameters. Raises `ValueError` where there is none."""
    if (cls := CALIBRATORS.get(type(part))) is None:
        raise ValueError(f"{part} has parameters, and nothing that calibrates them: pass parameters= yourself")
    return cls(part, head_dim, num_kv_heads, per_head, page_size)
