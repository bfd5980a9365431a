"""The CUDA kernels as NVRTC compiles them, on a machine without a GPU."""

import pytest

from hf_lowbit_kv.backends.choice import has_cuda_bindings
from hf_lowbit_kv.triton_kernels.cuda import nvrtc as compile


def _why_no_nvrtc() -> str | None:
    if not has_cuda_bindings():
        return "cuda-bindings is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        return "NVRTC's library is not installed: pip install nvidia-cuda-nvrtc"
    return None


needs_nvrtc = pytest.mark.skipif(_why_no_nvrtc() is not None, reason=str(_why_no_nvrtc()))


def report(name: str, defines: tuple[tuple[str, str], ...], arch: str) -> str:
    """What NVRTC and its assembler say of the file `name` with these macros. Raises `CompileError` where they refuse it."""
    from cuda.bindings import nvrtc

    if int(arch.strip("sm_a")) not in nvrtc.nvrtcGetSupportedArchs()[1]:
        pytest.skip(f"this NVRTC does not know {arch}")
    _, log = compile._compile(compile.text(name, defines), name, arch, ("--ptxas-options=-v",))
    return log
