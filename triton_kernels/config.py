"""Launch configurations by shape and device: a table, no tuning at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

#: multiprocessors assumed where the device cannot be asked (interpreter)
DEFAULT_PROCESSORS = 132


class Config(NamedTuple):
    """How the attend kernel is launched."""

    block_m: int
    block_n: int
    window_n: int
    num_warps: int
    num_stages: int
    #: programs that a multiprocessor should be given
    programs: int
    #: registers a thread may use, or `None`: the compiler's choice
    registers: int | None = None


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def attend_config(rows: int, widest: int, is_float32: bool) -> Config:
    """rows: query rows of a KV head; widest: the larger head size."""
    if is_float32:
        return Config(16, 32, 32, 4, 1, 4)
    block_n = 64 if widest <= 128 else 32
    if rows <= 16:
        return Config(16, 2 * block_n, block_n, 4, 3, 4)
    if rows <= 32 or widest > 128:
        return Config(32, block_n, block_n, 4, 2, 2)
    return Config(64, block_n, block_n, 4, 2, 2)


def split_count(programs: int, pages: int, wanted: int) -> int:
    """Shares to divide a row's pages into. programs: rows * heads * query blocks; pages: capacity of a row."""
    if programs * 2 > wanted or pages <= 2:
        return 1
    return max(min(wanted // programs, pages // 2), 1)
