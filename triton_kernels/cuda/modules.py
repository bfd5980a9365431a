"""The variant of `attend.cu` for a step, its module, and compilation ahead of use."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...storage.layer_spec import LayerSpec
from ...storage.transforms import Fused
from .geometry import KernelShape, Sinks, attend_defines, can_append, choose_shape
from .nvrtc import Module, compile_ahead, load


class AttendVariant(NamedTuple):
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
    sinks: Sinks
    softcap: bool
    score_bias: bool
    """whether a number per query is added to all of its scores (`StepInputs.score_bias`)"""
    transform: Fused | None
    ordered: bool
    append: bool
    """whether the kernel should also store the new token"""
    per_head: bool
    restores: bool
    """whether outputs are rotated back (`Transform.own_inverse`)"""
    device: torch.device


@functools.cache
def properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


@functools.cache
def _plan(variant: AttendVariant) -> tuple[KernelShape, bool, tuple[tuple[str, str], ...]]:
    """The variant's shape, whether it stores the new token (if requested and possible), and its macros."""
    spec, head_dim_k, head_dim_v, dtype, rows, heads, mask, sinks, softcap = variant[:9]
    device = properties(variant.device)
    limits = device.multi_processor_count, device.shared_memory_per_multiprocessor
    shape = choose_shape(spec, head_dim_k, head_dim_v, dtype, rows, heads, *limits, variant.per_head)
    appends = variant.append and can_append(spec, head_dim_k, head_dim_v, shape)
    options = {"transform": variant.transform, "ordered": variant.ordered, "appends": appends}
    options |= {"per_head": variant.per_head, "restores": variant.restores, "score_bias": variant.score_bias}
    return shape, appends, attend_defines(spec, head_dim_k, head_dim_v, dtype, shape, mask, sinks, softcap, **options)


@functools.cache
def attend_module(variant: AttendVariant) -> tuple[Module, KernelShape, int, bool]:
    """The compiled module, its shape, its shared memory in bytes, and whether it stores the new token."""
    shape, appends, defines = _plan(variant)
    module, planned = load("attend.cu", defines, variant.device), dict(defines)
    for name in ("shared_bytes", "argument_bytes"):
        if (compiled := module.integer(name)) != int(planned[name.upper()]):
            raise RuntimeError(
                f"attend.cu was compiled with {name}={compiled}, and {planned[name.upper()]} is what Python counts"
            )
    return module, shape, int(planned["SHARED_BYTES"]), appends


def attend_macros(variant: AttendVariant) -> tuple[tuple[str, str], ...]:
    """The macros that `attend.cu` is compiled with."""
    return _plan(variant)[2]


@functools.cache
def expect(name: str, macros: tuple[tuple[str, str], ...], device: torch.device) -> None:
    """Start to compile the file `name` in a thread, once. Its first use waits for that thread."""
    compile_ahead(name, macros, device)


def forget() -> None:
    """Clear the caches of variants and modules."""
    for cached in (_plan, attend_module, expect):
        cached.cache_clear()
