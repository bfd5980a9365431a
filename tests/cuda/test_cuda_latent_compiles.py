"""NVRTC compiles the latent kernels without a GPU: the kernel for each number of heads, and the reports of ptxas."""

import heapq
from types import SimpleNamespace

import pytest
import torch
from compiled import needs_nvrtc, report
from latent_cases import LatentCase

from hf_lowbit_kv.triton_kernels.cuda import latent

DEEPSEEK = {"rank": 512, "rope": 64, "page_size": 128}


def finish_time(slots: int, programs: int, kv_tiles: int, splits: int) -> int:
    """When the last CTA ends if `slots` CTAs run at a time, each starting as soon as a slot is free."""
    ends = [0] * slots
    for split in range(splits):
        size = kv_tiles * (split + 1) // splits - kv_tiles * split // splits
        for _ in range(programs):
            heapq.heapreplace(ends, ends[0] + size + latent.CTA_COST)
    return max(ends)


@pytest.mark.parametrize("kv_tiles", [1, 8, 64, 256])
def test_splits_leave_no_processor_idle_for_long(kv_tiles):
    """Never much later than with one CTA per slot, and sooner for 70 sequences, which fill half of an H200."""
    for programs in (1, 7, 8, 32, 64, 66, 67, 70, 100, 132, 133, 140, 200, 300):
        one_per_slot = max(min(132 // programs, kv_tiles), 1)
        end = finish_time(132, programs, kv_tiles, latent._splits(132, programs, kv_tiles))
        simple_end = finish_time(132, programs, kv_tiles, one_per_slot)
        assert end <= 1.05 * simple_end
        if programs in (70, 140) and kv_tiles == 64:
            assert end < 0.9 * simple_end


def spilled(log: str, kernel: str) -> bool:
    """Whether a kernel of this log spills registers."""
    properties = log.split(f"Function properties for {kernel}\n")[1].split("Compiling entry")[0]
    assert "spill stores" in properties
    return "0 bytes spill stores, 0 bytes spill loads" not in properties


def check(log: str, kernel: str) -> None:
    assert not spilled(log, kernel), log
    assert "warning" not in log.lower(), log
    # ptxas's words for products of a warp group that do not overlap, or wait more than the source requires
    assert "serialized" not in log, log
    assert "injected" not in log, log


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "convert", "case"),
    [
        ("sm_80", False, LatentCase(**DEEPSEEK)),
        ("sm_90", True, LatentCase(**DEEPSEEK, dtype=torch.float16)),
        ("sm_120", True, LatentCase(rank=192, rope=128, page_size=64)),
    ],
)
def test_narrow(arch, convert, case):
    defines = latent.defines(case.spec, case.rank, case.rope, case.dtype, convert)
    check(report("latent.cu", defines, arch), "latent_attend")


@needs_nvrtc
@pytest.mark.parametrize(
    ("heads", "tokens", "dtype", "rope"),
    [
        (16, 1, torch.bfloat16, 64),
        (16, 2, torch.float16, 64),
        (32, 1, torch.bfloat16, 128),
        (64, 1, torch.bfloat16, 64),
        (128, 8, torch.float16, 128),
    ],
)
def test_wide(heads, tokens, dtype, rope, monkeypatch):
    """The kernel of a step on Hopper, by heads and tokens."""
    compiled = []

    def load(name, defines, device, arch_specific=False):
        compiled.append((name, defines, "sm_90a" if arch_specific else "sm_90"))
        return SimpleNamespace(integer=lambda name: 0)

    monkeypatch.setattr(latent, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: latent.WIDE_CAPABILITY)
    latent._wide_plan.cache_clear()
    case = LatentCase(rank=512, rope=rope, page_size=128)
    launch = latent.plan(case.spec, 512, rope, dtype, heads * tokens, torch.device("cuda", 0))
    latent._wide_plan.cache_clear()
    assert launch.kernel == "latent_wide_attend"
    assert launch.rows == min(heads * tokens, 64)
    check(report(*compiled[0]), launch.kernel)
    assert len(compiled) == 1
