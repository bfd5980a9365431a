"""The CUDA kernels against the reference: the matrix and the checks of `test_kernels`, on pages in fragment order.

Without a GPU, what can be tested is tested: bad input, and the cache of compiled kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_kernels as kernels
from cases import tiny_models
from kernel_cases import Case, filled, generator, random_step

import hf_lowbit_kv as lb
from hf_lowbit_kv import backend as ops
from hf_lowbit_kv.formats import parse_format

GPU = torch.cuda.is_available() and not kernels.INTERPRETED
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def fragment(case: Case) -> Case:
    """The case with its formats in the layout of the CUDA kernels."""
    spec = ops.storage_spec(case.spec, "cuda")
    return dataclasses.replace(case, keys=spec.key_format.name, values=spec.value_format.name)


@pytest.fixture
def launch(monkeypatch):
    from hf_lowbit_kv.triton_kernels.cuda import launch

    monkeypatch.setattr(kernels, "launch", launch)
    return launch


def _half(cases):
    """Cases in the dtypes that these kernels compute in; `test_float32` covers the rest."""
    return [case for case in cases if (case[0] if isinstance(case, tuple) else case).dtype != torch.float32]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", _half([*kernels.SMALL, *kernels._matrix()]), ids=str)
def test_attend(case, launch):
    # scores near 2e4: rounding q x scale to fp16, which is what these kernels do, gives up to 0.042 in 60 seeds by itself
    kernels.check_attend(fragment(case), outlier_bound=6e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "chunks"), _half([*kernels.SMALL_STORES, *kernels._stores()]), ids=str)
def test_store(case, chunks, launch):
    kernels.check_store(fragment(case), chunks)


#: beyond the common matrix: one block of query rows and several, rows split among many blocks of threads, many rows
SHAPES = [
    Case(heads=1, groups=groups, tokens=tokens, head_dim=128, page_size=128, residual=128, lengths=(3000, 5, 700), dtype=dtype)
    for groups, tokens in ((1, 8), (16, 1), (7, 3), (16, 8), (5, 2))
    for dtype in (torch.float16, torch.bfloat16)
] + [
    Case(keys="int2-channel", values="int4-token", head_dim=128, page_size=128, residual=128, lengths=(200000,), heads=1),
    Case(keys="int8-token", values="int2-token", head_dim=128, page_size=128, residual=0, lengths=(777, 90001), heads=2),
    Case(keys="dense", values="dense", head_dim=128, page_size=128, residual=0, sink=0, lengths=(129, 65000), heads=2),
    Case(head_dim=128, page_size=128, residual=128, lengths=tuple(range(0, 4000, 97)), heads=2),
    Case(head_dim=64, page_size=64, residual=64, lengths=(500,) * 3, capacity=60000, heads=2),
]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@needs_gpu
def test_repeated_launches_agree(launch):
    """Blocks leave their counters as they found them, and nothing races: the same step gives the same up to rounding."""
    case = fragment(Case(head_dim=128, page_size=128, residual=128, lengths=(9000, 3000, 40, 12000)))
    gen = generator(case, kernels.SEED)
    _, dev = filled(case, gen, "cuda")
    step = random_step(case, gen).to("cuda")
    outs = [launch.attend(step.q, step.k, step.v, None, dev.state, case.spec, step.scaling) for _ in range(50)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@needs_gpu
def test_fixed_order(launch, monkeypatch):
    monkeypatch.setenv(launch.ORDERED, "1")
    case = fragment(Case(head_dim=128, page_size=128, residual=128, lengths=(9000, 3000, 40, 12000)))
    gen = generator(case, kernels.SEED)
    _, dev = filled(case, gen, "cuda")
    step = random_step(case, gen).to("cuda")
    outs = [launch.attend(step.q, step.k, step.v, None, dev.state, case.spec, step.scaling) for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("residual", [0, 128])
def test_graph(residual, launch, monkeypatch):
    monkeypatch.setattr(kernels, "Case", lambda **options: fragment(Case(**options)))
    kernels.test_graph(residual)


@pytest.mark.gpu
@needs_gpu
def test_float32(launch):
    case = fragment(Case(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_attend(case)
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_store(case, [3])


def _logits(model, tokens: torch.Tensor, prompt: int, backend: str, **options) -> torch.Tensor:
    """Logits of each step `[B, steps, vocabulary]`, the tokens `[B, n]` given, whatever the model would have said."""
    cache = lb.from_preset("kivi-4", model, backend=backend, residual=32, page_size=32, **options)
    with torch.no_grad():
        out = [model(tokens[:, :prompt], past_key_values=cache).logits[:, -1]]
        for i in range(prompt, tokens.shape[1]):
            out.append(model(tokens[:, i : i + 1], past_key_values=cache).logits[:, -1])
    assert {layer.backend for layer in cache.packed_layers} == {backend}
    assert backend in cache.summary()
    return torch.stack(out, 1).float()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}], ids=["growing", "preallocated"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_model(family, options, launch):
    """A whole model, step by step over several pages, against the reference on the same device."""
    model = tiny_models(family)[0].half().cuda()
    tokens = torch.randint(3, 160, (2, 250), generator=torch.Generator().manual_seed(kernels.SEED)).cuda()
    before = launch.launches.get("attend_kernel", 0)
    found = _logits(model, tokens, 130, "cuda", **options)
    assert launch.launches["attend_kernel"] >= before + 120 * 2
    expected = _logits(model, tokens, 130, "torch", **options)
    assert ((found - expected).norm() / expected.norm()) < 1e-2


# ---- without a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compile_module():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    return pytest.importorskip("hf_lowbit_kv.triton_kernels.cuda.compile")


def test_missing_bindings(monkeypatch):
    monkeypatch.setattr(ops, "_has_cuda_bindings", lambda: False)
    with pytest.raises(ImportError, match=r"hf-lowbit-kv\[cuda\]"):
        ops.check_backend("cuda")


def test_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(ops, "_has_cuda_bindings", lambda: True)
    with pytest.raises(ValueError, match="backend='cuda' needs an NVIDIA GPU, and the model is on 'cpu'"):
        ops.choose_backend("cuda", torch.device("cpu"))


def test_old_gpu(monkeypatch):
    monkeypatch.setattr(ops, "_has_cuda_bindings", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"compute capability \(8, 0\).*Tesla T4 has \(7, 5\).*backend='triton'"):
        ops.choose_backend("cuda", torch.device("cuda"))


def test_what_the_cuda_kernels_do_not_cover_is_refused(monkeypatch):
    monkeypatch.setattr(ops, "_has_cuda_bindings", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda")
    with pytest.raises(ValueError, match=r"computes in .*, not in torch.float32; use backend='triton'"):
        ops.choose_backend("cuda", device, torch.float32)
    with pytest.raises(ValueError, match=r"no kernels for format 'boosted2-r0.125' yet; use backend='triton'"):
        ops.choose_backend("cuda", device, torch.float16, [parse_format("boosted2-r0.125")])


def test_default_on_a_gpu(monkeypatch):
    found = {"capability": (9, 0), "nvrtc": True}
    monkeypatch.setattr(ops, "_has_nvrtc", lambda: found["nvrtc"])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.delenv(ops.VARIABLE, raising=False)
    monkeypatch.setattr(ops, "DEFAULT_ON_GPU", "cuda")
    device, formats = torch.device("cuda"), Case().spec.formats
    assert ops.choose_backend(None, device, torch.bfloat16, formats) == "cuda"
    assert ops.choose_backend(None, device, torch.float32, formats) == "triton"
    found["nvrtc"] = False
    assert ops.choose_backend(None, device, torch.float16, formats) == "triton"
    found.update(nvrtc=True, capability=(7, 5))
    assert ops.choose_backend(None, device, torch.float16, formats) == "triton"
    found.update(capability=(9, 0))
    monkeypatch.setattr(ops, "DEFAULT_ON_GPU", "triton")
    assert ops.choose_backend(None, device, torch.float16, formats) == "triton"


def test_source_is_one_text():
    from hf_lowbit_kv.triton_kernels.cuda.compile import source

    text = source("attend.cu")
    assert "#include" not in text
    assert text.count("struct AffineKeys {") == 1


def test_unwritable_cache(monkeypatch, tmp_path, caplog):
    from hf_lowbit_kv.triton_kernels.cuda import compile

    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(compile.VARIABLE, str(blocked))
    compile._keep(compile.cache_directory() / "kernel.cubin", b"kernel")
    assert "cannot be written" in caplog.text
    assert compile.VARIABLE in caplog.text


def test_compile_failure_shows_the_log(compile_module):
    with pytest.raises(RuntimeError) as raised:
        compile_module.binary("attend.cu", (("NT", "1"),), "sm_80")
    if not isinstance(raised.value, compile_module.CompileError):
        pytest.skip("NVRTC's library is not installed")
    assert "use backend='triton'" in str(raised.value)
    assert "undefined" in str(raised.value)
