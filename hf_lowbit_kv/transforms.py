"""Key transforms: invertible linear maps of keys, with their counterpart on queries, so that every q.k stays what it was.

A cache stores transformed keys (sink, pages and tail alike), and queries are transformed where a step begins, so nothing
passes over the history. A rotation spreads the few large channels of a key over all of them, which few bits store better.

    k' = (k * scale) H      q' = (q / scale) H      q' . k' = q . k      with H orthonormal

`turned` defines k' and q' to the last bit, in float32, for packed bytes depend on them; kernels reproduce it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch


class Matrices(NamedTuple):
    """A transform for one layer: `[head_dim, head_dim]`, multiplied from the right."""

    keys: torch.Tensor
    queries: torch.Tensor
    inverse: torch.Tensor
    """of `keys`: what is stored -> keys"""


class Map(NamedTuple):
    """A transform for one layer, as `turned` and kernels take it, on its device; float32."""

    key_scale: torch.Tensor | None
    """factors `[head_dim]`, or `None`"""
    query_scale: torch.Tensor | None
    rotated: bool
    inverse: torch.Tensor | None = None
    """`Matrices.inverse`; what `turned` does not need"""


class Transform(ABC):
    """Factors of channels, then a rotation, or one of the two. Instances are immutable, hashable, and named by `name`.

    One without parameters is a subclass with a line in `TRANSFORMS`. One with parameters (calibrated smoothing) holds those
    of a layer and names them, for a `LayerSpec`, which carries the transform, belongs to one layer.
    """

    #: whether the orthonormal Hadamard matrix is multiplied with
    rotated: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical name, understood by `parse_transform`."""

    def scale(self, head_dim: int) -> torch.Tensor | None:
        """Factors of the key's channels, float64 `[head_dim]`, none of them 0; `None`: no factors."""
        return None

    def matrices(self, head_dim: int) -> Matrices:
        """The map for heads of that size, in float64 on the CPU. Raises `ValueError` where there is none."""
        scale = self.scale(head_dim)
        scale = torch.ones(head_dim, dtype=torch.float64) if scale is None else scale
        turn = torch.eye(head_dim, dtype=torch.float64)
        if self.rotated:
            turn = hadamard(head_dim) * head_dim**-0.5
        return Matrices(scale[:, None] * turn, turn / scale[:, None], turn.T / scale)

    def on(self, head_dim: int, device: torch.device | str) -> Map | None:
        """The map on `device`; `None`: nothing is to be done."""
        scale, inverse = self.scale(head_dim), self.matrices(head_dim).inverse
        if scale is None and not self.rotated:
            return None
        inverse = inverse.to(device, torch.float32)
        if scale is None:
            return Map(None, None, self.rotated, inverse)
        return Map(scale.to(device, torch.float32), (1 / scale).to(device, torch.float32), self.rotated, inverse)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Identity(Transform):
    """No transform."""

    @property
    def name(self) -> str:
        return "none"


@dataclass(frozen=True)
class Hadamard(Transform):
    """Rotation by an orthonormal Hadamard matrix of order head_dim: 64, 128, 256 after Sylvester, 80 = 20 x 4 and 96 = 12 x 8
    with a matrix of Paley's. Orthogonal, so keys and queries undergo the same. (VecInfer, section 3.1; QuaRot, SpinQuant.)"""

    rotated: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "hadamard"


#: every transform that a name alone defines
TRANSFORMS: dict[str, Transform] = {transform.name: transform for transform in (Identity(), Hadamard())}
NONE = TRANSFORMS["none"]


def parse_transform(transform: str | Transform | None) -> Transform:
    """The transform of that name; `None` is `"none"`, and a `Transform` is returned as it is."""
    if isinstance(transform, Transform):
        return transform
    name = "none" if transform is None else transform
    if not isinstance(name, str) or name not in TRANSFORMS:
        raise ValueError(f"transform={transform!r} is not known; allowed: {tuple(TRANSFORMS)}")
    return TRANSFORMS[name]


def turned(x: torch.Tensor, scale: torch.Tensor | None, rotated: bool) -> torch.Tensor:
    """Keys or queries `[..., head_dim]`, transformed: in float32, every sum in a fixed order, rounded once to the dtype of `x`.

    The rotation, for head_dim = blocks * base: sums over the `base` channels of a block with the matrix of that order, from the
    first channel to the last; then a butterfly over blocks, neighbours first; then the factor head_dim**-0.5.
    """
    y = x.float()
    if scale is not None:
        y = y * scale
    if rotated:
        head_dim, base = x.shape[-1], base_order(x.shape[-1])
        y = y.unflatten(-1, (-1, base))
        if base > 1:
            matrix = hadamard(base).to(x.device, torch.float32)
            total = y[..., :1] * matrix[0]
            for i in range(1, base):
                total = total + y[..., i : i + 1] * matrix[i]
            y = total
        step = 1
        while step < head_dim // base:
            pairs = y.unflatten(-2, (-1, 2, step))
            low, high = pairs.unbind(-3)
            y = torch.stack([low + high, low - high], -3).flatten(-4, -2)
            step *= 2
        y = y.flatten(-2) * head_dim**-0.5
    return y.to(x.dtype)


def restored(x: torch.Tensor, turn: Map) -> torch.Tensor:
    """Stored keys `[..., head_dim]` -> keys, in the dtype of `x`."""
    assert turn.inverse is not None
    return (x.float() @ turn.inverse).to(x.dtype)


def base_order(order: int) -> int:
    """The order (1, 12 or 20) of which `hadamard(order)` is made by doubling.

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
    return base


@functools.cache
def hadamard(order: int) -> torch.Tensor:
    """A Hadamard matrix, float64 `[order, order]`: entries of 1 and -1, rows orthogonal. Raises as `base_order` does."""
    base = base_order(order)
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
