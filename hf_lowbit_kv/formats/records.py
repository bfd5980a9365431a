"""Arrays packed contiguously in a byte buffer: the pages of a format, and the parameters of a layer.

A parameter is a read-only tensor that belongs to one layer: a codebook, factors of channels, a rotation. A format or a
transform lists what it needs (`Parametrized.parameters`), and calibration supplies the tensors. The layer holds them as
one *record*, uint8 `[H, bytes]` or `[1, bytes]`, with the same alignment as a page. A kernel then needs one pointer and
one stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

#: every field starts at a multiple of this many bytes, so that kernels may load 16 bytes per lane
FIELD_ALIGNMENT = 16


class Field(NamedTuple):
    """One array inside a page or a record: `shape` elements of `dtype`, contiguous, starting at byte `offset`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Parameter(NamedTuple):
    """A read-only tensor of one layer. The first number of `shape` is `num_kv_heads`, or 1: all heads share it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def contiguous_fields(arrays: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[Field, ...]:
    """Fields for arrays (name, dtype, shape), packed contiguously with alignment."""
    fields, offset = [], 0
    for name, dtype, shape in arrays:
        fields.append(Field(name, dtype, shape, offset, math.prod(shape) * dtype.itemsize))
        offset = _aligned(offset + fields[-1].nbytes)
    return tuple(fields)


def size(fields: Sequence[Field]) -> int:
    """Number of bytes that the fields take."""
    return _aligned(fields[-1].offset + fields[-1].nbytes) if fields else 0


def views(records: torch.Tensor, fields: Iterable[Field]) -> dict[str, torch.Tensor]:
    """Bytes `[..., size]` (uint8, last axis contiguous) -> typed views `[..., *shape]` of the same memory."""
    arrays = {}
    for field in fields:
        raw = records[..., field.offset : field.offset + field.nbytes]
        arrays[field.name] = raw.view(field.dtype).unflatten(-1, field.shape)
    return arrays


def _aligned(offset: int) -> int:
    return -(-offset // FIELD_ALIGNMENT) * FIELD_ALIGNMENT


#: a head_dim that every format supports; names and dtypes of parameters do not depend on it
_ANY_HEAD_DIM = 64


class Parametrized:
    """Base class of formats and transforms: read-only tensors for each layer, none by default.

    A subclass overrides `parameters`. If it computes with other tensors than calibration supplies (a matrix and its
    inverse), it also overrides `record_parameters` and `prepare`.
    """

    #: whether calibration weights tokens by attention
    weighted: ClassVar[bool] = False

    def parameters(self, head_dim: int, num_kv_heads: int) -> tuple[Parameter, ...]:
        """The tensors that calibration supplies for a layer with `num_kv_heads` heads."""
        return ()

    def record_parameters(self, head_dim: int, num_kv_heads: int) -> tuple[Parameter, ...]:
        """The tensors that the layer holds, and that encoding, decoding and kernels get."""
        return self.parameters(head_dim, num_kv_heads)

    def prepare(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tensors of `parameters` -> tensors of `record_parameters`, in these orders."""
        return tensors

    # The methods below are the same for all subclasses.

    @property
    def parameter_kinds(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Name and dtype of each of the `parameters`. They do not depend on the layer's sizes."""
        return tuple((parameter.name, parameter.dtype) for parameter in self.parameters(_ANY_HEAD_DIM, 1))

    @property
    def has_parameters(self) -> bool:
        """Whether it needs a calibration."""
        return bool(self.parameter_kinds)

    def record_fields(self, head_dim: int) -> tuple[Field, ...]:
        """The tensors that the layer holds for one KV head, with their byte offsets in its record."""
        return contiguous_fields(
            (parameter.name, parameter.dtype, parameter.shape[1:]) for parameter in self.record_parameters(head_dim, 1)
        )

    def tensors(self, record: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, ...]:
        """A record `[H or 1, bytes]` -> the tensors in it, `[H or 1, ...]` each."""
        return tuple(views(record, self.record_fields(head_dim)).values())

    def record(
        self, tensors: Mapping[str, torch.Tensor], head_dim: int, num_kv_heads: int, local: slice, device: torch.device
    ) -> torch.Tensor | None:
        """The record, uint8 `[H or 1, bytes]`, on `device`; `None` where there are no parameters.

        Args:
            tensors: by name, checked with `check`.
            num_kv_heads: of the layer.
            local: which of them this process has (tensor parallelism).
        """
        if not (parameters := self.parameters(head_dim, num_kv_heads)):
            return None
        mine = [tensors[p.name].detach().to(device) for p in parameters]
        prepared = self.prepare([x if x.shape[0] == 1 else x[local] for x in mine])
        fields = self.record_fields(head_dim)
        heads = max(x.shape[0] for x in prepared)
        record = torch.zeros(heads, size(fields), dtype=torch.uint8, device=device)
        for view, x in zip(views(record, fields).values(), prepared, strict=True):
            view.copy_(x.expand(heads, *x.shape[1:]))
        return record

    def check(self, tensors: Mapping[str, torch.Tensor], head_dim: int, num_kv_heads: int, where: str) -> None:
        """Raise `ValueError` if `tensors` do not match `parameters`. where: their source, a prefix for the message."""
        for name, shape, dtype in self.parameters(head_dim, num_kv_heads):
            if name not in tensors:
                raise ValueError(f"{where}{name} is missing: {self} needs it, {dtype} of shape {shape}")
            tensor = tensors[name]
            if tensor.dtype != dtype or tuple(tensor.shape) not in (shape, (1, *shape[1:])):
                shared = f", or {(1, *shape[1:])} for all heads" if shape[0] > 1 else ""
                raise ValueError(
                    f"{where}{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; {self} needs {dtype} of shape "
                    f"{shape}{shared}"
                )
