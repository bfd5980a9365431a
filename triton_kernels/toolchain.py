"""Tools that kernels need besides Python packages, and whether this machine has them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

INSTALL_TRITON = "pip install 'triton>=3.6'"


def _cuda_major() -> str | None:
    """The major version of torch's CUDA, e.g. "13"; `None` for builds for the CPU or ROCm."""
    return torch.version.cuda.partition(".")[0] if torch.version.cuda else None


def version(package: str) -> str | None:
    """The version of an installed Python package, or `None`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_bindings() -> str:
    """The command that installs the bindings for torch's version of CUDA."""
    major = _cuda_major()
    return f"pip install 'cuda-bindings{f'=={major}.*' if major else '>=12.9'}'"


def install_nvrtc() -> str:
    """The command that repairs bindings that do not find NVRTC."""
    installed, major = version("cuda-bindings"), _cuda_major()
    if installed and major and installed.partition(".")[0] != major:
        return f"cuda-bindings {installed} is not of torch's CUDA {torch.version.cuda}; {install_bindings()}"
    return f"pip install {'nvidia-cuda-nvrtc-cu12' if major == '12' else 'nvidia-cuda-nvrtc'}"


@functools.cache
def why_triton_cannot_launch() -> str | None:
    """Why Triton cannot launch kernels here, or `None`.

    Triton needs no other compiler for kernels. But a Python extension in C launches them, and a C compiler builds that
    extension at first use (`triton.runtime.build`).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from triton import knobs

    if knobs.build.impl is not None:  # the user's own build function
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler to launch kernels, and neither gcc nor clang is on PATH nor CC set"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    searched = [headers, *os.environ.get("CPATH", "").split(":"), *os.environ.get("C_INCLUDE_PATH", "").split(":")]
    if not any(folder and (Path(folder) / "Python.h").exists() for folder in searched):
        return f"Triton needs Python's headers to launch kernels, and {headers} has no Python.h"
    return None


def accelerator() -> torch.device | None:
    """The device type that torch can use here beside the CPU: `cuda` (NVIDIA; AMD in builds for ROCm), `xpu`, `mps`,
    ...; or `None`."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def triton_serves(device: torch.device) -> bool:
    """Whether the installed Triton compiles for devices of this type. Its interpreter serves a CPU."""
    if device.type in ("cpu", "cuda"):
        return True
    try:
        from triton.runtime import driver

        return driver.active.get_active_torch_device().type == device.type
    except Exception:  # not installed, or without a driver for this machine's devices
        return False


def why_gpu_cannot_launch() -> str | None:
    """Why neither Triton nor PyTorch's compiled steps can launch kernels on this machine's GPU; `None`: they can, or there is
    no GPU. They cannot if no launcher can be built and Triton's cache has none."""
    if not torch.cuda.is_available() or (reason := why_triton_cannot_launch()) is None:
        return None
    try:
        from triton.runtime import driver

        return None if driver.active.utils is not None else reason
    except Exception:  # Triton's driver cannot be loaded
        return reason
