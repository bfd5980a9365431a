"""NaN and Inf in one row's or KV head's keys or values never reach another row or KV head, on every backend (`isolation`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cuda_emulator
import kernel_checks as kernels
from emulated import emulated
from interpreted import PARTS, run_part
from isolation import POISONS, cases, check
from test_cuda import fragment

from hf_lowbit_kv import cpu, determinism, reference

CASES = cases()


@pytest.mark.skipif(kernels.INTERPRETED, reason="runs in a process of its own")
@pytest.mark.parametrize("module", [reference, cpu], ids=["torch", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_cpu(module, case):
    for values in (POISONS, *((value,) for value in POISONS)):
        check(module, case, "cpu", kernels.SEED, values)


@pytest.mark.slow
@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the tests themselves run here")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(1800)
def test_interpreted(part):
    run_part(__file__, part)


@kernels.needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_isolation(case):
    check(kernels.launch, case, "cpu", kernels.SEED)


EMULATED = [case for case in CASES if case.tokens == 1]


@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the kernels themselves run elsewhere")
@pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++ and an x86 processor")
@pytest.mark.fast_if(wanted=lambda p: (p["case"].keys, p["case"].values) == ("int4-channel", "int4-token"))
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_emulated(case, monkeypatch):
    with emulated(monkeypatch) as launch:
        check(launch, fragment(case), "cpu", kernels.SEED)


@pytest.mark.gpu
@kernels.needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(case):
    check(kernels.launch, case, "cuda", kernels.SEED)


@pytest.mark.gpu
@kernels.needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda(case, monkeypatch):
    from hf_lowbit_kv.triton_kernels.cuda import launch

    monkeypatch.setenv(determinism.VARIABLE, "1")  # sums in one order, so that results can be equal
    check(launch, fragment(case), "cuda", kernels.SEED)
