"""Launch configurations of Triton's kernels by shape and device: a table, no tuning at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

#: tokens of the tail per split
TAIL_SPLIT = 64
#: splits that a program of the merge kernel merges at a time, and its channels
MERGE_SPLITS = 256
MERGE_CHANNELS = 32
#: warps of a program that stores one token and packs a due page
APPEND_WARPS = 4
#: tokens (keys and queries) that a program transforms: one per warp
TRANSFORM_ROWS = 4
#: number of multiprocessors assumed if there is no device to query (interpreter)
DEFAULT_PROCESSORS = 132

#: largest number of query rows of a KV head (tokens x heads of its group) with which a backend attends directly to packed
#: pages; `prompt.py` takes more. On an H200 both paths take equally long near this limit, for `cuda` slightly below it
FUSED_ROWS = {"triton": 128, "cuda": 256}
#: largest size in bytes of the buffer that `prompt.py` unpacks into, and of the results that it carries from stretch to
#: stretch
BUFFER_BYTES = 128 * 2**20
CARRY_BYTES = 128 * 2**20


class Config(NamedTuple):
    """The launch of the attend kernel."""

    block_m: int
    block_n: int
    window_n: int
    num_warps: int
    num_stages: int
    #: wanted number of programs per multiprocessor
    programs: int
    #: limit of registers per thread; `None`: the compiler's choice
    registers: int | None = None
    #: whether tokens are the left operand of products, and query rows the narrow right one (`common`: T = 0)
    swapped: bool = False


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


#: launches for at most 16 query rows of a KV head, by the largest width of a plane of values. Measured on an H200 at head size
#: 128. One warp suits 16 channels; more warps would compute a product twice. Registers are limited so that 12 programs fit on
#: a multiprocessor; with more than 8 query rows the kernel would spill. No launch needs more than 48 KiB of shared memory, so
#: all devices from sm80 on use the same table.
DECODE = (
    (16, Config(16, 64, 16, num_warps=1, num_stages=3, programs=12, registers=168, swapped=True)),
    (32, Config(16, 64, 32, num_warps=2, num_stages=3, programs=8, swapped=True)),
    (64, Config(16, 64, 32, num_warps=2, num_stages=2, programs=6, swapped=True)),
    (256, Config(16, 32, 16, num_warps=4, num_stages=2, programs=6, swapped=True)),
)
#: the same if a plane of keys is wider than a plane of values (finer keys)
DECODE_FINER_KEYS = (
    (16, Config(16, 128, 32, num_warps=2, num_stages=2, programs=6, swapped=True)),
    (256, Config(16, 32, 16, num_warps=1, num_stages=3, programs=12, swapped=True)),
)
#: the same for heads of more than 256 channels: by the width of a plane of values
DECODE_WIDE = (
    (128, Config(16, 32, 16, num_warps=4, num_stages=2, programs=4, swapped=True)),
    (512, Config(16, 16, 16, num_warps=4, num_stages=2, programs=4, swapped=True)),
)
#: the same if keys or values gather from shared memory. Two warps, because within one warp Triton gathers by shuffles.
#: Chosen from the machine code: the fewest registers without spilling
DECODE_GATHERING = Config(16, 128, 32, num_warps=2, num_stages=2, programs=7, registers=144, swapped=True)


@functools.cache
def attend_config(
    rows: int, widest: int, key_width: int, value_width: int, is_float32: bool, gathers: bool = False
) -> Config:
    """The launch of the attend kernel. rows: query rows of a KV head; widest: the larger head size; key_width,
    value_width: padded channels of a plane; gathers: whether keys or values gather from shared memory."""
    if is_float32:
        return Config(16, 32, 32, num_warps=4, num_stages=1, programs=4)
    if rows <= 16 and gathers:
        config = DECODE_GATHERING._replace(block_m=8) if rows <= 8 else DECODE_GATHERING
        if widest > 256:
            return config._replace(block_n=64, num_warps=4, programs=4, registers=None)
        return config if rows <= 8 and widest <= 128 else config._replace(programs=4, registers=None)
    if rows <= 16:
        # the finer table was measured for planes up to 64 channels; dense keys over packed values take the usual one
        table = DECODE_WIDE if widest > 256 else DECODE_FINER_KEYS if value_width < key_width <= 64 else DECODE
        config = next(config for width, config in table if value_width <= width)
        return config._replace(block_m=8) if rows <= 8 else config._replace(registers=None)
    if widest > 256:
        return Config(16, 16, 16, num_warps=4, num_stages=2, programs=2)
    block_n = 64 if widest <= 128 else 32
    return Config(32, block_n, block_n, num_warps=4, num_stages=2, programs=2)


class PromptConfig(NamedTuple):
    """The launch of the prompt kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    #: programs that a multiprocessor should be given
    programs: int


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 227 KiB of shared memory (sm90, sm100) instead of 99 KiB (sm86, sm89, sm120)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def prompt_config(rows: int, heads: int, widest: int, is_float32: bool, device: torch.device) -> PromptConfig:
    """The launch of the prompt kernel. rows: query rows of a KV head; heads: KV heads of all sequences; widest: the
    larger head size."""
    if widest > 256:  # latents
        if is_float32:
            return PromptConfig(16, 16, num_warps=4, num_stages=1, programs=2)
        if not _has_large_shared_memory(device):
            return PromptConfig(32, 32, num_warps=4, num_stages=1, programs=1)
        return PromptConfig(64, 32, num_warps=8, num_stages=2, programs=1)
    if is_float32:
        return PromptConfig(32, 32, num_warps=4, num_stages=1, programs=2)
    if not _has_large_shared_memory(device):
        return PromptConfig(64, 64 if widest <= 128 else 32, num_warps=4, num_stages=2, programs=2)
    if widest > 128:
        return PromptConfig(128, 64, num_warps=8, num_stages=2, programs=1)
    if rows <= 64:
        return PromptConfig(64, 64, num_warps=4, num_stages=3, programs=2)
    if rows * heads < 2 * 128 * processors(device):
        return PromptConfig(128, 64, num_warps=8, num_stages=3, programs=1)
    return PromptConfig(128, 128, num_warps=8, num_stages=3, programs=1)


def split_count(programs: int, pages: int, target: int) -> int:
    """The number of splits of a row's pages (or of other units of work). programs: rows * heads * query blocks; pages: of the
    longest row; target: the number of programs that fill the device."""
    if programs * 2 > target or pages <= 2:
        return 1
    return max(min(target // programs, pages // 2), 1)
