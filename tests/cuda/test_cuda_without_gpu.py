"""The CUDA backend where no GPU is: bad input, which backend is chosen, what NVRTC makes of the sources, and how the rows of
latents are divided."""

import heapq
import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import FORMATS
from kernel_cases import Case

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.formats.fragment import LAYOUTS
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.triton_kernels.cuda import format_structs, latent, nvrtc


@pytest.fixture
def compile_module():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    return pytest.importorskip("hf_lowbit_kv.triton_kernels.cuda.nvrtc")


def test_missing_bindings(monkeypatch):
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: False)
    with pytest.raises(ImportError, match="cuda-bindings is not installed: "):
        choice.check_backend("cuda")


def test_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: True)
    with pytest.raises(ValueError, match="backend='cuda' needs an NVIDIA GPU, and the model is on 'cpu'"):
        choice.choose_backend("cuda", choice.LayerSetup(torch.device("cpu")))


def test_old_gpu(nvidia_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"compute capability \(8, 0\).*Tesla T4 has \(7, 5\).*backend='triton'"):
        choice.choose_backend("cuda", choice.LayerSetup(nvidia_gpu))


def test_what_the_cuda_kernels_do_not_cover_is_refused(nvidia_gpu):
    boosted, plain = parse_format("boosted2-r0.125"), parse_format("int2-token")
    with pytest.raises(ValueError, match=r"no kernels for values in format 'boosted2-r0.125'"):
        choice.choose_backend("cuda", choice.LayerSetup(nvidia_gpu, torch.float16, LayerSpec(plain, boosted)))
    setup = choice.LayerSetup(nvidia_gpu, torch.float16, LayerSpec(boosted, plain))
    assert choice.choose_backend("cuda", setup) == "cuda"


@pytest.mark.parametrize(
    ("key", "widths", "reason"),
    [
        ("dense|dense|0|0|128", None, None),
        ("dense|fp8|0|0|128", None, r"'fp8' / 'dense' and 'dense' / 'dense', not in 'dense' / 'fp8"),
        ("fp8|dense|0|128|128", None, "latents without a window, not for sink=0, residual=128"),
        ("fp8|dense|4|0|128", None, "latents without a window, not for sink=4, residual=0"),
        ("fp8|dense|0|0|32", None, "pages of 64, 128 or 256 tokens, not of 32"),
        ("fp8|dense|0|0|128", (576, 64), "not for 576 and 64"),
        ("fp8|dense|0|0|128", (512, 48), "not for 512 and 48"),
        ("fp8|dense|0|0|128", (512, 64), None),
    ],
)
def test_latents_that_the_cuda_kernels_do_not_cover(key, widths, reason, nvidia_gpu):
    spec = LayerSpec.parse(f"{key}|none|none|latent")
    for stored in (spec, choice.storage_spec(spec, "cuda")):
        setup = choice.LayerSetup(nvidia_gpu, torch.bfloat16, stored, widths)
        found = choice.BACKENDS["cuda"].why_not(setup)
        assert found is None if reason is None else re.search(reason.replace("'dense'", "'dense(@core-1)?'"), found)


def test_default_on_a_gpu(nvidia_gpu, monkeypatch):
    """`cuda` where it serves, else `triton`; and why."""
    found = {"capability": (9, 0), "compiler": None}
    monkeypatch.setattr(choice, "why_cuda_cannot_compile", lambda capability: found["compiler"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    device, spec = nvidia_gpu, Case().spec

    def check(dtype, chosen, reason, spec=spec):
        assert choice.choose_backend(None, choice.LayerSetup(device, dtype, spec)) == chosen
        why_slower = choice.why_not_faster(None, chosen, choice.LayerSetup(device, dtype, spec))
        assert why_slower is None if reason is None else reason in why_slower

    check(torch.bfloat16, "cuda", None)
    check(torch.float32, "triton", "computes in")
    boosted = LayerSpec(spec.key_format, parse_format("boosted2-r0.125"))
    check(torch.float16, "triton", "no kernels for values in format", boosted)
    found["compiler"] = "needs NVRTC"
    check(torch.float16, "triton", "needs NVRTC")
    found.update(compiler=None, capability=(7, 5))
    check(torch.float16, "triton", "Tesla T4")
    assert choice.why_not_faster("triton", "triton", choice.LayerSetup(device, torch.float16, spec)) is None
    found.update(capability=(9, 0))
    monkeypatch.setenv(choice.VARIABLE, "triton")
    assert choice.why_not_faster(None, "triton", choice.LayerSetup(device, torch.float32, spec)) is None
    monkeypatch.delenv(choice.VARIABLE)
    monkeypatch.setitem(choice.ON_GPU, "separate", ("triton",))
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
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: True)
    choice.why_cuda_cannot_compile.cache_clear()
    reason = choice.why_cuda_cannot_compile((9, 0))
    choice.why_cuda_cannot_compile.cache_clear()
    assert reason is None if expected is None else expected in reason


def test_no_other_source_includes_a_formats_files():
    sides = [(fmt, i) for pair in FORMATS for i, fmt in enumerate(map(parse_format, pair))]
    stored = [(fmt.with_layout(LAYOUTS[i]), bool(i)) for fmt, i in sides if format_structs.covered(fmt, bool(i))]
    needed = [format_structs.needs(fmt, 128, 128, torch.float16, transposed) for fmt, transposed in stored]
    files = {name for side in needed for name in (side.header, side.encoder_header)}
    assert len(files) > 10
    for path in [*nvrtc.SOURCES.glob("*.cu"), *nvrtc.SOURCES.glob("*.cuh")]:
        if path.name not in files:
            included = set(re.findall(r'#include "(.*)"', path.read_text(encoding="utf-8")))
            assert not included & files, path.name


def test_compile_failure_shows_the_log(compile_module):
    with pytest.raises(RuntimeError) as raised:
        compile_module.binary("attend.cu", (("NT", "1"),), "sm_80")
    if not isinstance(raised.value, compile_module.CompileError):
        pytest.skip("NVRTC's library is not installed")
    assert "use backend='triton'" in str(raised.value)
    assert "undefined" in str(raised.value)


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
