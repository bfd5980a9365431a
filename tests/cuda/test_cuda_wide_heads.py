"""Heads of 512 channels, which two warps divide (`exchange.cuh`), and keys wider than values, without a GPU: the checks of
`kernel_checks` on kernels compiled for the CPU."""

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated, needs_emulator
from kernel_cases import Case, assert_same_state, check_steps, filled, generator, random_step, relative_error
from kernel_matrix import EIGEN_2

from hf_lowbit_kv.backends import choice as backends
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels.cuda import geometry, modules

pytestmark = needs_emulator

PAGES = {"page_size": 128, "residual": 128, "sink": 32}
WIDE = {"head_dim": 512}
#: KiB of shared memory of a multiprocessor: RTX 30 and 40, A100, H100
SHARED = {"small": 100, "A100": 164, "H100": 228}
#: MiMo-V2
KEYS = {"head_dim": 192, "head_dim_v": 128}
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    with emulated(monkeypatch) as cuda:
        yield cuda


#: one and two turns of the exchange (more than four query rows, or not), each way in which scales and codes lie in pages
ATTENDS = [
    Case(keys="int2-channel", values="int2-token", **WIDE, **PAGES, lengths=(700, 1), heads=1, groups=2),
    Case(keys="int4-token-g64", values="int5-token", **WIDE, lengths=(300, 40), heads=1, groups=6, tokens=2, padded=True),
    Case(keys="int8-channel", values="int8-token", **KEYS, **PAGES, lengths=(300, 40), heads=1, groups=16),
]  # fmt: skip
SLOW_ATTENDS = [
    Case(keys="fp8-centered", values="fp8", **WIDE, **PAGES, lengths=(300, 1), heads=1, dtype=BF16, key_offset=300.0),
    Case(keys="int8-token-g32", values="int8-channel", **WIDE, lengths=(300, 1), heads=1, softcap=20.0, sinks=True),
    Case(keys="dense", values="dense", **WIDE, tokens=5, padded=True, sink=0, residual=0, heads=1),
    Case(keys="int5-channel", values="int6-channel-g32", **WIDE, lengths=(300,), heads=1, tokens=3, padded=True, sinks=True),
    Case(keys="vq-d4b8", values="vq-d4b8", **WIDE, **PAGES, lengths=(300, 1), heads=1),
    Case(keys="int4-channel", values="static-2-tn", **WIDE, **PAGES, lengths=(300, 40), heads=1),
    Case(keys="int4-channel", values="static-3-tn", **WIDE, lengths=(300, 40), heads=1, groups=16),
    Case(keys="int8-channel-g32", values="int2-token-g128", **WIDE, **PAGES, lengths=(500,), heads=1, outliers=True),
    Case(keys="int2-channel", values="int2-token", **WIDE, **PAGES, lengths=(1500,), heads=1, groups=1, heavy_sink=5.0),
    Case(keys="int4-channel", values="int4-token-g32", **WIDE, **PAGES, lengths=(600,), heads=1, spread="values"),
    Case(keys="int2-channel", values="int2-token", **KEYS, **PAGES, lengths=(700, 1), heads=1, groups=8),
    Case(keys="fp8-centered", values="fp8", **KEYS, lengths=(300, 40), heads=1, groups=3, tokens=3, padded=True, sinks=True),
    Case(keys="boosted2-r0.125", values="int2-token", **KEYS, **PAGES, lengths=(500, 40), heads=1, dtype=BF16),
    Case(keys="int6-token", values="int5-token", **KEYS, lengths=(300,), heads=1),
    Case(keys="int4-token-g64", values="dense", **KEYS, lengths=(300,), heads=1),
    Case(keys="vq-d4b8", values="vq-d4b8", **KEYS, **PAGES, lengths=(300, 1), heads=1),
    Case(**EIGEN_2, **KEYS, **PAGES, lengths=(300, 1), heads=1),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*ATTENDS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_ATTENDS)], ids=str
)
def test_attend(case):
    kernels.check_attend(fragment(case))


#: outputs are rotated back over both slices, whose sums may be relative to different maxima
ROTATED = {"transform": "hadamard", "value_transform": "hadamard"}
TRANSFORMED = [
    Case(keys="int2-channel", values="int2-token-g64", **WIDE, **PAGES, lengths=(300, 1), heads=1, **ROTATED),
]
SLOW_TRANSFORMED = [
    Case(**WIDE, lengths=(90,), heads=1, **ROTATED | {"transform": "eigen"}),
    Case(head_dim=192, lengths=(90,), heads=1, tokens=10, **ROTATED | {"transform": "smooth+hadamard"}),
    Case(**KEYS, lengths=(90,), heads=1, **ROTATED | {"transform": "eigen"}),
]


@pytest.mark.parametrize(
    "case", [*TRANSFORMED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_TRANSFORMED)], ids=str
)
def test_attend_transformed(case):
    kernels.check_attend_transformed(fragment(case))


STEPS = [
    (Case(keys="int4-channel", values="int4-token", **WIDE, lengths=(94, 90), heads=1), 5),
]
SLOW_STEPS = [
    (Case(keys="int2-channel", values="int2-token", **WIDE, **PAGES, lengths=(286, 700), heads=1), 4),
    (Case(keys="int8-token", values="int8-token", **WIDE, lengths=(98, 0), residual=0, heads=1, padded=True), 6),
    (Case(keys="int2-channel", values="int2-token", **KEYS, **PAGES, lengths=(286, 700), heads=1), 4),
]


