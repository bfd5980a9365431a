"""The rows of `summary()`, as text and as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..storage.layer_spec import LayerSpec
from .cache_bytes import CacheBytes, bits_in_16_bits
from .implementation import describe

if TYPE_CHECKING:
    from .low_bit_cache import LowBitCache


def rows(cache: LowBitCache) -> dict[str, str]:
    """Label to text. Reads lengths from the device."""
    from rich.filesize import decimal

    nbytes, layers, spec = cache.nbytes, cache.packed_layers, cache.spec
    ready = [layer for layer in layers if layer.store is not None]
    uncompiled = f", steps not compiled: {reason}" if (reason := layers[0].why_not_compiled) else ""
    tokens = int(cache.get_seq_length(cache.layers.index(layers[0])))
    shown = {
        " / ".join(spec.attention_kind.streams): f"{spec.key_format} / {spec.value_format}",
        "key transform": str(spec.key_transform),
        "value transform": str(spec.value_transform),
    }
    if remark := cache.calibration_remark:
        shown["calibration"] = remark
    shown |= {
        "window": f"sink {spec.sink}, residual {spec.residual}, page {spec.page_size} tokens",
        "layers": f"{len(layers)} packed, {len(cache.layers) - len(layers)} of transformers'",
        **_other_layers(cache),
        "capacity": f"{layers[0].length.capacity} tokens, preallocated{uncompiled}"
        if layers[0].length.fixed
        else "growing",
        "backend": ", ".join(sorted({layer.backend_shown for layer in ready})) or "chosen at the first call",
        "attention": describe(cache.config),
    }
    if cache.decoding_steps:
        shown["decoding steps"] = cache.decoding_steps
    of_most = [layer.store for layer in ready if layer.store is not None and _choice(layer.spec) == _choice(spec)]
    return shown | {
        "length": f"{tokens} tokens" + (f" x {ready[0].batch_size} rows" if ready else ""),
        "bits per value": _bits(cache) if tokens else NOTHING,
        "a packed token": f"{of_most[0].token_bytes:g} bytes per layer" if of_most else "known after the first call",
        **{f"bytes: {kind}": decimal(count) for kind, count in nbytes.parts.items()},
        "total": f"{decimal(nbytes)} ({_compared(cache, nbytes)})" if tokens else f"{decimal(nbytes)}, {NOTHING}",
    }


#: in place of figures of an empty cache
NOTHING = "nothing is stored yet"


def _other_layers(cache: LowBitCache) -> dict[str, str]:
    """The packed layers that store other things than most of them do, and these things."""
    by_spec: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        if layer in cache.packed_layers and (spec := _choice(layer.spec)) != _choice(cache.spec):
            by_spec.setdefault(spec, []).append(index)
    return {_numbers(indices): _differences(spec, cache.spec) for spec, indices in by_spec.items()}


def _choice(spec: LayerSpec) -> LayerSpec:
    """The spec without the layout of pages, which backends choose when tokens come."""
    return spec.with_layouts("planar-1", "planar-1")


def _numbers(indices: Sequence[int]) -> str:
    """`"layers 0-1, 7"` for 0, 1, 7."""
    first = [index for index in indices if index - 1 not in indices]
    last = [index for index in indices if index + 1 not in indices]
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in zip(first, last, strict=True)]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(parts)}"


def _differences(spec: LayerSpec, of_most: LayerSpec) -> str:
    """The formats of a spec, and everything else in which it differs from that of most layers."""
    names = {
        "sink": "sink",
        "residual": "residual",
        "page_size": "page",
        "key_transform": "key transform",
        "value_transform": "value transform",
        "attention_kind": "read as",
    }
    others = [
        f"{name} {getattr(spec, field)}"
        for field, name in names.items()
        if getattr(spec, field) != getattr(of_most, field)
    ]
    return ", ".join([f"{spec.key_format} / {spec.value_format}", *others])


def _bits(cache: LowBitCache) -> str:
    """Bits per value. In a float32 model the window takes twice the bits, so the bits of a 16-bit model are shown too."""
    bits = f"{cache.bits_per_value:.2f}"
    if _dtype(cache).itemsize == 2:
        return bits
    return f"{bits} with the window in {dtype_name(_dtype(cache))}; {bits_in_16_bits(cache):.2f} in a 16-bit model"


def _compared(cache: LowBitCache, nbytes: CacheBytes) -> str:
    """Size of the same tokens in the model's dtype, and the reason if that is smaller."""
    from rich.filesize import decimal

    full = cache.nbytes_full + nbytes.transformers
    text = f"the same tokens in {dtype_name(_dtype(cache))}: {decimal(full)}"
    if nbytes <= full:
        return text
    if nbytes - nbytes.unused > full:
        return f"{text}; less, because so few tokens do not outweigh calibrated parameters and scales"
    layer = cache.packed_layers[0]
    whole = f"all {layer.length.capacity} tokens are" if layer.length.fixed else "the window and the first pages are"
    return f"{text}; less, because memory for {whole} allocated at once"


def _dtype(cache: LowBitCache) -> torch.dtype:
    return next(layer.store.dtype for layer in cache.packed_layers if layer.store is not None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _title(cache: LowBitCache) -> str:
    return f"{type(cache).__name__} {cache.preset or ''}".strip()


class Summary(str):
    """The text of `summary()`. Notebooks show the table in HTML."""

    __slots__ = ("_html",)
    _html: str

    def _repr_html_(self) -> str:
        return self._html


def of(cache: LowBitCache) -> Summary:
    """The table of a cache."""
    return table(_title(cache), rows(cache))


def table(title: str, rows: dict[str, str]) -> Summary:
    """A table of labels and texts."""
    summary = Summary(_as_text(title, rows))
    summary._html = _as_html(title, rows)
    return summary


def as_html(cache: LowBitCache) -> str:
    return of(cache)._html


def _as_text(title: str, rows: dict[str, str]) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=False)
    for row in rows.items():
        table.add_row(*map(escape, row))
    out = io.StringIO()
    Console(file=out, width=100, force_jupyter=False, color_system=None).print(table)
    return out.getvalue()


def _as_html(title: str, rows: dict[str, str]) -> str:
    lines = "".join(
        f"<tr><th style='text-align: left'>{html.escape(label)}</th><td style='text-align: left'>{html.escape(text)}</td></tr>"
        for label, text in rows.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"
