"""How a layer stores tokens: formats, transforms, window, attention kind, and the parameters that these need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..formats import Format, parse_format
from ..formats.records import Parameter, Parametrized
from .attention_kinds import ATTENTION_KINDS, AttentionKind, parse_attention_kind
from .transforms import NONE, Transform, parse_transform

if TYPE_CHECKING:
    from .paged_store import LayerState


def check_count(name: str, value: Any, least: int = 1, optional: bool = False, unit: str = "tokens") -> None:
    """Raise `ValueError` unless `value` is an integer of at least `least`, or `None` if that is allowed.

    Args:
        unit: what is counted, for the message.
    """
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = f"an integer of {least} or more ({unit})" + (", or None" if optional else "")
        raise ValueError(f"{name}={value!r} is not allowed; it must be {allowed}")


#: the parts of a layer that may have parameters, in the order of their records
ROLES = ("key_transform", "value_transform", "key_format", "value_format")
PAGE_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True)
class LayerSpec:
    """How one layer stores tokens, apart from its sizes in batch, heads and channels. Hashable; `key` is its text form.

    Args:
        key_format, value_format: page formats.
        sink: first tokens of a row that stay in the model's dtype.
        residual: at least this many of a row's newest tokens stay in the model's dtype.
        page_size: tokens of a page.
        key_transform, value_transform: maps of keys and values. Everything that the layer stores, sink and tail too, is
            mapped.
        attention_kind: what the two streams mean to attention. If it is not `separate`, "key" and "value" in the names of this
            file mean the first and the second stream.

    Example:
        >>> spec = lb.get_preset("kivi-2").spec()
        >>> str(spec.key_format), spec.residual
        ('int2-channel', 128)
        >>> round(spec.bits_per_value(32768, 128), 3)  # tokens, head_dim
        2.304
    """

    key_format: Format
    value_format: Format
    sink: int = 0
    residual: int = 128
    page_size: int = 128
    key_transform: Transform = NONE
    value_transform: Transform = NONE
    attention_kind: AttentionKind = ATTENTION_KINDS["separate"]

    def __post_init__(self):
        for name in ("sink", "residual"):
            check_count(name, getattr(self, name), least=0)
        for name, parse in (
            ("key_format", parse_format),
            ("value_format", parse_format),
            ("key_transform", parse_transform),
            ("value_transform", parse_transform),
        ):
            _check_registered(name, getattr(self, name), parse)
        for role in ("key_transform", "value_transform"):
            if not (getattr(self, role).identity or self.attention_kind.transforms):
                raise ValueError(
                    f"{role}={getattr(self, role).name!r} is not allowed where a layer caches a latent (MLA)"
                )
        if self.value_transform.centered:
            raise ValueError(
                f"value_transform={self.value_transform.name!r} is not allowed: it takes off a center, which drops out of "
                "the softmax for keys only"
            )
        if not isinstance(self.page_size, int) or self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size!r} is not offered; allowed: {PAGE_SIZES}")

    @functools.cached_property
    def key(self) -> str:
        """Text form, for operations that take only tensors, numbers and strings."""
        return "|".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))

    @staticmethod
    @functools.cache
    def parse(key: str) -> LayerSpec:
        """The spec with that `key`; transforms and attention kind may be left out. Raises `ValueError` for other texts."""
        keys, values, sink, residual, page_size, *rest = key.split("|")
        of_keys, of_values, attention_kind = (*rest, *("none", "none", "separate")[len(rest) :])
        formats = parse_format(keys), parse_format(values)
        sizes = int(sink), int(residual), int(page_size)
        return LayerSpec(
            *formats, *sizes, parse_transform(of_keys), parse_transform(of_values), parse_attention_kind(attention_kind)
        )

    @property
    def formats(self) -> tuple[Format, Format]:
        return self.key_format, self.value_format

    def with_layouts(self, first: str, second: str) -> LayerSpec:
        """The same spec, with pages of the two streams in these layouts, if their formats offer them."""
        formats = self.key_format.with_layout(first), self.value_format.with_layout(second)
        return dataclasses.replace(self, key_format=formats[0], value_format=formats[1])

    @functools.cached_property
    def untransformed(self) -> bool:
        """Whether tokens are stored as the model made them."""
        return self.key_transform.identity and self.value_transform.identity

    @functools.cached_property
    def direct(self) -> bool:
        """Whether tokens go straight into a partial page: no residual, and both formats encode token by token."""
        return self.residual == 0 and self.key_format.tokenwise and self.value_format.tokenwise

    @functools.cached_property
    def paging(self) -> tuple[int, int, int, bool]:
        """Layers with the same paging have the same tokens in pages at any length, so they share page numbers."""
        return self.sink, self.residual, self.page_size, self.direct

    @functools.cached_property
    def tail_size(self) -> int:
        """Slots of the tail ring. When this many unpacked tokens have gathered, the oldest page is packed."""
        return 0 if self.direct else self.residual + self.page_size

    def paged_after(self, tokens: int) -> int:
        """How many of `tokens` tokens (sink not counted) are in pages after they have been stored."""
        if self.direct:
            return max(tokens, 0)
        return max(tokens - self.residual, 0) // self.page_size * self.page_size

    def pages_for(self, length: int) -> int:
        """Pages that a row of `length` tokens (sink counted) needs."""
        return -(-self.paged_after(length - self.sink) // self.page_size)

    def room_for(self, capacity: int) -> int:
        """How many tokens a row can hold if pages for `capacity` tokens were allocated."""
        return self.room(max(self.pages_for(capacity), 1))

    def room(self, pages: int) -> int:
        """How many tokens a row with `pages` pages can hold."""
        return self.sink + pages * self.page_size + (0 if self.direct else self.residual + self.page_size - 1)

    def validate(self, head_dim_k: int, head_dim_v: int) -> None:
        """Raise `ValueError` if a format or a transform cannot take streams of these widths."""
        self.attention_kind.validate(self.formats, (head_dim_k, head_dim_v), self.page_size)
        self.key_transform.validate(head_dim_k)
        self.value_transform.validate(head_dim_v)

    # ---- parameters -----------------------------------------------------------------------------------------------

    def roles(self, head_dim_k: int, head_dim_v: int) -> tuple[tuple[str, Parametrized, int], ...]:
        """`(role, part, head_dim)` of each part that may have parameters, in record order."""
        return (
            ("key_transform", self.key_transform, head_dim_k),
            ("value_transform", self.value_transform, head_dim_v),
            ("key_format", self.key_format, head_dim_k),
            ("value_format", self.value_format, head_dim_v),
        )

    def parameters(self, head_dim_k: int, head_dim_v: int, num_kv_heads: int) -> tuple[Parameter, ...]:
        """The tensors that calibration supplies, by full name: `key_format.codebook`, `key_transform.factors`, ..."""
        return tuple(
            parameter._replace(name=f"{role}.{parameter.name}")
            for role, part, head_dim in self.roles(head_dim_k, head_dim_v)
            for parameter in part.parameters(head_dim, num_kv_heads)
        )

    def records(
        self,
        tensors: Mapping[str, torch.Tensor],
        head_dims: tuple[int, int],
        num_kv_heads: int,
        local: slice,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """The records of a layer (`LayerState.parameters`) from tensors by full name. Arguments: see
        `Parametrized.record`.

        Raises:
            ValueError: a tensor is missing, is not needed, or has another shape or dtype.
        """
        self.check_parameters(tensors, head_dims, num_kv_heads)
        records = []
        for role, part, head_dim in self.roles(*head_dims):
            of_role = _of_role(tensors, role)
            if (record := part.record(of_role, head_dim, num_kv_heads, local, device)) is not None:
                records.append(record)
        return records

    def check_parameters(
        self, tensors: Mapping[str, torch.Tensor], head_dims: tuple[int, int], num_kv_heads: int
    ) -> None:
        """Raise `ValueError` if a tensor is missing, is not needed, or has another shape or dtype."""
        known = [parameter.name for parameter in self.parameters(*head_dims, num_kv_heads)]
        if unknown := [name for name in tensors if name not in known]:
            allowed = ", ".join(map(repr, known)) or "none"
            raise ValueError(f"parameters have {unknown[0]!r}, which the layer does not take; allowed: {allowed}")
        for role, part, head_dim in self.roles(*head_dims):
            part.check(_of_role(tensors, role), head_dim, num_kv_heads, f"parameters: {role}.")

    def tensors(self, state: LayerState) -> dict[str, tuple[torch.Tensor, ...]]:
        """By role, the tensors that it holds, `[H or 1, ...]` each: what encoding, decoding and transforms get."""
        by_role: dict[str, tuple[torch.Tensor, ...]] = dict.fromkeys(ROLES, ())
        for role, record in self.by_role(state).items():
            part, head_dim = getattr(self, role), state.head_dims[role.startswith("value")]
            by_role[role] = part.tensors(record, head_dim)
        return by_role

    def by_role(self, state: LayerState) -> dict[str, torch.Tensor]:
        """The layer's records, uint8 `[H or 1, bytes]`, for the roles that have one."""
        if not state.parameters:
            return {}
        having = [role for role, part, head_dim in self.roles(*state.head_dims) if part.record_parameters(head_dim, 1)]
        return dict(zip(having, state.parameters, strict=True))

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def part_bytes(self, head_dim_k: int, head_dim_v: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the key part and of the value part of one page of one KV head."""
        return (
            self.key_format.page_bytes(head_dim_k, self.page_size, dtype),
            self.value_format.page_bytes(head_dim_v, self.page_size, dtype),
        )

    def bits_per_value(self, tokens: int, head_dim: int, dtype: torch.dtype = torch.float16) -> float:
        """Bits per number at a length of `tokens`, everything counted: codes, metadata, sink and tail. head_dim: of
        keys and values; a latent is counted with the widths of DeepSeek-V3 (`AttentionKind.shown_widths`)."""
        paged = self.paged_after(tokens - self.sink)
        pages = -(-paged // self.page_size)
        widths = self.attention_kind.shown_widths(head_dim)
        dense = (tokens - paged) * sum(widths) * dtype.itemsize
        return 8 * (pages * sum(self.part_bytes(*widths, dtype)) + dense) / (tokens * sum(widths))


def _of_role(tensors: Mapping[str, torch.Tensor], role: str) -> dict[str, torch.Tensor]:
    return {name.split(".", 1)[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{role}.")}


def _check_registered(argument: str, part: Format | Transform, parse: Callable[[Any], Any]) -> None:
    """Raise if a name means another format or transform, or none, because operations get formats and
    transforms by name."""
    try:
        registered = parse(part.name)
    except ValueError:
        registered = None
    if type(registered) is not type(part) or registered != part:
        raise ValueError(
            f"{argument}={part!r} is not registered under its name {part.name!r}: call lb.register_format with its class, or "
            "add a transform to hf_lowbit_kv.storage.transforms.TRANSFORMS"
        )
