"""NVRTC compiles the CUDA kernels of every preset for GPUs of three generations, on a machine without one, and the assembler
finds registers enough.

Which kernels those are is not written down here: each preset's layer takes steps through the entry points, and what these load
is recorded instead of launched. Of latents: the kernel for each number of heads.
"""

import functools
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cases import every_preset
from compiled import needs_nvrtc, report
from emulated import Noted, emulated
from kernel_cases import records_for
from latent_cases import LatentCase

from hf_lowbit_kv.backends.choice import BACKENDS, storage_spec
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points, geometry, latent, nvrtc

#: of the assembler's report: a kernel's name; a function's name, and bytes of its local memory
ENTRY = r"Compiling entry function '(\w+)'"
FUNCTION = (
    r"Function properties for (\w+)\s[^\d]*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


pytestmark = needs_nvrtc


class Gpu(NamedTuple):
    """What a layer's kernels are laid out for: architecture, multiprocessors, KiB of shared memory of each."""

    arch: str
    processors: int
    shared: int


A100, H200, RTX5090 = Gpu("sm_80", 108, 164), Gpu("sm_90", 132, 228), Gpu("sm_120", 170, 100)


def kinds() -> dict[tuple, str]:
    """The first preset of all that compile to the same: with the same formats and transforms."""
    found: dict[tuple, str] = {}
    for name in every_preset():
        spec = get_preset(name).spec()
        if (
            BACKENDS["cuda"].operations(spec.attention_kind.name) is cuda_entry_points.OPERATIONS
            and geometry.why_not(spec, None, None, None) is None
        ):
            found.setdefault((*spec.formats, spec.key_transform, spec.value_transform, spec.direct), name)
    return found


KINDS = list(kinds().values())
#: of each pair of families of formats the first
FAMILIES = list({tuple(map(type, kind[:2])): name for kind, name in reversed(kinds().items())}.values())


def wanted_by(
    preset: str, gpu: Gpu, head_dim: int, tokens: int, monkeypatch, head_dim_v: int | None = None
) -> list[tuple]:
    """File names and macros of what a layer with four query heads a KV head loads for a step of so many tokens, and to store
    tokens. head_dim_v: of values; `None`: as of keys."""
    dims = head_dim, head_dim_v or head_dim
    spec, wanted, heads, dtype = storage_spec(get_preset(preset).spec(), "cuda"), {}, 2, torch.float16
    records = records_for(spec, dims, heads)
    store = PagedStore(spec, 1, heads, *dims, dtype, "cpu", 512, parameters=records)
    sizes = (4 * heads, dims[0]), (heads, dims[0]), (heads, dims[1])
    q, k, v = (torch.zeros(1, count, tokens, width, dtype=dtype) for count, width in sizes)
    with emulated(monkeypatch, gpu.shared, gpu.processors, functools.partial(Noted, wanted)) as cuda:
        cuda.OPERATIONS.step(StepInputs(q, k, v, scaling=1.0), store)
        cuda.OPERATIONS.append(StepInputs(None, k, v), store)
    return list(wanted)


class Local(NamedTuple):
    """Local memory of a function, bytes: its frame, and what it stores and loads because registers do not suffice."""

    frame: int
    stores: int
    loads: int


@functools.cache
def local_memory(name: str, defines: tuple, arch: str) -> dict[str, Local]:
    """By function, what the assembler says of a compiled file."""
    log = report(name, defines, arch)
    found = {function: Local(*map(int, numbers)) for function, *numbers in re.findall(FUNCTION, log)}
    assert found
    assert set(re.findall(ENTRY, log)) <= found.keys(), log
    return found


#: bytes of local memory that are known, by architecture, preset, head_dim, tokens of the step and function (the most of NVRTC
#: 13.0 and 13.5). Where no note says otherwise, they wait outside of the loop over pages
KNOWN = {
    ("sm_90", "eigen-3", 128, 1, "attend"): 48,
    ("sm_90", "bitdecoding-kt-4", 128, 1, "attend"): 8,
    ("sm_90", "vecinfer-2", 128, 1, "attend"): 24,
    ("sm_90", "vecinfer-4", 64, 1, "attend"): 60,
    ("sm_90", "vecinfer-1.25", 64, 1, "attend"): 140,
    ("sm_90", "eigen-4", 128, 1, "attend"): 48,
    ("sm_90", "vecinfer-4", 128, 4, "attend"): 8,
    ("sm_90", "vecinfer-1.5", 64, 1, "attend"): 132,
    ("sm_90", "dense", 128, 4, "attend"): 108,
    # wide heads, with more query rows than a decode step has; in which loop was not looked at
    ("sm_120", "int8", 512, 2, "attend"): 16,
    ("sm_120", "int8", 192, 4, "attend"): 88,
    ("sm_90", "kivi-4", 192, 2, "attend"): 152,
    ("sm_90", "int8", 192, 4, "attend"): 60,
    ("sm_90", "int6", 192, 4, "attend"): 84,
    ("sm_90", "fp8", 192, 4, "attend"): 64,
    # inside of that loop, too: 5 of its 1347 instructions; 10 of 1097
    ("sm_90", "vecinfer-1.25", 128, 1, "attend"): 176,
    ("sm_90", "vecinfer-3", 64, 1, "attend"): 168,
    # packing: a thread's channels, in an array whose index is known late
    ("sm_120", "eigen-2", 128, 1, "attend"): 48,
    ("sm_120", "eigen-2", 128, 1, "append_one"): 64,
    ("sm_90", "eigen-3", 128, 1, "append_one"): 288,
    ("sm_90", "eigen-4", 64, 1, "append_one"): 76,
}
#: of any preset: storing keeps registers over its calls, once per token or once per page
KNOWN_OF_ALL = {"append_one": 40, "append_pages": 32}


def check(preset: str, gpu: Gpu, head_dim: int, tokens: int, monkeypatch, head_dim_v: int | None = None) -> None:
    """What the layer loads compiles, and no function has more local memory than is known."""
    wanted = wanted_by(preset, gpu, head_dim, tokens, monkeypatch, head_dim_v)
    assert {"attend.cu", "append.cu"} <= {name for name, _ in wanted}
    for name, defines in wanted:
        for function, found in local_memory(name, defines, gpu.arch).items():
            allowed = KNOWN.get((gpu.arch, preset, head_dim, tokens, function), KNOWN_OF_ALL.get(function, 0))
            assert max(found) <= allowed, f"{name}, {function} of {preset}, head_dim={head_dim}, {gpu.arch}: {found}"


def fast(names: list[str], some: list[str]) -> list:
    """Parameters; those that are not among `some` are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


#: codebooks, static codes and plain tokens are compiled only by g++
FAST = ["kitty", "fp8"]  # kivi-2 for another GPU, and with several tokens


@pytest.mark.parametrize("preset", fast(KINDS, FAST))
def test_decode_step(preset, monkeypatch):
    check(preset, H200, 128, 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("preset", KINDS)
def test_heads_of_64_channels(preset, monkeypatch):
    check(preset, H200, 64, 1, monkeypatch)


@pytest.mark.parametrize("preset", fast(FAMILIES, ["kivi-2"]))
def test_step_of_several_tokens(preset, monkeypatch):
    """Sixteen query rows a KV head."""
    check(preset, H200, 128, 4, monkeypatch)


@pytest.mark.parametrize("preset", fast(FAMILIES, ["kivi-2"]))
@pytest.mark.parametrize("gpu", [A100, pytest.param(RTX5090, marks=pytest.mark.slow)], ids=lambda gpu: gpu.arch)
def test_other_gpus(gpu, preset, monkeypatch):
    check(preset, gpu, 128, 1, monkeypatch)


#: the heads of Gemma 4's global layers and of MiMo-V2
WIDE_HEADS = [("kivi-2", H200, (512, 512), 1)]
WIDE_HEADS += [
    pytest.param(preset, gpu, widths, tokens, marks=pytest.mark.slow)
    for preset in ("kivi-4", "int8", "int6", "fp8")
    for gpu in (H200, A100, RTX5090)
    for widths, tokens in (((512, 512), 1), ((512, 512), 2), ((192, 128), 2), ((192, 128), 4))
    if gpu == H200 or preset in ("kivi-4", "int8")
]


@pytest.mark.parametrize(("preset", "gpu", "widths", "tokens"), WIDE_HEADS)
def test_wide_heads(preset, gpu, widths, tokens, monkeypatch):
    check(preset, gpu, widths[0], tokens, monkeypatch, widths[1])


def test_the_walk_meets_every_file():
    """Each source file that is loaded, but for those of latents, is loaded for one of the presets that are always tried."""
    with pytest.MonkeyPatch.context() as patch:
        met = {name for preset in FAMILIES for name, _ in wanted_by(preset, H200, 128, 1, patch)}
    files = {path.name for path in nvrtc.SOURCES.glob("*.cu")}
    assert met == {name for name in files if not name.startswith("latent")}


# ---- latents --------------------------------------------------------------------------------------------------------


DEEPSEEK = {"rank": 512, "rope": 64, "page_size": 128}


def spilled(log: str, kernel: str) -> bool:
    """Whether a kernel of this log spills registers."""
    properties = log.split(f"Function properties for {kernel}\n")[1].split("Compiling entry")[0]
    assert "spill stores" in properties
    return "0 bytes spill stores, 0 bytes spill loads" not in properties


def check_latent(log: str, kernel: str) -> None:
    assert not spilled(log, kernel), log
    assert "warning" not in log.lower(), log
    # ptxas's words for products of a warp group that do not overlap, or wait more than the source requires
    assert "serialized" not in log, log
    assert "injected" not in log, log


@pytest.mark.parametrize(
    ("arch", "convert", "case"),
    [
        ("sm_80", False, LatentCase(**DEEPSEEK)),
        pytest.param("sm_90", True, LatentCase(**DEEPSEEK, dtype=torch.float16), marks=pytest.mark.slow),
        pytest.param("sm_120", True, LatentCase(rank=192, rope=128, page_size=64), marks=pytest.mark.slow),
    ],
)
def test_narrow(arch, convert, case):
    defines = latent.defines(case.spec, case.rank, case.rope, case.dtype, convert)
    check_latent(report("latent.cu", defines, arch), "latent_attend")


@pytest.mark.parametrize(
    ("heads", "tokens", "dtype", "rope"),
    [
        (16, 1, torch.bfloat16, 64),
        (128, 8, torch.float16, 128),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((16, 2, torch.float16, 64), (32, 1, torch.bfloat16, 128), (64, 1, torch.bfloat16, 64))
        ),
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
    check_latent(report(*compiled[0]), launch.kernel)
    assert len(compiled) == 1
