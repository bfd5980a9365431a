"""k-means for codebooks: faiss on a CPU, and Lloyd's algorithm in PyTorch on a GPU, where faiss is not available."""

from __future__ import annotations

from typing import Any

import torch

from ..installation import install_extra
from ..triton_kernels.determinism import deterministic

#: largest number of points used per centroid
MOST_POINTS = 256
#: largest number of iterations (VecInfer, section 4.1)
ITERATIONS = 30
#: largest number of distances that a GPU computes at once
_MAX_DISTANCES = 1 << 27


def kmeans(x: torch.Tensor, count: int, seed: int, iterations: int = ITERATIONS) -> torch.Tensor:
    """Centroids `[count, dim]` of points `[n, dim]`, float32, on the device of `x`. Uses at most 256 points per
    centroid.

    Raises:
        ValueError: points are not finite. ImportError: faiss is missing, on a CPU.
    """
    if not bool(x.isfinite().all()):
        raise ValueError("the sub-vectors are not all finite")
    x = x.float()
    if len(x) > MOST_POINTS * count:
        generator = torch.Generator().manual_seed(seed)
        x = x[torch.randperm(len(x), generator=generator)[: MOST_POINTS * count].to(x.device)]
    if x.device.type == "cpu":
        return _faiss(x, count, seed, iterations)
    with deterministic():  # sums have a fixed order, so codebooks are reproducible
        return _lloyd(x, count, seed, iterations)


def check_points(points: int, count: int) -> None:
    """Raise `ValueError` if there are fewer points than centroids."""
    if points < count:
        raise ValueError(f"{points} sub-vectors are too few for {count} centroids")


def check_kmeans(device: str) -> None:
    """Raise `ImportError` if `kmeans` lacks a package on this type of device."""
    if device == "cpu":
        _faiss_package()


def _faiss_package() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"calibration on a CPU needs faiss: {install_extra('calibrate')}") from error
    return faiss


def _faiss(x: torch.Tensor, count: int, seed: int, iterations: int) -> torch.Tensor:
    trainer = _faiss_package().Kmeans(
        x.shape[1],
        count,
        niter=iterations,
        seed=seed % 2**31,  # an int of C++
        min_points_per_centroid=1,
        max_points_per_centroid=MOST_POINTS,
    )
    trainer.train(x.contiguous().numpy())
    return torch.from_numpy(trainer.centroids)


def _lloyd(x: torch.Tensor, count: int, seed: int, iterations: int) -> torch.Tensor:
    """Centroids start at random points. A centroid without points restarts at a point far from its own centroid."""
    starts = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    centroids = x[starts.to(x.device)].clone()
    for _ in range(iterations):
        code, distance = _assign(x, centroids)
        size = torch.bincount(code, minlength=count)
        moved = torch.zeros_like(centroids).index_add_(0, code, x) / size.clamp(min=1)[:, None]
        far = x[distance.topk(count).indices]
        empty = size == 0
        centroids = torch.where(empty[:, None], far[(empty.cumsum(0) - 1).clamp(min=0)], moved)
    return centroids


def _assign(x: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest centroid of each point, int64 `[n]`, and its squared distance, float32 `[n]`."""
    squares = (centroids * centroids).sum(-1)
    codes, distances = [], []
    for part in x.split(max(_MAX_DISTANCES // len(centroids), 1)):
        distance, code = torch.addmm(squares, part, centroids.T, alpha=-2).min(-1)
        codes.append(code)
        distances.append(distance + (part * part).sum(-1))
    return torch.cat(codes), torch.cat(distances)
