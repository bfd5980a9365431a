"""The contents of a whole cache: taken out of it, and put into another cache for the same model, of another capacity or
backend.

Saved caches and the prefix store use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..storage.content_digests import digest
from ..storage.layer_contents import LayerContents, put_tokens, take_tokens
from ..storage.layer_spec import LayerSpec
from .filled_by import FilledBy, snapshot_of
from .low_bit_layer import LowBitLayer
from .model_positions import Values
from .native_layer_contents import NativeContents, contents_of, put_contents


class CacheContents(NamedTuple):
    """The contents of a cache. Tensors are on its device."""

    layers: dict[int, LayerContents]
    """packed layers, by index; all of them or, of an empty cache, none"""
    native_layers: dict[int, NativeContents]
    """native layers"""
    text: torch.Tensor | None
    """ids `[B, n]` where the cache knows them"""
    positions: Values | None = None
    """positions that the model keeps outside of its cache"""
    read: tuple[int, bool] | None = None
    """read length of the first tokens, and whether later ones disagree, see `length_rope.ReadLengths`"""


def restorable(contents: CacheContents, match: int) -> int:
    """How many tokens of a text can be restored from the one row of these contents, if both texts have the first `match`
    tokens in common. If the match ends with the contents, or inside the window: all of them. Otherwise whole pages
    (`whole_pages`); none with native layers, which have only the state at the end."""
    layers = list(contents.layers.values())
    if match == layers[0].lengths[0]:
        return match
    if contents.native_layers:
        return 0
    paged = [(layer.spec, layer.paged[0]) for layer in layers]
    in_window = match > max(spec.sink + count for spec, count in paged)
    return match if in_window else whole_pages(paged, match)


def whole_pages(kept: Iterable[tuple[LayerSpec, int]], match: int) -> int:
    """How many tokens of a match with a kept prompt can be restored from pages only. They end with a page, at least `residual`
    tokens before the end of the match. 0 if the layers' pages do not end at the same tokens.

    Args:
        kept: for each packed layer, its spec and how many tokens of the text are in pages.
    """
    specs, paged = zip(*kept, strict=True)
    if len({(spec.sink, spec.page_size) for spec in specs}) != 1:
        return 0
    sink, size = specs[0].sink, specs[0].page_size
    count = min(match - sink - max(spec.residual for spec in specs), *paged) // size * size
    return sink + count if count > 0 else 0


def common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    """Length of the common prefix of two texts, ids `[n]` on the CPU."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one.numpy()[:count] != other.numpy()[:count])  # NumPy: see `prefix_loading._rows`
    return int(differ[0]) if len(differ) else count


def kind_of(cache: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """The identity of what each packed layer stores: its spec without the layout, and digests of its calibration."""
    return [
        (
            layer.spec.with_layouts("planar-1", "planar-1").key,
            [(name, digest(x).hex()) for name, x in sorted(layer.parameters.items())],
        )
        for layer in cache.packed_layers
    ]


@torch.inference_mode(False)
def take(cache: Any, shared: bool = False, row: int | None = None, first_page: int = 0) -> CacheContents:
    """Copy the contents of a cache. Waits for the device.

    Args:
        shared, first_page: see `take_tokens`.
        row: only this one, without padding.

    Raises:
        OverrunError: tokens are lost. RuntimeError: the last forward pass was interrupted.
    """
    cache.check_overrun()
    cache._check_whole()
    rows = slice(None) if row is None else slice(row, row + 1)
    packed, native_layers = dict[int, LayerContents](), dict[int, NativeContents]()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LowBitLayer):
            seen, tokens, states = contents_of(layer)
            copies = None if tokens is None else (tokens[0][rows].clone(), tokens[1][rows].clone())
            native_layers[index] = NativeContents(seen, copies, {name: x[rows].clone() for name, x in states.items()})
        elif (store := layer.store) is not None and layer.length.read_count():
            packed[index] = take_tokens(store, None if row is None else [row], first_page, shared)._replace(
                seen=layer.length.read_count(),
                in_tail=layer._in_tail,
                mode=cache.facts.mode or "packed",
                padding=[(int(start), mask) for start, mask in layer._padding._noted] if row is None else [],
            )
    return CacheContents(packed, native_layers, **cache.facts.contents(cache, row))


@torch.no_grad()
@torch.inference_mode(False)
def put(cache: Any, contents: CacheContents, model: Any) -> None:
    """Put these contents into an empty cache of this model that has room for them. A preallocated cache copies all tensors;
    a growing cache copies only those on another device than their layer."""
    device_of = layer_devices(model)
    for index, part in contents.layers.items():
        _prepare(cache.layers[index], part, device_of(index))
    layers = [(cache.layers[index], part) for index, part in contents.layers.items()]
    put_tokens([layer.store for layer, _ in layers], list(contents.layers.values()))
    for layer, part in layers:
        _put_facts(layer, part)
    for index, contents_of_layer in contents.native_layers.items():
        put_contents(cache.layers[index], contents_of_layer.to(device_of(index)))
    cache.guard.forget()
    cache.facts.put(contents, FilledBy(snapshot_of(model, cache.packed_sizes)), model)


def layer_devices(model: Any) -> Callable[[int], torch.device]:
    """The device of each layer's cache, by index: that of its attention. With `device_map=` layers are on several devices,
    and accelerate's hooks know where they compute."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
        device = model.device
        return lambda index: device
    places: dict[int, torch.device] = {}
    for module in model.modules():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            hooks = (getattr(inner, "_hf_hook", None) for inner in module.modules())
            candidates = [place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None]
            candidates += [
                parameter.device for parameter in module.parameters()
            ]  # offloaded ones are on "meta" between passes
            if candidates:
                places[index] = torch.device(
                    *("cuda", candidates[0]) if isinstance(candidates[0], int) else (candidates[0],)
                )
    return lambda index: places.get(index, model.device)


def _prepare(layer: LowBitLayer, contents: LayerContents, device: torch.device) -> None:
    """Make an empty packed layer ready for these contents."""
    rows, widths = len(contents.paged), contents.widths
    states = (torch.empty(rows, contents.heads, 0, width, dtype=contents.dtype, device=device) for width in widths)
    if layer.is_initialized and layer._misfits({"batch size": rows, "dtype": contents.dtype, "device": device}):
        layer.is_initialized = False
    if not layer.is_initialized:
        layer.lazy_initialization(*states)


def _put_facts(layer: LowBitLayer, contents: LayerContents) -> None:
    """Let a layer know what its store has got."""
    layer._forget()
    layer.length.set(contents.seen)
    layer._in_tail = contents.in_tail
    for start, mask in contents.padding:
        layer._padding.note(start, mask.to(layer.device))
