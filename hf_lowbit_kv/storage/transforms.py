"""Transforms: invertible linear maps of keys and of values, per KV head, with or without parameters.

A layer stores transformed tokens in sink, pages and tail, so the history is never transformed again. With `M` for the
map:

    keys      k' = k M      queries get the counterpart, q' = q M^-T      so that q' . k' = q . k
    values    v' = v M      the output is mapped back, o = o' M^-1

A transform of keys may first subtract a center: k' = (k - c) M. All scores of a query q then lack q . c, which does not change
a softmax. With a softcap or sink logits it would, so there `Transform.score_bias` adds it back.

A rotation spreads a few large channels over all channels, so that few bits store them better. Factors make channels
alike. `+` joins transforms: "smooth+hadamard" divides by factors first, then rotates.

`Hadamard` and factors are defined to the last bit, in float32, because packed bytes depend on them; kernels reproduce
them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..formats.records import Parameter, Parametrized

#: tensors of `Transform.record_parameters`, in that order; `[H or 1, ...]` each
Tensors = Sequence[torch.Tensor]


class Fused(NamedTuple):
    """A transform that kernels apply when they load tokens: factors of channels, the Hadamard rotation, factors of channels, in
    this order. Each may be missing, and at most one of the two sets of factors exists."""

    before: bool
    rotated: bool
    after: bool

    @property
    def scaled(self) -> bool:
        """Whether there are factors. The transform's first two tensors, float32 `[H or 1, head_dim]`, are the factors of keys
        (or values) and of queries."""
        return self.before or self.after


class Transform(Parametrized, ABC):
    """A map of the channels of each head. Instances are immutable, hashable, and named by `name`.

    A subclass maps float32 tensors `[B, H, n, head_dim]`. `forward`, `counterpart` and `inverse` round once, to the
    model's dtype. A new transform is a subclass with a line in `TRANSFORMS`.

    Example:
        >>> transform = lb.parse_transform("hadamard")
        >>> transform.name
        'hadamard'
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical name, understood by `parse_transform`."""

    @property
    def identity(self) -> bool:
        """Whether it is the identity, for which nothing is launched."""
        return False

    @property
    def fused(self) -> Fused | None:
        """How kernels apply it when they load tokens; `None`: PyTorch applies it, before and after the kernels."""
        return None

    @property
    def product(self) -> bool:
        """Whether it is a matrix product that a kernel may apply, with sums in another order than PyTorch's. Keys are
        multiplied by the first tensor, and queries by the second, both `[H or 1, D, D]`. If `centered`, the third tensor, `[H
        or 1, D]`, is subtracted from keys before."""
        return False

    def own_inverse(self, head_dim: int) -> bool:
        """Whether it is a rotation (`fused`, without factors) that is its own inverse, apart from rounding."""
        return False

    @property
    def centered(self) -> bool:
        """Whether a center is subtracted from keys before they are mapped. Values cannot have such a transform."""
        return False

    @abstractmethod
    def map(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Map keys or values, float32."""

    @abstractmethod
    def map_queries(self, q: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Apply the counterpart of `map` to queries, float32."""

    @abstractmethod
    def unmap(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The inverse of `map`, float32."""

    def map_center(self, q: torch.Tensor, tensors: Tensors) -> torch.Tensor | None:
        """q . c of queries, float32 `[B, H, n]`; `None`: there is no center."""
        return None

    def validate(self, head_dim: int) -> None:
        """Raise `ValueError` if heads of this size cannot be mapped."""

    # The methods below are the same for every transform.

    def forward(self, x: torch.Tensor, tensors: Tensors = ()) -> torch.Tensor:
        """Keys or values `[B, H, n, head_dim]` -> transformed, as they are stored, in the dtype of `x`."""
        return x if self.identity else self.map(x.float(), tensors).to(x.dtype)

    def counterpart(self, q: torch.Tensor, tensors: Tensors = (), num_kv_heads: int = 1) -> torch.Tensor:
        """Queries `[B, Hq, n, head_dim]` -> queries for stored keys, in the dtype of `q`."""
        return q if self.identity else _by_kv_head(q, num_kv_heads, lambda x: self.map_queries(x, tensors))

    def score_bias(self, q: torch.Tensor, tensors: Tensors, num_kv_heads: int) -> torch.Tensor | None:
        """q . c of the model's queries `[B, Hq, n, head_dim]`, which all their scores lack, float32 `[B, Hq, n]`; `None`: there
        is no center."""
        if not self.centered:
            return None
        grouped = q.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        products = self.map_center(grouped, tensors)
        return None if products is None else products.reshape(q.shape[:-1])

    def inverse(self, x: torch.Tensor, tensors: Tensors = (), num_kv_heads: int = 1) -> torch.Tensor:
        """Stored tokens, or an output, `[B, Hq, n, head_dim]` -> mapped back, in the dtype of `x`."""
        return x if self.identity else _by_kv_head(x, num_kv_heads, lambda x: self.unmap(x, tensors))

    def __str__(self) -> str:
        return self.name


def _by_kv_head(x: torch.Tensor, num_kv_heads: int, work) -> torch.Tensor:
    """`work` on `[B, Hq, n, D]`, where the query heads of a KV head share one axis with the tokens."""
    grouped = x.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return work(grouped).reshape(x.shape).to(x.dtype)


@dataclass(frozen=True)
class Identity(Transform):
    """No transform."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def identity(self) -> bool:
        return True

    @property
    def fused(self) -> Fused:
        return Fused(False, False, False)

    def map(self, x, tensors):
        return x

    map_queries = unmap = map


@dataclass(frozen=True)
class Hadamard(Transform):
    """Rotation by an orthonormal Hadamard matrix of order head_dim: Sylvester's for powers of two; for 80 = 20 x 4,
    96 = 12 x 8 and 192 = 12 x 16 one that contains a matrix of Paley's. It is orthogonal, so keys and queries get the
    same rotation. (VecInfer, section 3.1; QuaRot, SpinQuant.)

    Example:
        >>> cache = lb.LowBitCache(model, "int2-channel", "int2-token", transform=lb.Hadamard())
    """

    @property
    def name(self) -> str:
        return "hadamard"

    @property
    def fused(self) -> Fused:
        return Fused(False, True, False)

    def validate(self, head_dim: int) -> None:
        base_order(head_dim)

    def map(self, x, tensors):
        return rotated(x)

    map_queries = map

    def unmap(self, x, tensors):
        return x @ _inverse_rotation(x.shape[-1], x.device)

    def own_inverse(self, head_dim: int) -> bool:
        return base_order(head_dim) == 1  # Sylvester's matrices are symmetric


@dataclass(frozen=True)
class Smooth(Transform):
    """Each channel divided by a factor of its KV head; queries are multiplied by it. (VecInfer, section 3.1;
    SmoothQuant.)

    Parameter: `factors`, float32 `[H, head_dim]`, none of them 0.
    """

    @property
    def name(self) -> str:
        return "smooth"

    @property
    def fused(self) -> Fused:
        return Fused(True, False, False)

    def parameters(self, head_dim: int, num_kv_heads: int):
        return (Parameter("factors", (num_kv_heads, head_dim), torch.float32),)

    def record_parameters(self, head_dim: int, num_kv_heads: int):
        return tuple(Parameter(name, (num_kv_heads, head_dim), torch.float32) for name in ("keys", "queries"))

    def prepare(self, tensors):
        return 1 / tensors[0], tensors[0]

    def map(self, x, tensors):
        return x * tensors[0].unsqueeze(-2)

    def map_queries(self, q, tensors):
        return q * tensors[1].unsqueeze(-2)

    unmap = map_queries


@dataclass(frozen=True)
class Matrix(Transform):
    """A full matrix for each KV head, multiplied from the right. Queries get its transposed inverse. Calibrated
    rotations use it.

    Its sums are those of the device's matrix product, so packed bytes may differ between devices.

    Parameter: `matrix`, float32 `[H, head_dim, head_dim]`, invertible.
    """

    @property
    def name(self) -> str:
        return "matrix"

    def parameters(self, head_dim: int, num_kv_heads: int):
        return (Parameter("matrix", (num_kv_heads, head_dim, head_dim), torch.float32),)

    def record_parameters(self, head_dim: int, num_kv_heads: int):
        shape = (num_kv_heads, head_dim, head_dim)
        return tuple(Parameter(name, shape, torch.float32) for name in ("matrix", "queries"))

    def prepare(self, tensors):
        return tensors[0], torch.linalg.inv(tensors[0].double()).float().mT.contiguous()

    @property
    def product(self) -> bool:
        return True

    def map(self, x, tensors):
        return x @ tensors[0]

    def map_queries(self, q, tensors):
        return q @ tensors[1]

    def unmap(self, x, tensors):
        return x @ tensors[1].mT


@dataclass(frozen=True)
class Eigen(Matrix):
    """A matrix whose calibration makes the channels of a page independent, and sorts them by what an error in them
    costs. Before keys are multiplied they lose a center, in float32. Biases of keys would otherwise spread over all
    channels, and the model's dtype would round off what is the token's own.

    Parameters: `matrix`, as in `Matrix`, and `center`, float32 `[H, head_dim]`.
    """

    weighted: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "eigen"

    @property
    def centered(self) -> bool:
        return True

    def parameters(self, head_dim: int, num_kv_heads: int):
        center = Parameter("center", (num_kv_heads, head_dim), torch.float32)
        return (*super().parameters(head_dim, num_kv_heads), center)

    def record_parameters(self, head_dim: int, num_kv_heads: int):
        center = Parameter("center", (num_kv_heads, head_dim), torch.float32)
        return (*super().record_parameters(head_dim, num_kv_heads), center)

    def prepare(self, tensors):
        return *super().prepare(tensors[:1]), tensors[1]

    def map(self, x, tensors):
        return super().map(x - tensors[2].unsqueeze(-2), tensors)

    def map_center(self, q, tensors):
        return (q @ tensors[2].unsqueeze(-1)).squeeze(-1)

    def unmap(self, x, tensors):
        return super().unmap(x, tensors) + tensors[2].unsqueeze(-2)


@dataclass(frozen=True)
class Chain(Transform):
    """Transforms applied one after the other, e.g. `"smooth+hadamard"`. Parameter names contain the names of their
    transforms, and a chain may contain a transform only once."""

    stages: tuple[Transform, ...]

    def __post_init__(self):
        names = [stage.name for stage in self.stages]
        if len(names) < 2 or len(set(names)) < len(names) or any(stage.identity for stage in self.stages):
            raise ValueError(f"transform={self.name!r} is not allowed; a chain is two or more different transforms")

    @property
    def name(self) -> str:
        return "+".join(stage.name for stage in self.stages)

    @property
    def fused(self) -> Fused | None:
        parts = [stage.fused for stage in self.stages]
        if None in parts or len(parts) > 2 or {fused.rotated for fused in parts if fused} != {False, True}:
            return None
        first_rotates = parts[0].rotated  # type: ignore[union-attr]
        return Fused(not first_rotates, True, first_rotates)

    @property
    def centered(self) -> bool:
        return any(stage.centered for stage in self.stages)

    def validate(self, head_dim: int) -> None:
        for stage in self.stages:
            stage.validate(head_dim)

    def parameters(self, head_dim: int, num_kv_heads: int):
        return tuple(p for stage in self.stages for p in stage.parameters(head_dim, num_kv_heads))

    def record_parameters(self, head_dim: int, num_kv_heads: int):
        return tuple(
            parameter._replace(name=f"{stage.name}.{parameter.name}")
            for stage in self.stages
            for parameter in stage.record_parameters(head_dim, num_kv_heads)
        )

    def prepare(self, tensors):
        prepared: list[torch.Tensor] = []
        tensors = list(tensors)
        for stage in self.stages:
            count = len(stage.parameter_kinds)
            prepared += stage.prepare(tensors[:count])
            del tensors[:count]
        return prepared

    @functools.cached_property
    def _tensor_counts(self) -> tuple[int, ...]:
        """Tensors of each stage in a record; as many at every head_dim."""
        return tuple(len(stage.record_parameters(64, 1)) for stage in self.stages)

    def _with_tensors(self, tensors: Tensors) -> list[tuple[Transform, Tensors]]:
        pairs, first = [], 0
        for stage, count in zip(self.stages, self._tensor_counts, strict=True):
            pairs.append((stage, tensors[first : first + count]))
            first += count
        return pairs

    def map(self, x, tensors):
        for stage, of_stage in self._with_tensors(tensors):
            x = stage.map(x, of_stage)
        return x

    def map_queries(self, q, tensors):
        for stage, of_stage in self._with_tensors(tensors):
            q = stage.map_queries(q, of_stage)
        return q

    def map_center(self, q, tensors):
        products = None
        for stage, of_stage in self._with_tensors(tensors):
            if (product := stage.map_center(q, of_stage)) is not None:
                products = product if products is None else products + product
            q = stage.map_queries(q, of_stage)
        return products

    def unmap(self, x, tensors):
        for stage, of_stage in reversed(self._with_tensors(tensors)):
            x = stage.unmap(x, of_stage)
        return x


#: every transform that is not a chain; a new one adds a line
TRANSFORMS: dict[str, Transform] = {t.name: t for t in (Identity(), Hadamard(), Smooth(), Matrix(), Eigen())}
NONE = TRANSFORMS["none"]


def parse_transform(transform: str | Transform | None) -> Transform:
    """The transform with this name, or a chain of them. `None` is `"none"`, and a `Transform` is returned unchanged.

    Example:
        >>> lb.parse_transform("smooth+hadamard").name
        'smooth+hadamard'
    """
    if isinstance(transform, Transform):
        return transform
    name = "none" if transform is None else transform
    stages = name.split("+") if isinstance(name, str) else []
    if not stages or any(stage not in TRANSFORMS for stage in stages):
        raise ValueError(
            f"transform={transform!r} is not known; allowed: {tuple(TRANSFORMS)}, and several joined by '+'"
        )
    transforms = tuple(TRANSFORMS[stage] for stage in stages)
    return transforms[0] if len(transforms) == 1 else Chain(transforms)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard rotation of `[..., head_dim]`, float32, every sum in a fixed order.

    For head_dim = blocks * base there are three parts. First, sums over the `base` channels of a block with the matrix
    of that order, from the first channel to the last. Then a butterfly over blocks, neighbours first. Then the factor
    head_dim**-0.5.
    """
    head_dim, base = x.shape[-1], base_order(x.shape[-1])
    y = x.unflatten(-1, (-1, base))
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
    return y.flatten(-2) * head_dim**-0.5


@functools.cache
def _inverse_rotation(head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 `[head_dim, head_dim]`."""
    return (hadamard(head_dim).T * head_dim**-0.5).to(device, torch.float32)


def base_order(order: int) -> int:
    """The order (1, 12 or 20) from which doubling makes `hadamard(order)`.

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
