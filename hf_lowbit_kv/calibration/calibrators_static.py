"""Calibrators of own formats: the transform `eigen` of keys, and the centers and steps of `static` (docs/own-formats.md)."""

from __future__ import annotations

import torch

from ..formats.static import STEP, Static, uniform_codes
from .calibrator import Calibrator

#: share of the identity in a head's weights: directions that no calibration text asked for are not free
RIDGE = 0.3
#: factors of the Gaussian step that are tried for each channel
FACTORS = tuple(0.6 + i / 15 for i in range(13))
#: tokens that steps are fitted on, of each KV head
TOKENS = 128 * 128
SMALLEST = 1e-6
FP16_MAX = 65504.0


class EigenCalibrator(Calibrator):
    """A map to channels that are independent inside a page, sorted by what an error in them costs.

    C is the covariance of keys around the mean of their page. W is the mean of g g^T plus a ridge, where g is the gradient of
    log p(tokens drawn from the model) with respect to a key, as queries far behind it see it. The eigenvectors U of
    W^1/2 C W^1/2 give k' = U^T W^1/2 k. An error of any channel then costs the same, to second order. Without gradients W is
    the identity.
    """

    gradients = True
    length = 4096  # how keys vary depends on their positions

    def __init__(self, part, head_dim, num_kv_heads, *options, **named):
        super().__init__(part, head_dim, num_kv_heads, *options, **named)
        self.covariance = torch.zeros(num_kv_heads, head_dim, head_dim, dtype=torch.float64)
        self.weights = torch.zeros_like(self.covariance)

    def observe(self, tokens):
        count = tokens.shape[2] // self.page_size * self.page_size
        pages = tokens[0, :, :count].double().unflatten(1, (-1, self.page_size))
        rest = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        self.covariance += (rest.mT @ rest).cpu()

    def observe_gradients(self, gradients):
        g = gradients[0].double()
        self.weights += (g.mT @ g).cpu()

    def fit(self, pages, seed):
        if not bool(self.covariance.isfinite().all()):
            raise ValueError("the keys are not all finite")
        identity = torch.eye(self.head_dim, dtype=torch.float64)
        mean = self.weights.diagonal(dim1=-2, dim2=-1).mean(-1)
        weights = torch.where(mean[:, None, None] > 0, self.weights / mean.clamp(min=1e-300)[:, None, None], identity)
        root = _square_root(weights + RIDGE * identity)
        vectors = torch.linalg.eigh(root @ self.covariance @ root).eigenvectors
        # ascending -> descending; keys are rows: k' = k (W^1/2 U). Half precision makes the file small: any matrix serves
        return ((root @ vectors.flip(-1)).half(),)


def _square_root(matrix: torch.Tensor) -> torch.Tensor:
    """Of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12).sqrt().unsqueeze(-2)) @ vectors.mT


class StaticCalibrator(Calibrator):
    """Centers are means. Steps are fitted to what remains around the mean of a page: the best of 13 multiples of the Gaussian
    step for each channel. With token scales it is the Gaussian step, for tokens of typical size."""

    part: Static

    @property
    def pages(self) -> int:
        return TOKENS // self.page_size

    def fit(self, pages, seed):
        if not bool(pages.isfinite().all()):
            raise ValueError("the tokens are not all finite")
        center = pages.mean((1, 2)).clamp(-FP16_MAX, FP16_MAX).half()  # where a channel's zero lies; any number serves
        rest = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        size = rest.square().mean(1).sqrt()
        size = size.clamp(min=float(size.amax()) * SMALLEST + 1e-30)
        bits = self.part.bits(self.head_dim).to(pages.device)
        gaussian = torch.tensor([STEP[int(b)] for b in bits], device=pages.device)
        if self.part.token_scale:
            typical = (rest / size[:, None]).square().mean(-1).sqrt().clamp(min=SMALLEST).log().mean(-1).exp()
            return center, size * typical[:, None] * gaussian
        best, step = torch.full_like(size, torch.inf), size * gaussian
        for factor in FACTORS:
            tried = size * gaussian * factor
            error = (uniform_codes(rest, tried[:, None], bits) - rest).square().mean(1)
            step, best = torch.where(error < best, tried, step), torch.minimum(error, best)
        return center, step
