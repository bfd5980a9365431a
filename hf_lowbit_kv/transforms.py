"""Key transforms: invertible linear maps of keys, with their counterpart on queries, so that every q.k stays what it was.

A cache stores transformed keys (sink, pages and tail alike), and queries are transformed where a step begins, so nothing
passes over the history. A rotation spreads the few large channels of a key over all of them, which few bits store better.

    (q B) . (k A) = q . k      with B = (A^-1)^T
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Matrices(NamedTuple):
    """A transform for one layer: float32 `[head_dim, head_dim]`, multiplied from the right."""

    keys: torch.Tensor
    queries: torch.Tensor
    inverse: torch.Tensor
    """of `keys`: what is stored -> keys"""


class Transform(ABC):
    """An invertible linear map of keys. Instances are immutable, hashable, and named by `name`.

    One without parameters is a subclass with a line in `TRANSFORMS`. One with parameters (calibrated smoothing) holds those
    of a layer and names them, for a `LayerSpec`, which carries the transform, belongs to one layer.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical name, understood by `parse_transform`."""

    @abstractmethod
    def matrices(self, head_dim: int) -> Matrices:
        """The map for heads of that size, in float64 on the CPU. Raises `ValueError` where there is none."""

    def on(self, head_dim: int, device: torch.device | str) -> Matrices | None:
        """The map in float32 on `device`; `None`: nothing is to be done."""
        return Matrices(*(matrix.to(device, torch.float32) for matrix in self.matrices(head_dim)))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Identity(Transform):
    """No transform."""

    @property
    def name(self) -> str:
        return "none"

    def matrices(self, head_dim: int) -> Matrices:
        return Matrices(*[torch.eye(head_dim, dtype=torch.float64)] * 3)

    def on(self, head_dim: int, device: torch.device | str) -> None:
        return None


@dataclass(frozen=True)
class Hadamard(Transform):
    """Rotation by an orthonormal Hadamard matrix of order head_dim: 64, 128, 256 after Sylvester, 80 = 20 x 4 and 96 = 12 x 8
    with a matrix of Paley's. Orthogonal, so keys and queries undergo the same. (VecInfer, section 3.1; QuaRot, SpinQuant.)"""

    @property
    def name(self) -> str:
        return "hadamard"

    def matrices(self, head_dim: int) -> Matrices:
        matrix = hadamard(head_dim) * head_dim**-0.5
        return Matrices(matrix, matrix, matrix.T)


#: every transform that a name alone defines
TRANSFORMS: dict[str, Transform] = {transform.name: transform for transform in (Identity(), Hadamard())}
NONE = TRANSFORMS["none"]


def parse_transform(transform: str | Transform | None) -> Transform:
    """The transform of that name; `None` is `"none"`, and a `Transform` is returned as it is."""
    if isinstance(transform, Transform):
        return transform
    name = "none" if transform is None else transform
    if name not in TRANSFORMS:
        raise ValueError(f"transform={transform!r} is not known; allowed: {tuple(TRANSFORMS)}")
    return TRANSFORMS[name]


def apply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`x @ matrix` in float32, rounded once to the dtype of `x` `[..., head_dim]`."""
    return (x.float() @ matrix).to(x.dtype)


@functools.cache
def hadamard(order: int) -> torch.Tensor:
    """A Hadamard matrix, float64 `[order, order]`: entries of 1 and -1, rows orthogonal.

    Raises:
        ValueError: the order is not a power of two times 1, 12 or 20.
    """
    base = order
    while base not in (1, 12, 20):
        if base < 2 or base % 2:
            raise ValueError(
                f"head_dim={order} has no Hadamard matrix here: it must be a power of two times 1, 12 or 20"
            )
        base //= 2
    matrix = torch.ones(1, 1, dtype=torch.float64) if base == 1 else _paley(base)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _paley(order: int) -> torch.Tensor:
    """Paley's first construction, for a prime `order - 1` that leaves 3 when divided by 4: identity plus a skew matrix of
    quadratic residues."""
    prime = order - 1
    squares = {i * i % prime for i in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)], dtype=torch.float64)
    number = torch.arange(prime)
    skew = torch.zeros(order, order, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = character[(number[:, None] - number[None, :]) % prime]
    return torch.eye(order, dtype=torch.float64) + skew
