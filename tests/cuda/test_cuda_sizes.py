"""Sizes that Python and C++ both compute (shared memory, arguments, parts of a page), and GPUs with less shared memory."""

from types import SimpleNamespace

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated, needs_emulator
from kernel_cases import Case, check_steps

from hf_lowbit_kv.backends import choice as backends
from hf_lowbit_kv.triton_kernels.cuda import geometry, modules

pytestmark = needs_emulator
#: KiB of shared memory of a multiprocessor: RTX 30 and 40, A100, H100
SHARED = {"small": 100, "A100": 164, "H100": 228}
WHOLE = {"head_dim": 128, "page_size": 128, "residual": 128}


def compiler_errors(name: str, defines: tuple[tuple[str, str], ...]) -> str:
    """The errors of g++: empty if all assertions hold."""
    return cuda_emulator.complaints(cuda_emulator.full_text(name, defines))


def attend_defines(case: Case, shared: int) -> tuple[tuple[str, str], ...]:
    case = fragment(case)
    shape = geometry.choose_shape(case.spec, *case.dims, case.dtype, case.groups, 8, 132, shared * 1024)
    appends = geometry.can_append(case.spec, *case.dims, shape)
    sinks = geometry.Sinks.NONE
    return geometry.attend_defines(case.spec, *case.dims, case.dtype, shape, False, sinks, False, appends=appends)


@pytest.mark.parametrize(
    "shared",
    [SHARED["small"], pytest.param(SHARED["A100"], marks=pytest.mark.slow), SHARED["H100"]],
    ids=SHARED,
)
@pytest.mark.parametrize(
    "case",
    [
        Case(keys="int2-channel", values="int2-token", **WHOLE),
        Case(keys="int4-token-g32", values="int4-channel-g32", **WHOLE),
        Case(keys="int8-token-g64", values="int8-channel", head_dim=256, head_dim_v=128, groups=16),
        Case(keys="boosted2-r0.3-variance", values="dense", head_dim=80, groups=16),
        Case(keys="vq-d4b8", values="int2-token", **WHOLE),
    ],
    ids=str,
)
def test_sizes_in_python_and_cpp_agree(case, shared):
    assert compiler_errors("attend.cu", attend_defines(case, shared)) == ""
    if shared == SHARED["H100"]:  # which storing does not depend on
        case = fragment(case)
        assert compiler_errors("append.cu", geometry.append_defines(case.spec, *case.dims, case.dtype)) == ""


@pytest.mark.parametrize("name", ["SHARED_BYTES", "ARGUMENT_BYTES", "APPEND_ARGUMENT_BYTES", "VALUE_AT"])
def test_a_difference_does_not_compile(name):
    defines = dict(attend_defines(Case(**WHOLE), 228))
    defines[name] = str(int(defines[name]) - 16)
    assert "static assertion failed" in compiler_errors("attend.cu", tuple(defines.items()))


def test_a_difference_of_a_loaded_kernel_raises(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=2, shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(modules, "properties", lambda device: properties)
    monkeypatch.setattr(modules, "load", lambda *args: SimpleNamespace(integer=lambda name: 7))
    modules.forget()
    case = fragment(Case())
    fields = dict.fromkeys(modules.AttendVariant._fields, False)
    fields |= {"rows": 4, "heads": 4, "sinks": geometry.Sinks.NONE, "transform": None}
    sizes = dict(zip(("head_dim_k", "head_dim_v"), case.dims, strict=True))
    variant = modules.AttendVariant(
        **fields | sizes | {"spec": case.spec, "dtype": case.dtype, "device": torch.device("cpu")}
    )
    with pytest.raises(RuntimeError, match=r"compiled with shared_bytes=7, and [0-9]+ is what Python counts"):
        modules.attend_module(variant)
    modules.forget()


def test_the_window_does_not_bound_the_warps():
    """If the window would limit the warps, it is narrow. An H100 has room for wide windows at head_dim 128."""
    for keys, values, small, large in (
        ("int2-channel", "int2-token", 8, 12),
        ("int4-channel", "int4-token", 4, 12),
        ("int8-token", "int8-token", 4, 12),
    ):
        case = fragment(Case(keys=keys, values=values, **WHOLE))
        for shared, warps in ((100, small), (228, large)):
            shape = geometry.choose_shape(case.spec, *case.dims, case.dtype, 4, 64, 132, shared * 1024)
            assert shape.warps * shape.warp_groups == warps
            assert shape.narrow == (keys == "int2-channel" and shared == 100)


def test_where_there_is_no_room_another_backend_serves(nvidia_gpu, monkeypatch):
    spec = Case(keys="vq-d4b8", values="vq-d8b12").spec
    for shared, chosen in ((64, "triton"), (228, "cuda")):
        properties = SimpleNamespace(shared_memory_per_multiprocessor=shared * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        setup = backends.LayerSetup(nvidia_gpu, torch.float16, spec, (256, 256))
        assert backends.choose_backend(None, setup) == chosen
        why_slower = backends.why_not_faster(None, chosen, setup)
        assert (chosen == "cuda") == (why_slower is None)
        assert why_slower is None or "KiB of shared memory for keys 'vq-d4b8" in why_slower


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case(keys="int2-channel", values="int2-token", **WHOLE, sink=32, lengths=(286, 700), heads=1), 3),
        pytest.param(
            *(Case(keys="boosted2-r0.125", values="int2-token", **WHOLE, lengths=(387,), heads=1, padded=True), 4),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_narrow_window(case, steps, monkeypatch):
    """Outputs, bytes and counters of steps on a GPU with 100 KB of shared memory."""
    case = fragment(case)
    assert geometry.choose_shape(case.spec, *case.dims, case.dtype, 4, len(case.lengths), 2, 100 * 1024).narrow
    with emulated(monkeypatch, shared=100) as cuda:
        check_steps(cuda, case, steps, kernels.SEED, "cpu", twin=False)
