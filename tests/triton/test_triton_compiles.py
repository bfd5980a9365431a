"""Triton's kernels compile for GPUs, on a machine without one: the interpreter accepts what the compiler refuses."""

import dataclasses
import os

import latent_cases
import pytest
import torch
from cases import FORMATS
from kernel_cases import Case, random_step, records_for, store_for

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_lowbit_kv.backends.choice import storage_spec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import (
    entry_points,
    fused_kernels,
    fused_products,
    prompt,
    read,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="the kernels themselves run elsewhere",
)


class Absent:
    """A driver for a GPU that is not there."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels that were compiled instead of launched, by name; of equal names the last."""
    kernels = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Absent())
    yield kernels
    triton.runtime.driver._active = before


def run_all(case: Case) -> None:
    """Attention, storing and reading of a decode step and of a chunk."""
    gen = torch.Generator().manual_seed(0)
    store = store_for(case, "cpu", poison=False)
    for tokens in (1, 40):
        step = random_step(dataclasses.replace(case, tokens=tokens), gen)
        entry_points.OPERATIONS.step(step.inputs(case)._replace(seen=100), store)
    read.read(store, 100)


#: and the patterns of the presets
STATIC = [("static-54222100", "static-2-tn"), ("static-64332222", "static-3-tn")]


#: one pair of each family of kernels; others share them, or are compiled for half a minute
FAST = [
    ("int4-channel", "dense"),
    ("boosted2-r0.125", "int2-token"),
    ("vq-d4b6", "vq-d8b5"),
    ("fp8", "fp8"),
]
#: pages in the other layout: channels in groups, and static codes, whose other kernels compile for a quarter of a minute
READ = [("static-54222100", "static-2-tn")]


@pytest.mark.parametrize(
    "formats", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in (*FORMATS, *STATIC)], ids="/".join
)
def test_every_format(formats, compiled):
    run_all(Case(*formats))
    assert {"append_one_kernel", "append_pages_kernel", "unpack_kernel", "prompt_kernel"} <= set(compiled)


@pytest.mark.parametrize(
    "formats", [x if x in READ else pytest.param(x, marks=pytest.mark.slow) for x in (*FORMATS, *STATIC)], ids="/".join
)
def test_pages_in_the_layout_of_cuda(formats, compiled):
    """What the CUDA backend leaves to Triton: long chunks over stored pages, and reading."""
    case = Case(*formats, head_dim=128, page_size=128)
    spec = storage_spec(case.spec, "cuda")
    if spec == case.spec:
        return  # the layout is the same
    gen = torch.Generator().manual_seed(0)
    store = PagedStore(spec, 2, 2, 128, 128, case.dtype, "cpu", 500, records_for(spec, (128, 128), 2))
    step = random_step(dataclasses.replace(case, tokens=40), gen)
    prompt.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling, seen=200), store)
    read.read(store, 200)
    assert {"unpack_kernel", "prompt_kernel"} <= set(compiled)


@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        pytest.param("vq-d4b8", "vq-d4b8", {}, marks=pytest.mark.slow),
        pytest.param("vq-d8b8", "vq-d2b6", {"dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("vq-d4b8", "vq-d4b8", {"head_dim": 64, "groups": 16}, marks=pytest.mark.slow),
        pytest.param("vq-d2b4", "vq-d8b5", {"head_dim": 80, "page_size": 64}, marks=pytest.mark.slow),
        pytest.param("vq-d4b3", "vq-d8b8", {"head_dim": 256, "dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("vq-d4b8", "int2-token", {"dtype": torch.float32}, marks=pytest.mark.slow),
    ],
)
def test_codebooks_of_whole_pages(keys, values, options, compiled, monkeypatch):
    """A decode step looks entries up in shared memory and multiplies them where they lie: else a hundred shuffles and more."""
    monkeypatch.setattr(entry_points, "_takes_ptx", lambda device: True)
    monkeypatch.setattr(entry_points, "_chained", lambda device: True)
    case = Case(keys, values, **{"head_dim": 128, "page_size": 128, "lengths": (300, 130)} | options)
    gen = torch.Generator().manual_seed(0)
    store = store_for(case, "cpu", poison=False)
    for tokens in (1, 9):
        step = random_step(dataclasses.replace(case, tokens=tokens), gen)
        entry_points.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), store)
        if tokens == 1 and values.startswith("vq") and case.page_size == 128:
            assert compiled["attend_kernel"].asm["ptx"].count("shfl.sync.idx") < 20


@pytest.mark.parametrize(
    ("content", "layout"),
    [
        *(("fp8", "triton"), ("fp8", "cuda")),
        *(pytest.param("dense", layout, marks=pytest.mark.slow) for layout in ("triton", "cuda")),
    ],
)
def test_latents_compile(content, layout, compiled):
    case = latent_cases.LatentCase(
        lengths=(100, 3), tokens=9, heads=2, rank=512, rope=64, content=content, layout=layout
    )
    filled = latent_cases.Filled(case, "cpu", 0)
    store = filled.store
    prompt.attend(filled.step, store)
    read.read(store, 100)
    if layout == "triton":
        entry_points.OPERATIONS.append(filled.step._replace(q=None), store)
        token = StepInputs(*(x[:, :, :1] for x in filled.step[:3]), scaling=case.scaling)
        entry_points.OPERATIONS.step(token, store)
        assert {"append_pages_kernel", "append_one_kernel"} <= set(compiled)
    assert {"prompt_kernel", "unpack_kernel"} <= set(compiled)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32))],
    ids=str,
)
def test_fused_pieces(dtype, compiled):
    q, k = (torch.zeros(8, n, 1, 128, dtype=dtype) for n in (32, 8))
    cos = torch.zeros(8, 1, 128, dtype=dtype)
    fused_kernels.rotary(q, k, cos, cos)
    fused_kernels.rotary(q, k, cos[..., :32], cos[..., :32])
    fused_kernels.rms_norm(torch.zeros(8, 1, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), 1e-5, 1.0)
    for activation in fused_kernels.ACTIVATIONS:
        fused_kernels.gated(*torch.zeros(2, 8, 1, 14336, dtype=dtype), activation)
    assert {"rotary_kernel", "rms_norm_kernel", "gate_kernel"} <= set(compiled)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (8, torch.bfloat16),
        pytest.param(1, torch.float16, marks=pytest.mark.slow),
        pytest.param(1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(8, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fused_products(dtype, rows, compiled):
    """Weights come sixteen bytes at a time and ahead of their use, and nothing is spilled."""
    x, weights = (
        torch.zeros(rows, 1, 4096, dtype=dtype),
        [torch.zeros(n, 4096, dtype=dtype) for n in (4096, 1024, 1024)],
    )
    fused_products.products(x, weights, [weight[:, 0].contiguous() for weight in weights])
    fused_products.gated_product(x, (weights[1], weights[2]), "silu")
    for name in ("products_kernel", "gated_product_kernel"):
        ptx = compiled[name].asm["ptx"]
        assert "cp.async.cg.shared.global" in ptx
        assert ".local" not in ptx