@pytest.mark.parametrize(
    ("case", "steps"), [*STEPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_STEPS)], ids=str
)
def test_step(case, steps, launch):
    check_steps(launch, fragment(case), steps, kernels.SEED, "cpu", twin=False)


def test_layers_that_share_attend_before_the_last_one_stores(launch):
    """Several launches of attention on one layer, then the step that stores: all see the same tokens."""
    case = fragment(STEPS[0][0])
    gen = generator(case, kernels.SEED)
    ref, dev = filled(case, gen, "cpu")
    step = random_step(case, gen)
    exact = reference.OPERATIONS.attend(step.float().inputs(case), ref)
    outs = [kernels.attend_poisoned(step.inputs(case), dev) for _ in range(2)]
    assert not dev.state.scratch.any()
    outs.append(launch.OPERATIONS.step(step.inputs(case), dev))
    assert all(relative_error(out, exact) < 1e-3 for out in outs)
    reference.OPERATIONS.append(StepInputs(None, step.k, step.v), ref)
    assert_same_state(ref.state, dev.state)


STORES = [
    (Case(keys="fp8-centered", values="fp8", **WIDE, heads=1, lengths=(5,)), [70, 0]),
]
SLOW_STORES = [
    (Case(keys="int4-channel", values="int4-token", **WIDE, heads=1, padded=True), [70, 0, 0]),
    (Case(keys="int6-token", values="int5-token-g64", **WIDE, residual=0, heads=1, outliers=True), [70, 0]),
    (Case(keys="static-44422000", values="static-3-tn", **WIDE, heads=1, lengths=(5,)), [70]),
    (Case(keys="vq-d4b8", values="vq-d2b3", **WIDE, lengths=(5,), heads=1), [70]),
    (Case(keys="boosted2-r0.25", values="int4-token", **KEYS, heads=1, padded=True), [90, 70, 0, 0]),
]


@pytest.mark.parametrize(
    ("case", "chunks"), [*STORES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_STORES)], ids=str
)
def test_store(case, chunks):
    assert kernels.check_store(fragment(case), chunks), "the chunks are too short for a page"


@pytest.mark.parametrize("barrier", ["partial_scores_written", "partial_scores_read"])
def test_a_missing_barrier_is_seen(barrier, launch, monkeypatch):
    """Of the two warps that divide a head, in the kernel with a single turn."""
    monkeypatch.setattr(modules, "load", lambda name, defines, device: cuda_emulator.Module(name, defines, barrier))
    case = Case(keys="int4-token-g64", values="int5-token", **WIDE, lengths=(300, 40), heads=1, groups=12)
    with pytest.raises(AssertionError, match="races in shared memory"):
        kernels.check_attend(fragment(case))


@pytest.mark.parametrize(("rows", "gpu"), [(2, "small"), (2, "H100"), (8, "A100"), (16, "small"), (16, "H100")])
def test_both_count_the_same(rows, gpu):
    """Shared memory, in Python and in C++, with warps in pairs."""
    for keys, values, widths in (("int2-channel", "int2-token", WIDE), ("int8-channel", "int8-token", KEYS)):
        case = fragment(Case(keys=keys, values=values, **widths, **PAGES))
        shape = geometry.choose_shape(case.spec, *case.dims, case.dtype, rows, 8, 132, SHARED[gpu] * 1024)
        assert case.head_dim == 192 or shape.warps % 2 == 0
        appends, sinks = geometry.can_append(case.spec, *case.dims, shape), geometry.Sinks.NONE
        defines = geometry.attend_defines(
            case.spec, *case.dims, case.dtype, shape, False, sinks, False, appends=appends
        )
        assert cuda_emulator.complaints(cuda_emulator.full_text("attend.cu", defines)) == ""


def test_formats_whose_heads_are_not_divided_get_triton(nvidia_gpu, monkeypatch):
    """The choice says why. Others, and heads of at most 256 channels, get the CUDA kernels."""
    monkeypatch.setattr(backends, "triton_serves", lambda device: True)
    for keys, values, reason in (
        ("int4-channel", "int2-token", None),
        ("boosted2-r0.125", "int2-token", "keys in format 'boosted2-r0.125' with head_dim=512; allowed: up to 256"),
        ("static-44422000", "static-2-tn", "keys in format 'static-44422000' with head_dim=512"),
        ("vq-d8b10", "vq-d4b8", "keys in format 'vq-d8b10' with head_dim=512"),
    ):
        spec = Case(keys=keys, values=values).spec
        for widths in ((512, 512), (256, 256)):
            setup = backends.LayerSetup(nvidia_gpu, torch.float16, spec, widths)
            refused = widths[0] == 512 and reason is not None
            chosen = backends.choose_backend(None, setup)
            assert chosen == ("triton" if refused else "cuda"), (keys, widths)
            if refused:
                assert f"cuda has no kernels for {reason}" in backends.describe_backend(None, chosen, setup)
    setup = backends.LayerSetup(nvidia_gpu, torch.float16, Case().spec, (512, 128))
    assert "heads of 512 and 128 channels" in backends.describe_backend(None, "triton", setup)
    setup = backends.LayerSetup(nvidia_gpu, torch.float16, Case(keys="boosted2-r0.125").spec, (512, 512))
    with pytest.raises(ValueError, match=r"head_dim=512; allowed: up to 256; use backend='triton'"):
        backends.choose_backend("cuda", setup)
