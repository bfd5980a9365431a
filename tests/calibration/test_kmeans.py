"""Lloyd's algorithm as a GPU runs it, against closed forms."""

from __future__ import annotations

import torch

from hf_lowbit_kv.calibration.kmeans import ITERATIONS, _lloyd


def as_rows(x: torch.Tensor) -> list[list[float]]:
    return sorted(x.tolist())


def test_as_many_centroids_as_points_are_the_points():
    x = torch.randn(6, 3)
    assert as_rows(_lloyd(x, 6, 0, ITERATIONS)) == as_rows(x)


def test_points_that_occur_often_take_one_centroid():
    """Centroids without points begin again elsewhere."""
    x = 10 * torch.eye(4)
    for seed in range(5):
        assert as_rows(_lloyd(x[[0, 0, 0, 0, 0, 1, 1, 2, 3]], 4, seed, ITERATIONS)) == as_rows(x)


def test_centroids_are_means_of_the_points_nearest_to_them():
    x = torch.randn(200, 2)
    centroids = _lloyd(x, 5, 0, 200)
    nearest = torch.cdist(x.double(), centroids.double()).argmin(1)
    means = torch.stack([x[nearest == i].mean(0) for i in range(5)])
    torch.testing.assert_close(centroids, means)
