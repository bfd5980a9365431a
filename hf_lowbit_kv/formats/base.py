"""The base class of page formats. A format turns `page_size` consecutive tokens of one KV head into bytes, and back.

A format does not depend on models, caches or attention. The PyTorch code of formats *defines* the bytes; kernels
reproduce them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from .records import FIELD_ALIGNMENT as FIELD_ALIGNMENT
from .records import Field as Field
from .records import Parameter as Parameter
from .records import Parametrized, contiguous_fields, size, views

#: head sizes that formats store; kernels of a backend may support fewer
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
#: tensors of `Format.record_parameters`, in that order; `[H or 1, ...]` each
Tensors = Sequence[torch.Tensor]


class Format(Parametrized, ABC):
    """The encoding of one page of one KV head. Instances are immutable, hashable, and identified by `name`.

    Subclasses describe their arrays with `arrays`, and implement `encode_arrays` / `decode_arrays`. A format that needs
    tensors of the layer (e.g. a codebook) lists them in `parameters`, and gets them when it encodes and decodes.

    Example:
        >>> fmt = lb.parse_format("int4-token")
        >>> page = torch.randn(2, 128, 64)  # [KV heads, page_size, head_dim]
        >>> arrays = fmt.encode_arrays(page)
        >>> decoded = fmt.decode_arrays(arrays, head_dim=64)
        >>> decoded.shape, bool((decoded - page).abs().max() < 0.5)
        (torch.Size([2, 128, 64]), True)
    """

    #: layouts this format can be stored in; the first is the default
    layouts: ClassVar[tuple[str, ...]] = ("planar-1",)
    #: order of the bytes inside a page; another order gets another name
    layout: str = "planar-1"
    #: the arrays of a page with codes; the others are metadata
    code_arrays: ClassVar[tuple[str, ...]] = ("codes",)
    #: fields that a caller of `from_preset` may change
    tunable: ClassVar[tuple[str, ...]] = ()
    #: the grammar of this format's names, for messages
    grammar: ClassVar[str] = ""
    #: whether the format can store the streams of a latent (MLA), whose widths differ from those of heads
    stores_latents: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical name, understood by `parse_format`."""

    def check_layout(self, offered: tuple[str, ...] | None = None) -> None:
        """Raise `ValueError` if `layout` is not one of `offered` (default: `layouts`)."""
        if self.layout not in (allowed := offered or self.layouts):
            raise ValueError(f"layout={self.layout!r} is not known; allowed: {allowed}")

    @property
    def at_layout(self) -> str:
        """The end of a name: `@` and the layout, or nothing for the layout that names leave out."""
        return "" if self.layout == "planar-1" else f"@{self.layout}"

    @property
    def tokenwise(self) -> bool:
        """Whether a token's codes and metadata depend only on that token. Then a page may be filled token by token,
        see `merge_tokens`."""
        return False

    @property
    def for_biased_keys(self) -> Format:
        """The format that replaces this one for keys with large biases: itself if a channel with a large constant part does
        not affect other channels; otherwise one of about as many bits."""
        return self

    @abstractmethod
    def arrays(
        self, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each array of a page, in order; arrays of codes first, metadata after."""

    @abstractmethod
    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        """Tokens `[..., H, page_size, head_dim]` (any float dtype) -> arrays `[..., H, *shape]`."""

    @abstractmethod
    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        """Arrays -> tokens `[..., H, page_size, head_dim]`, float32 (or the stored dtype where nothing was rounded)."""

    def validate(self, head_dim: int, page_size: int) -> None:
        """Raise `ValueError` if this format cannot store pages of this geometry."""
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={head_dim} is not supported by format {self.name!r}; allowed: {HEAD_DIMS}")

    def with_layout(self, layout: str) -> Format:
        """This format in the given layout, or unchanged if it does not offer that layout."""
        if layout == self.layout or layout not in self.layouts:
            return self
        return replace(self, layout=layout)  # type: ignore[type-var]  # every format is a dataclass

    def relaid(self, arrays: dict[str, torch.Tensor], head_dim: int, target: Format) -> dict[str, torch.Tensor]:
        """The arrays of pages in the layout of `target`, which is this format with another layout. They decode to the same
        numbers. A format with several layouts has `_pack` and `_unpack` for its array `codes`, or overrides this method."""
        return {**arrays, "codes": target._pack(self._unpack(arrays["codes"], head_dim))}  # type: ignore[attr-defined]

    def merge_tokens(
        self, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], at: int, count: int, head_dim: int
    ) -> None:
        """Copy the tokens `at` to `at + count` of the arrays `new` into `old`. Only for formats that are `tokenwise`."""
        packed = self.layout != self.layouts[0]
        for name, array in old.items():
            if packed and name == "codes":  # a word or a matrix holds several tokens; `_pack` as for `relaid`
                codes = self._unpack(array, head_dim).clone()  # type: ignore[attr-defined]
                codes[..., at : at + count, :] = self._unpack(new[name], head_dim)[..., at : at + count, :]  # type: ignore[attr-defined]
                array.copy_(self._pack(codes))  # type: ignore[attr-defined]
            else:
                array[..., at : at + count, :] = new[name][..., at : at + count, :]

    # The methods below are the same for every format.

    def fields(self, head_dim: int, page_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """The arrays with their byte offsets inside the page."""
        return _fields(self, head_dim, page_size, dtype)

    def page_bytes(self, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of one KV head."""
        return _page_bytes(self, head_dim, page_size, dtype)

    def code_bytes(self, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page that hold codes (the rest is metadata: scales, zero points, maps)."""
        return sum(field.nbytes for field in self.fields(head_dim, page_size, dtype) if field.name in self.code_arrays)

    def bits_per_value(self, head_dim: int, page_size: int = 128, dtype: torch.dtype = torch.float16) -> float:
        """Bits stored per number, metadata included."""
        return self.page_bytes(head_dim, page_size, dtype) * 8 / (page_size * head_dim)

    def split(self, pages: torch.Tensor, head_dim: int, page_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Bytes `[..., page_bytes]` (uint8, last axis contiguous) -> typed views `[..., *shape]`; writing to a view
        writes to the page."""
        return views(pages, _fields(self, head_dim, page_size, dtype))

    def encode(self, x: torch.Tensor, dtype: torch.dtype | None = None, parameters: Tensors = ()) -> torch.Tensor:
        """Tokens `[..., H, page_size, head_dim]` -> bytes `[..., H, page_bytes]` (uint8). dtype: the model's. Without
        parameters, the axis `H` may be missing."""
        dtype = x.dtype if dtype is None else dtype
        page_size, head_dim = x.shape[-2:]
        pages = x.new_zeros((*x.shape[:-2], self.page_bytes(head_dim, page_size, dtype)), dtype=torch.uint8)
        arrays = self.split(pages, head_dim, page_size, dtype)
        encoded = self.encode_arrays(x, parameters)
        # a page with an array of zeros would decode to a wrong text without an error
        if encoded.keys() != arrays.keys():
            raise ValueError(
                f"format {self.name!r}: encode_arrays returned {', '.join(encoded)}; arrays lists {', '.join(arrays)}"
            )
        for name, array in arrays.items():
            if encoded[name].shape != array.shape:
                raise ValueError(
                    f"format {self.name!r}: encode_arrays returned {name!r} with the shape {tuple(encoded[name].shape)}; "
                    f"it must be {tuple(array.shape)}"
                )
            array.copy_(encoded[name])
        return pages

    def decode(
        self, pages: torch.Tensor, head_dim: int, page_size: int, dtype: torch.dtype, parameters: Tensors = ()
    ) -> torch.Tensor:
        """Bytes `[..., H, page_bytes]` -> tokens `[..., H, page_size, head_dim]` in float32. `dtype` is the model's."""
        return self.decode_arrays(self.split(pages, head_dim, page_size, dtype), head_dim, parameters).float()

    def in_layout_of(
        self, target: Format, pages: torch.Tensor, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Bytes `[..., page_bytes]` of this format -> bytes of `target`, this format with another layout (`relaid`)."""
        out = pages.new_zeros((*pages.shape[:-1], target.page_bytes(head_dim, page_size, dtype)))
        written = target.split(out, head_dim, page_size, dtype)
        read = self.split(pages.contiguous(), head_dim, page_size, dtype)
        for name, array in self.relaid(read, head_dim, target).items():
            written[name].copy_(array)
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __str__(self) -> str:
        return self.name


@functools.cache  # every layer asks in every step on a CPU
def _fields(fmt: Format, head_dim: int, page_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
    return contiguous_fields(fmt.arrays(head_dim, page_size, dtype))


@functools.cache
def _page_bytes(fmt: Format, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    return size(_fields(fmt, head_dim, page_size, dtype))
