"""NaN and Inf in one row's or KV head's keys or values never reach another row or KV head, on every backend (`isolation`)."""

from types import SimpleNamespace

import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated, needs_emulator
from interpreted import PARTS, run_part
from isolation import POISONS, cases, check, check_latents, in_every_run
from kernel_cases import Case
from sequence_operations import LATENTS

from hf_lowbit_kv.backends import cpu
from hf_lowbit_kv.backends.choice import BACKENDS, LayerSetup, storage_spec
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import format_structs

CASES = cases()


def _parameters(cases: list) -> list:
    return [case if in_every_run(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.skipif(kernels.INTERPRETED, reason="runs in a process of its own")
@pytest.mark.parametrize("module", [reference, cpu], ids=["torch", "cpu"])
@pytest.mark.parametrize("case", _parameters(CASES), ids=str)
def test_on_a_cpu(module, case):
    for values in (POISONS, *((value,) for value in POISONS)):
        check(module, case, "cpu", kernels.SEED, values)


@pytest.mark.begins_first
@pytest.mark.slow
@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the tests themselves run here")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(1800)
def test_interpreted(part):
    run_part([__file__], part, slow=True)


@kernels.needs_interpreter
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_isolation(case):
    check(kernels.launch, case, "cpu", kernels.SEED)


def _has_cuda_kernels(case: Case) -> bool:
    """Formats without any (`fp8`), and sizes that the order of bytes does not allow, run on Triton."""
    spec = storage_spec(case.spec, "cuda")
    try:
        spec.validate(*case.dims)
    except ValueError:
        return False
    return format_structs.why_not(*spec.formats) is None


CUDA = [case for case in CASES if _has_cuda_kernels(case)]


@needs_emulator
@pytest.mark.parametrize(
    "case",
    [
        case
        if (case.keys, case.values, case.transform) == ("int4-channel", "int4-token", None)
        else pytest.param(case, marks=pytest.mark.slow)
        for case in CUDA
        if case.tokens == 1
    ],
    ids=str,
)
def test_emulated(case, monkeypatch):
    with emulated(monkeypatch) as launch:
        check(launch, fragment(case), "cpu", kernels.SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", _parameters(CASES), ids=str)
def test_triton(case):
    check(kernels.launch, case, "cuda", kernels.SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", _parameters(CUDA), ids=str)
def test_cuda(case, monkeypatch):
    from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points as launch

    monkeypatch.setenv(determinism.VARIABLE, "1")  # sums in one order, so that results can be equal
    check(launch, fragment(case), "cuda", kernels.SEED)


LATENT_SPECS = [LayerSpec.parse(f"{c}|{r}|0|0|64|none|none|latent") for c, r in LATENTS]


@pytest.mark.skipif(kernels.INTERPRETED, reason="runs in a process of its own")
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("spec", LATENT_SPECS, ids=lambda spec: spec.key)
def test_latents_on_a_cpu(spec, backend):
    for value in POISONS:
        check_latents(
            SimpleNamespace(OPERATIONS=BACKENDS[backend].operations("latent")), spec, "cpu", kernels.SEED, value
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("content", ["fp8", "dense"])
def test_latents_on_a_gpu(content, backend, monkeypatch):
    monkeypatch.setenv(determinism.VARIABLE, "1")
    spec = storage_spec(LayerSpec.parse(f"{content}|dense|0|0|64|none|none|latent"), backend)
    if BACKENDS[backend].why_not(LayerSetup(torch.device("cuda"), torch.bfloat16, spec, (128, 32))) is None:
        for value in POISONS:
            check_latents(
                SimpleNamespace(OPERATIONS=BACKENDS[backend].operations("latent")), spec, "cuda", kernels.SEED, value
            )
