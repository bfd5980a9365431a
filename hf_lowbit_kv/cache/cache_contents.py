"""Takes contents out of a cache, and puts them into another cache for the same model, of another capacity or backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..storage.content_digests import digest
from .contents import Contents, PackedLayer, put_rows, take_rows
from .filled_by import FilledBy, snapshot_of
from .low_bit_layer import LowBitLayer
from .native_layer_contents import contents_of, put_contents


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
def take(cache: Any, shared: bool = False, row: int | None = None) -> Contents:
    """Copy the contents of a cache. Waits for the device.

    Args:
        shared: do not copy pages, see `take_rows`.
        row: only this one, without padding.

    Raises:
        OverrunError: tokens are lost. RuntimeError: the last forward pass was interrupted.
    """
    cache.check_overrun()
    cache._check_whole()
    rows = slice(None) if row is None else slice(row, row + 1)
    native_layers = {
        index: {name: x[rows].clone() for name, x in contents_of(layer)[1].items()}
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, LowBitLayer)
    }
    packed = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, LowBitLayer)}
    seen = max(layer.length.read_count() for layer in packed.values())
    contents = Contents()
    if seen:
        stores = {index: layer.store for index, layer in packed.items() if layer.store is not None}
        contents = take_rows(stores, None if row is None else [row])
        contents = contents if shared else contents.copied()
        for layer in packed.values():
            contents.groups[layer.spec.paging] = contents.groups[layer.spec.paging]._replace(in_tail=layer._in_tail)
    noted = next(iter(packed.values()))._padding._noted if row is None else []
    padding = [(int(start), mask) for start, mask in noted]
    facts = cache.facts.contents(cache, row)
    return replace(contents, native_layers=native_layers, seen=seen, padding=padding, **facts)


@torch.no_grad()
@torch.inference_mode(False)
def put(cache: Any, contents: Contents, model: Any) -> None:
    """Put these contents into an empty cache of this model that has room for them. A preallocated cache copies all tensors;
    a growing cache copies only those on another device than their layer."""
    device_of = layer_devices(model)
    packed = {index: cache.layers[index] for index in contents.layers}
    for index, tensors in contents.layers.items():
        _prepare(packed[index], len(contents.lengths), tensors, device_of(index))
    cache.guard.changing = True  # until all layers have the tokens
    put_rows({index: layer.store for index, layer in packed.items()}, contents)
    for layer in packed.values():
        layer._forget()
        layer.length.set(contents.seen)
        layer._in_tail = contents.groups[layer.spec.paging].in_tail
        for start, mask in contents.padding:
            layer._padding.note(start, mask.to(layer.device))
    for index, native in contents.native_layers.items():
        moved = {name: tensor.to(device_of(index)) for name, tensor in native.items()}
        put_contents(cache.layers[index], contents.seen, moved)
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


def _prepare(layer: LowBitLayer, rows: int, tensors: PackedLayer, device: torch.device) -> None:
    """Make an empty packed layer ready for these rows."""
    sizes, dtype = (rows, tensors.heads, 0), tensors.dtype
    states = (torch.empty(*sizes, width, dtype=dtype, device=device) for width in tensors.widths)
    if not layer.check(None, {"batch size": rows, "dtype": dtype, "device": device}):
        layer.lazy_initialization(*states)
