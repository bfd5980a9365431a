"""The latent kernels as NVRTC compiles them, without a GPU: what a step needs for each number of heads, and what ptxas says."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import pytest
import torch
from compiled import needs_nvrtc, report
from latent_cases import LatentCase

from hf_lowbit_kv.triton_kernels.cuda import latent

DEEPSEEK = {"rank": 512, "rope": 64, "page_size": 128}


def last_ends(places: int, programs: int, pieces: int, shares: int) -> int:
    """When the last block ends where `places` blocks run at a time, each beginning as soon as there is a place for it."""
    ends = [0] * places
    for share in range(shares):
        size = pieces * (share + 1) // shares - pieces * share // shares
        for _ in range(programs):
            heapq.heapreplace(ends, ends[0] + size + latent.BEGINNING)
    return max(ends)


@pytest.mark.parametrize("pieces", [1, 8, 64, 256])
def test_shares_leave_no_processor_idle_for_long(pieces):
    """Never much later than with one block for each place, and sooner for 70 sequences, which fill half of an H200."""
    for programs in (1, 7, 8, 32, 64, 66, 67, 70, 100, 132, 133, 140, 200, 300):
        found = latent._shares(132, programs, pieces)
        simple = max(min(132 // programs, pieces), 1)
        ends, before = (last_ends(132, programs, pieces, shares) for shares in (found, simple))
        assert ends <= 1.05 * before
        if programs in (70, 140) and pieces == 64:
            assert ends < 0.9 * before


def spilled(log: str, kernel: str) -> bool:
    """Whether a kernel of this log keeps registers in memory."""
    part = log.split(f"Function properties for {kernel}\n")[1].split("Compiling entry")[0]
    assert "spill stores" in part
    return "0 bytes spill stores, 0 bytes spill loads" not in part


def check(log: str, kernel: str) -> None:
    assert not spilled(log, kernel), log
    assert "warning" not in log.lower(), log
    # ptxas says so where products of a warpgroup do not overlap, or wait where the source does not
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
    """What a step of so many heads and tokens launches on Hopper."""
    compiled = []

    def load(name, defines, device, arch_specific=False):
        compiled.append((name, defines, "sm_90a" if arch_specific else "sm_90"))
        return SimpleNamespace(integer=lambda name: 0)

    monkeypatch.setattr(latent, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: latent.WIDE_CAPABILITY)
    latent._wide_plan.cache_clear()
    case = LatentCase(rank=512, rope=rope, page_size=128)
    how = latent.plan(case.spec, 512, rope, dtype, heads * tokens, torch.device("cuda", 0))
    latent._wide_plan.cache_clear()
    assert how.kernel == "latent_wide_attend"
    assert how.rows == min(heads * tokens, 64)
    (found,) = compiled
    check(report(*found), how.kernel)
