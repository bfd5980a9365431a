"""The rows of `summary()`, as text and as HTML."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING

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
    in_16_bits = decimal(cache.nbytes_full + nbytes.transformers)
    shown = {
        " / ".join(spec.reading.streams): f"{spec.key_format} / {spec.value_format}",
        "key transform": str(spec.key_transform),
        "value transform": str(spec.value_transform),
    }
    if remark := cache.calibration_remark:
        shown["calibration"] = remark
    shown |= {
        "window": f"sink {spec.sink}, residual {spec.residual}, page {spec.page_size} tokens",
        "layers": f"{len(layers)} packed, {len(cache.layers) - len(layers)} of transformers'",
        "capacity": f"{layers[0].length.capacity} tokens, preallocated{uncompiled}"
        if layers[0].length.fixed
        else "growing",
        "backend": ", ".join(sorted({layer.backend_shown for layer in ready})) or "chosen at the first call",
        "attention": describe(cache.config),
    }
    if cache.decoding_steps:
        shown["decoding steps"] = cache.decoding_steps
    return shown | {
        "length": f"{tokens} tokens" + (f" x {ready[0].batch_size} rows" if ready else ""),
        "bits per value": f"{cache.bits_per_value:.2f}",
        "a packed token": ", ".join(f"{layer.store.token_bytes:g} bytes a layer" for layer in ready[:1] if layer.store)
        or "known after the first call",
        **{f"bytes: {kind}": decimal(count) for kind, count in nbytes.parts.items()},
        "total": f"{decimal(nbytes)} (in the model's dtype: {in_16_bits})",
    }


def _title(cache: LowBitCache) -> str:
    return f"{type(cache).__name__} {cache.preset or ''}".strip()


def as_text(cache: LowBitCache) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(_title(cache)), show_header=False)
    for row in rows(cache).items():
        table.add_row(*map(escape, row))
    out = io.StringIO()
    Console(file=out, width=100, force_jupyter=False, color_system=None).print(table)
    return out.getvalue()


def as_html(cache: LowBitCache) -> str:
    lines = "".join(
        f"<tr><th style='text-align: left'>{html.escape(label)}</th><td style='text-align: left'>{html.escape(text)}</td></tr>"
        for label, text in rows(cache).items()
    )
    return f"<table><caption>{html.escape(_title(cache))}</caption>{lines}</table>"
