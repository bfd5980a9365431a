"""The CUDA kernels against the reference: the matrix and the checks of `test_kernels`, on pages in fragment order.

Without a GPU, what can be tested is tested: bad input, and the cache of compiled kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_kernels as kernels
from cases import tiny_models
from kernel_cases import Case, filled, generator, matrix, random_step, stores
from scale_cases import CONSTANT_ROWS, GPU_SPREAD, HEAVY_TOKEN, check_constant_rows, check_heavy_token

import hf_lowbit_kv as lb
from hf_lowbit_kv import backend as ops
from hf_lowbit_kv import backends
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.pages import LayerSpec
from hf_lowbit_kv.transforms import Fused
from hf_lowbit_kv.triton_kernels.cuda import registry

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
    """Cases in the dtypes that these kernels compute in (`test_float32` covers the rest), and in formats that they cover."""

    def covered(case: Case) -> bool:
        return case.dtype != torch.float32 and registry.covered(case.spec.value_format, True)

    return [case for case in cases if covered(case[0] if isinstance(case, tuple) else case)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", _half([*kernels.SMALL, *matrix()]), ids=str)
def test_attend(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_SPREAD, ids=str)
def test_scales_of_all_sizes(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CONSTANT_ROWS, ids=str)
def test_constant_rows(case, launch):
    check_constant_rows(kernels.attend_poisoned, fragment(case), "cuda", kernels.SEED)


@pytest.mark.gpu
@needs_gpu
def test_a_heavy_token_in_a_page_leaves_the_others_their_part(launch):
    check_heavy_token(kernels.attend_poisoned, fragment(dataclasses.replace(HEAVY_TOKEN, lengths=(1 << 16,))), "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "chunks"), _half([*kernels.SMALL_STORES, *stores()]), ids=str)
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
    *(
        Case(keys=keys, values=values, head_dim=128, page_size=page, residual=128, lengths=(3000, 5, 700), groups=4, tokens=4)
        for keys, values in (("int2-channel", "int2-token"), ("int4-token", "int2-token"), ("boosted2-r0.125", "int2-token"))
        for page in (64, 128)
    ),
] + [
    # every number of boosted columns (none, less than an operand has, one, several, all), and of tiles of query rows
    Case(
        keys=f"boosted2-r{ratio}", values="int2-token", head_dim=dim, page_size=(32, 64, 128, 256)[i % 4], residual=128,
        lengths=(1500, 300), groups=(1, 4, 16)[i % 3], dtype=(torch.float16, torch.bfloat16)[i % 2],
    )
    for i, (dim, ratio) in enumerate(itertools.product((64, 80, 96, 128, 256), (0, 0.125, 0.25, 1)))
]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case, launch):
    kernels.check_attend(fragment(case))


#: more query rows than decoding has: read by its kernel where Triton cannot launch its own
LONG_CHUNKS = [
    Case(tokens=150, lengths=(300, 5), heads=1, groups=2),
    Case(
        keys="int2-channel",
        values="int2-token",
        head_dim=128,
        page_size=128,
        residual=128,
        sink=32,
        tokens=70,
        lengths=(700, 0),
        groups=4,
        padded=True,
    ),
    Case(
        keys="boosted2-r0.125",
        values="int2-token",
        tokens=100,
        heads=1,
        groups=3,
        softcap=20.0,
        sinks=True,
        dtype=torch.bfloat16,
    ),
    Case(keys="dense", values="dense", tokens=300, heads=2, groups=1, residual=0, sink=0, lengths=(65, 3)),
    Case(tokens=270, heads=1, groups=1, head_dim=256, lengths=(90,)),
]


def check_long_chunk(case: Case, launch, monkeypatch) -> None:
    def refused(*args):
        raise AssertionError("Triton's kernels were called")

    monkeypatch.setattr(launch, "why_no_launcher", lambda: "no compiler")
    monkeypatch.setattr(launch.prompt, "attend", refused)
    assert case.groups * case.tokens > launch.FUSED_ROWS["cuda"]
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", LONG_CHUNKS, ids=str)
def test_long_chunks_without_triton(case, launch, monkeypatch):
    check_long_chunk(case, launch, monkeypatch)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("score", ["", "-variance", "-range", "-random7"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_boosted_pages(head_dim, score, outliers, launch):
    """Byte for byte: the same channels chosen, whatever the score, the head size and the page size."""
    for i, ratio in enumerate((0.125, 0.25, 0.3, 1)):
        page, dtype = (32, 64, 128, 256)[i], (torch.float16, torch.bfloat16)[i % 2]
        keys = f"boosted2-r{ratio}{score}"
        case = Case(
            keys=keys,
            values="int2-token",
            head_dim=head_dim,
            page_size=page,
            residual=5,
            dtype=dtype,
            outliers=outliers,
        )
        kernels.check_store(fragment(case), [page + 3, *[0] * page])


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
@pytest.mark.parametrize("options", kernels.GRAPHS, ids=str)
def test_graph(options, launch, monkeypatch):
    monkeypatch.setattr(kernels, "Case", lambda **options: fragment(Case(**options)))
    kernels.test_graph(options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", kernels._transformed_cases(), ids=str)
def test_attend_transformed(case, launch):
    kernels.check_attend_transformed(fragment(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [x for x in kernels.TRANSFORMS if x[1] != torch.float32], ids=str)
def test_transform(options, launch):
    kernels.check_transform(*options)


@pytest.mark.gpu
@needs_gpu
def test_float32(launch):
    case = fragment(Case(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_attend(case)
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_store(case, [3])


def _logits(model, tokens: torch.Tensor, prompt: int, backend: str, preset: str, **options) -> torch.Tensor:
    """Logits of each step `[B, steps, vocabulary]`, the tokens `[B, n]` given, whatever the model would have said."""
    cache = lb.from_preset(preset, model, backend=backend, residual=32, page_size=32, **options)
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
@pytest.mark.parametrize(("family", "preset"), [("llama", "kivi-4"), ("qwen3", "kivi-4"), ("llama", "kitty-hadamard")])
def test_model(family, preset, options, launch):
    """A whole model, step by step over several pages, against the reference on the same device."""
    model = tiny_models(family)[0].half().cuda()
    tokens = torch.randint(3, 160, (2, 250), generator=torch.Generator().manual_seed(kernels.SEED)).cuda()
    before = launch.launches.get("attend_kernel", 0)
    found = _logits(model, tokens, 130, "cuda", preset, **options)
    assert launch.launches["attend_kernel"] >= before + 120 * 2
    expected = _logits(model, tokens, 130, "torch", preset, **options)
    assert ((found - expected).norm() / expected.norm()) < 1e-2


# ---- without a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compile_module():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    return pytest.importorskip("hf_lowbit_kv.triton_kernels.cuda.compile")


def test_missing_bindings(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_bindings", lambda: False)
    with pytest.raises(ImportError, match="cuda-bindings is not installed: "):
        ops.check_backend("cuda")


def test_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_bindings", lambda: True)
    with pytest.raises(ValueError, match="backend='cuda' needs an NVIDIA GPU, and the model is on 'cpu'"):
        ops.choose_backend("cuda", torch.device("cpu"))


def test_old_gpu(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_bindings", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"compute capability \(8, 0\).*Tesla T4 has \(7, 5\).*backend='triton'"):
        ops.choose_backend("cuda", torch.device("cuda"))


def test_what_the_cuda_kernels_do_not_cover_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_bindings", lambda: True)
    monkeypatch.setattr(backends, "why_no_compiler", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda")
    with pytest.raises(ValueError, match=r"computes in .*, not in torch.float32; use backend='triton'"):
        ops.choose_backend("cuda", device, torch.float32)
    boosted, plain = parse_format("boosted2-r0.125"), parse_format("int2-token")
    with pytest.raises(
        ValueError, match=r"no kernels for values in format 'boosted2-r0.125' yet; use backend='triton'"
    ):
        ops.choose_backend("cuda", device, torch.float16, LayerSpec(plain, boosted))
    assert ops.choose_backend("cuda", device, torch.float16, LayerSpec(boosted, plain)) == "cuda"


def test_default_on_a_gpu(monkeypatch):
    """`cuda` where it serves, else `triton`; and why."""
    found = {"capability": (9, 0), "compiler": None}
    monkeypatch.setattr(backends, "why_no_compiler", lambda capability: found["compiler"])
    monkeypatch.setattr(backends, "why_no_launcher", lambda: None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    device, spec = torch.device("cuda"), Case().spec

    def check(dtype, chosen, reason, spec=spec):
        assert ops.choose_backend(None, device, dtype, spec) == chosen
        said = backends.reason_for(None, chosen, device, dtype, spec)
        assert said is None if reason is None else reason in said

    check(torch.bfloat16, "cuda", None)
    check(torch.float32, "triton", "computes in")
    check(
        torch.float16,
        "triton",
        "no kernels for values in format",
        LayerSpec(spec.key_format, parse_format("boosted2-r0.125")),
    )
    found["compiler"] = "needs NVRTC"
    check(torch.float16, "triton", "needs NVRTC")
    found.update(compiler=None, capability=(7, 5))
    check(torch.float16, "triton", "Tesla T4")
    assert backends.reason_for("triton", "triton", device, torch.float16, spec) is None
    found.update(capability=(9, 0))
    monkeypatch.setenv(backends.VARIABLE, "triton")
    assert backends.reason_for(None, "triton", device, torch.float32, spec) is None
    monkeypatch.delenv(backends.VARIABLE)
    monkeypatch.setitem(backends.ON_GPU, "separate", ("triton",))
    check(torch.float16, "triton", None)


@pytest.mark.parametrize(
    ("version", "architectures", "supported", "expected"),
    [
        (13, [80, 90], 13000, None),
        (12, [80, 90], 13000, None),
        (12, [80], 13000, "knows this GPU"),
        (13, [80, 90], 12080, "driver for CUDA 13, and this one is for 12"),
        (None, [], 0, "no library"),
    ],
)
def test_what_keeps_kernels_from_being_compiled(monkeypatch, version, architectures, supported, expected):
    """Without NVRTC, or with one that does not fit GPU or driver, the default is another backend and nothing is raised."""

    def nvrtc_version():
        if version is None:
            raise RuntimeError("no library")
        return 0, version, 0

    nvrtc = SimpleNamespace(nvrtcVersion=nvrtc_version, nvrtcGetSupportedArchs=lambda: (0, architectures))
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, supported))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver, nvrtc=nvrtc))
    monkeypatch.setattr(backends, "has_cuda_bindings", lambda: True)
    backends.why_no_compiler.cache_clear()
    reason = backends.why_no_compiler((9, 0))
    backends.why_no_compiler.cache_clear()
    assert reason is None if expected is None else expected in reason


def test_source_is_one_text():
    from hf_lowbit_kv.triton_kernels.cuda.compile import source

    text = source("attend.cu")
    assert "#include" not in text
    assert text.count("struct AffineKeys {") == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(keys="boosted2-r0.125", values="int2-token", head_dim=128, page_size=128, residual=128),
        Case(keys="boosted2-r0.3-variance", values="dense", head_dim=80, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_compiles(case, compile_module, monkeypatch, tmp_path):
    """Without a GPU: NVRTC takes what the macros make of the sources."""
    from hf_lowbit_kv.triton_kernels.cuda import geometry

    monkeypatch.setenv(compile_module.disk.VARIABLE, str(tmp_path))
    case = fragment(case)
    choice = geometry.choose(case.spec, *case.dims, case.dtype, case.groups)
    options = choice, True, 1, True, Fused(before=True, rotated=True, after=False)
    assert geometry.can_store(case.spec, *case.dims, choice)
    try:
        for fused in (False, True):
            defines = geometry.attend_defines(case.spec, *case.dims, case.dtype, *options, fused=fused)
            compile_module.binary("attend.cu", defines, "sm_90")
        compile_module.binary("append.cu", geometry.append_defines(case.spec, *case.dims, case.dtype), "sm_80")
    except compile_module.CompileError:
        raise
    except RuntimeError:
        pytest.skip("NVRTC's library is not installed")


def test_compile_failure_shows_the_log(compile_module):
    with pytest.raises(RuntimeError) as raised:
        compile_module.binary("attend.cu", (("NT", "1"),), "sm_80")
    if not isinstance(raised.value, compile_module.CompileError):
        pytest.skip("NVRTC's library is not installed")
    assert "use backend='triton'" in str(raised.value)
    assert "undefined" in str(raised.value)
