"""Which kernel of `attend.cu` a step gets, and compiling it before it is needed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...storage.layer_spec import LayerSpec
from ...storage.transforms import Fused
from .geometry import Choice, attend_defines, can_store, choose
from .nvrtc import Module, ahead, load


class AttendKernel(NamedTuple):
    """Everything that a compilation of `attend.cu` depends on."""

    spec: LayerSpec
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    rows: int
    """query rows of a KV head, 16 at most"""
    heads: int
    """KV heads of all sequences"""
    mask: bool
    sinks: int
    """0 none, 1 in the model's dtype, 2 in float32"""
    softcap: bool
    lacking: bool
    """whether something is added to all scores of a query (`Chunk.lacking`)"""
    transform: Fused | None
    ordered: bool
    store: bool
    """whether the chunk, one token, shall be stored as well"""
    per_head: bool
    restores: bool
    """whether outputs are rotated back (`Transform.own_inverse`)"""
    device: torch.device


@functools.cache
def properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


@functools.cache
def _layout(kernel: AttendKernel) -> tuple[Choice, bool, tuple[tuple[str, str], ...]]:
    """The kernel's layout, whether it stores the chunk (if that is requested and possible), and its macros."""
    spec, head_dim_k, head_dim_v, dtype, rows, heads, mask, sinks, softcap = kernel[:9]
    device = properties(kernel.device)
    limits = device.multi_processor_count, device.shared_memory_per_multiprocessor
    choice = choose(spec, head_dim_k, head_dim_v, dtype, rows, heads, *limits, kernel.per_head)
    fused = kernel.store and can_store(spec, head_dim_k, head_dim_v, choice)
    options = {"transform": kernel.transform, "ordered": kernel.ordered, "fused": fused, "per_head": kernel.per_head}
    options |= {"restores": kernel.restores, "lacking": kernel.lacking}
    return choice, fused, attend_defines(spec, head_dim_k, head_dim_v, dtype, choice, mask, sinks, softcap, **options)


@functools.cache
def attend_module(kernel: AttendKernel) -> tuple[Module, Choice, int, bool]:
    """The kernel, its layout, its shared memory in bytes, and whether it stores the chunk."""
    choice, fused, defines = _layout(kernel)
    module, planned = load("attend.cu", defines, kernel.device), dict(defines)
    for name in ("shared_bytes", "argument_bytes"):
        if (compiled := module.integer(name)) != int(planned[name.upper()]):
            raise RuntimeError(
                f"attend.cu was compiled with {name}={compiled}, and {planned[name.upper()]} is what Python counts"
            )
    return module, choice, int(planned["SHARED_BYTES"]), fused


def attend_macros(kernel: AttendKernel) -> tuple[tuple[str, str], ...]:
    """The macros that `attend.cu` is compiled with."""
    return _layout(kernel)[2]


@functools.cache
def expect(name: str, macros: tuple[tuple[str, str], ...], device: torch.device) -> None:
    """Compile the file `name` in a thread, once. Its first user waits for that thread."""
    ahead(name, macros, device)


def forget() -> None:
    """Forget which kernels were chosen and loaded."""
    for kept in (_layout, attend_module, expect):
        kept.cache_clear()
