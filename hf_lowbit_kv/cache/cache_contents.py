"""The contents of a whole cache: taken out of it, and put into another cache for the same model, of another capacity or
backend.

Saved caches and the prefix store use this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..storage.content_digests import digest
from ..storage.layer_contents import LayerContents, joined, put_tokens, take_tokens
from .filled_by import FilledBy, snapshot_of
from .low_bit_layer import LowBitLayer
from .model_positions import Values, joined_positions
from .native_layer_contents import NativeContents, contents_of, put_contents


class CacheContents(NamedTuple):
    """The contents of a cache. Tensors are on its device."""

    layers: dict[int, LayerContents]
    """packed layers, by index; all of them or, of an empty cache, none"""
    native_layers: dict[int, NativeContents]
    """native layers"""
    text: torch.Tensor | None = None
    """ids `[B, n]` where the cache knows them"""
    positions: Values | None = None
    """positions that the model keeps outside of its cache"""
    read: tuple[int, bool] | None = None
    """read length of the first tokens, and whether later ones disagree, see `length_rope.ReadLengths`"""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that have memory on the device."""
        native = [x for layer in self.native_layers.values() for x in layer.tensors.values()]
        return native + [x for layer in self.layers.values() for x in layer.tensors()]


def restorable(contents: CacheContents, match: int) -> int:
    """How many tokens of a text can be restored from the one row of these contents, if both texts have the first `match`
    tokens in common. If the match ends with the contents, or inside the window: all of them. Otherwise whole pages
    (`whole_pages`)."""
    layers = contents.layers.values()
    in_window = match > max(layer.spec.sink + layer.paged[0] for layer in layers) and not contents.native_layers
    ends = match == next(iter(layers)).lengths[0]
    return match if ends or in_window else whole_pages(contents, match)


def whole_pages(contents: CacheContents, match: int) -> int:
    """How many tokens of a match with a kept prompt can be restored from pages only. They end with a page, at least `residual`
    tokens before the end of the match. 0 if the layers' pages do not end at the same tokens, or with native layers, which
    have only the state at the end."""
    specs = [layer.spec for layer in contents.layers.values()]
    count = 0 if contents.native_layers else pages_of(contents, match - max(spec.residual for spec in specs))
    return specs[0].sink + count * specs[0].page_size if count else 0


def pages_of(contents: CacheContents, tokens: int) -> int:
    """The number of full pages of the first `tokens` tokens, of the one row of these contents. 0 if the layers' pages do not
    end at the same tokens."""
    layers = contents.layers.values()
    (sink, size), *others = {(layer.spec.sink, layer.spec.page_size) for layer in layers}
    return 0 if others else max(min(tokens - sink, *(layer.paged[0] for layer in layers)), 0) // size


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
def take(cache: Any, shared: bool = False, row: int | None = None) -> CacheContents:
    """Copy the contents of a cache. Waits for the device.

    Args:
        shared: do not copy pages, see `take_tokens`.
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
            seen, tensors = contents_of(layer)
            native_layers[index] = NativeContents(seen, {name: x[rows].clone() for name, x in tensors.items()})
        elif (store := layer.store) is not None and layer.length.read_count():
            tokens = take_tokens(store, None if row is None else [row])
            packed[index] = (tokens if shared else tokens.copied())._replace(
                seen=layer.length.read_count(),
                in_tail=layer._in_tail,
                mode=cache.facts.mode or "packed",
                padding=[(int(start), mask) for start, mask in layer._padding._noted] if row is None else [],
            )
    return CacheContents(packed, native_layers, **cache.facts.contents(cache, row))


def joined_rows(parts: Sequence[CacheContents], tokens: int | None = None) -> CacheContents:
    """Contents with the one row of each of these, or its first `tokens` tokens, see `LayerContents.first`."""
    layers = {
        i: joined([part.layers[i] if tokens is None else part.layers[i].first(tokens) for part in parts])
        for i in parts[0].layers
    }
    native_layers = {
        i: NativeContents(
            of_first.seen,
            {name: torch.cat([x.native_layers[i].tensors[name] for x in parts]) for name in of_first.tensors},
        )
        for i, of_first in parts[0].native_layers.items()
    }
    return CacheContents(layers, native_layers, None, joined_positions([part.positions for part in parts]))


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
