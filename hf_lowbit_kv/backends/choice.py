"""The backends, the layers that each of them supports, and the choice of a layer's backend.

A name determines the backend: the `backend=` argument of a cache, or else the environment variable
`HF_LOWBIT_KV_BACKEND`. A named backend that cannot run raises an error.

Without a name, the device determines it (`_default_backend`). An NVIDIA GPU gets `cuda` if `cuda` supports the layer,
otherwise `triton`. An AMD GPU gets `triton`, a CPU `cpu`, any other device `torch`. A latent, or a
format registered without kernels, gets `torch` if no kernel supports it. Any other such layer raises `ValueError` with the
reason. `torch` is slow, so the cache then warns. A cache's `summary()` shows the backend, and why it is not a faster one.

A new backend is a class derived from `Backend` and a line in `BACKENDS`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from ..formats import core_matrices, fragment
from ..formats.registered import without_kernels
from ..storage import reference
from ..storage.layer_spec import LayerSpec
from ..storage.step import Operations
from ..triton_kernels.toolchain import (
    INSTALL_TRITON,
    install_bindings,
    install_nvrtc,
    triton_serves,
    why_gpu_cannot_launch,
    why_triton_cannot_launch,
)
from . import cpu

VARIABLE = "HF_LOWBIT_KV_BACKEND"


class LayerSetup(NamedTuple):
    """The properties of a layer on which the choice of its backend depends."""

    device: torch.device
    dtype: torch.dtype | None = None
    """the model's; `None`: any"""
    spec: LayerSpec | None = None
    """of the layer; `None`: any"""
    widths: tuple[int, int] | None = None
    """channels of the two streams; `None`: any"""

    @property
    def attention_kind(self) -> str:
        return self.spec.attention_kind.name if self.spec is not None else "separate"


class Backend(ABC):
    """Runs the operations of layers, and decides which layers it supports. Instances are immutable."""

    name: ClassVar[str]
    #: by attention kind: the page layouts of the two streams that its kernels read
    layouts: ClassVar[dict[str, tuple[str, str]]] = dict.fromkeys(("separate", "latent"), ("planar-1", "planar-1"))
    #: advice at the end of error messages about layers on a GPU
    advice: ClassVar[str] = ""

    @abstractmethod
    def why_not(self, setup: LayerSetup) -> str | None:
        """The reason why this backend does not support the layer, or `None`."""

    def missing(self) -> str | None:
        """The missing package, or `None`."""
        return None

    @abstractmethod
    def operations(self, attention_kind: str = "separate") -> Operations:
        """The operations for layers of this attention kind. This imports kernels; `why_not` does not."""

    def check(self, setup: LayerSetup, source: str) -> None:
        """Raise `ValueError` if it does not support a layer. source: the argument or variable that named this backend."""
        if (reason := self.why_not(setup)) is not None:
            raise ValueError(f"{source}={self.name!r} {reason}{self.advice if setup.device.type == 'cuda' else ''}")


class Torch(Backend):
    """The reference: any device, all layers."""

    name = "torch"

    def operations(self, attention_kind: str = "separate") -> Operations:
        return reference.OPERATIONS

    def why_not(self, setup: LayerSetup) -> str | None:
        return None


class Cpu(Backend):
    """CPUs, with PyTorch's own attention."""

    name = "cpu"

    def operations(self, attention_kind: str = "separate") -> Operations:
        return cpu.OPERATIONS

    def why_not(self, setup: LayerSetup) -> str | None:
        device = setup.device.type
        return None if device == "cpu" else f"needs the model on the CPU, and it is on {device!r}"


class Triton(Backend):
    """GPUs that Triton supports."""

    name = "triton"

    def operations(self, attention_kind: str = "separate") -> Operations:
        from hf_lowbit_kv.triton_kernels.entry_points import OPERATIONS

        return OPERATIONS

    def missing(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return f"Triton is not installed: {INSTALL_TRITON}, or use backend='torch' (slow reference)"
        return None

    def why_not(self, setup: LayerSetup) -> str | None:
        if setup.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a GPU, and the model is on 'cpu'; allowed there: 'cpu', 'torch'"
        if not triton_serves(setup.device):
            where = setup.device.type
            return f"needs a GPU that Triton supports, and the model is on {where!r}; allowed there: 'torch'"
        if setup.device.type != "cpu" and (reason := why_gpu_cannot_launch()) is not None:
            return (
                f"cannot run: {reason}. Install a C compiler, or use backend='cuda', whose kernels need none, or "
                "backend='torch' (slow reference)"
            )
        if setup.spec is None:
            return None
        from hf_lowbit_kv.triton_kernels.registry import why_not

        return why_not(setup.spec.formats)


class Cuda(Backend):
    """NVIDIA GPUs, compute capability 8.0 and later; models in float16 or bfloat16. Its page layouts are not planar."""

    name = "cuda"
    layouts: ClassVar[dict[str, tuple[str, str]]] = {
        "separate": fragment.LAYOUTS,
        "latent": (core_matrices.LAYOUT, core_matrices.LAYOUT),
    }
    advice = "; use backend='triton'"
    #: lowest compute capability of the kernels
    capability: ClassVar[tuple[int, int]] = (8, 0)
    #: dtypes of models
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)

    def operations(self, attention_kind: str = "separate") -> Operations:
        if attention_kind == "latent":
            from hf_lowbit_kv.triton_kernels.cuda.latent import OPERATIONS as LATENTS

            return LATENTS
        from hf_lowbit_kv.triton_kernels.cuda.cuda_entry_points import OPERATIONS

        return OPERATIONS

    def missing(self) -> str | None:
        if torch.version.hip is None and not has_cuda_bindings():  # on ROCm no package would help
            return f"cuda-bindings is not installed: {install_bindings()}, or use backend='triton'"
        return None

    def why_not(self, setup: LayerSetup) -> str | None:
        device = setup.device
        if device.type != "cuda":
            return f"needs an NVIDIA GPU, and the model is on {device.type!r}"
        if is_rocm(device):
            return f"needs an NVIDIA GPU, and this is a ROCm build of torch ({torch.cuda.get_device_name(device)})"
        if (capability := torch.cuda.get_device_capability(device)) < self.capability:
            name = torch.cuda.get_device_name(device)
            return f"needs compute capability {self.capability}, and {name} has {capability}"
        if setup.dtype not in (None, *self.dtypes):
            return f"computes in {self.dtypes}, not in {setup.dtype}"
        if importlib.util.find_spec("triton") is None:
            return f"needs Triton for long prompts: {INSTALL_TRITON}"
        if setup.spec is not None:
            if setup.attention_kind == "latent":
                from hf_lowbit_kv.triton_kernels.cuda.latent import why_not
            else:
                from hf_lowbit_kv.triton_kernels.cuda.geometry import why_not
            if (reason := why_not(setup.spec, setup.widths, setup.dtype, device)) is not None:
                return reason
        return why_cuda_cannot_compile(capability)


#: every backend, by name
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Torch(), Cpu(), Triton(), Cuda())}
#: defaults on a GPU, by attention kind. The first that supports the layer is used, otherwise the last
ON_GPU: dict[str, tuple[str, ...]] = {"separate": ("cuda", "triton"), "latent": ("cuda", "triton", "torch")}


def backend_from_environment() -> str | None:
    return os.environ.get(VARIABLE) or None  # an empty value counts as not set


def is_rocm(device: torch.device) -> bool:
    """Whether the device is an AMD GPU: torch for ROCm also calls these "cuda"."""
    return device.type == "cuda" and torch.version.hip is not None


def has_cuda_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


@functools.cache
def why_cuda_cannot_compile(capability: tuple[int, int]) -> str | None:
    """Why CUDA kernels cannot be compiled and loaded here, or `None`."""
    if not has_cuda_bindings():
        return f"needs cuda-bindings: {install_bindings()}"
    try:
        from cuda.bindings import driver, nvrtc

        status, version, _ = nvrtc.nvrtcVersion()
        _, architectures = nvrtc.nvrtcGetSupportedArchs()
        _, supported = driver.cuDriverGetVersion()
    except (ImportError, OSError, RuntimeError) as error:  # the bindings do not find libraries of their version
        return f"needs NVRTC and the driver's library ({error}): {install_nvrtc()}"
    if int(status) != 0:
        return f"needs NVRTC, which fails ({status!r})"
    if 10 * capability[0] + capability[1] not in architectures:
        return f"needs an NVRTC that knows this GPU, and {version} knows {architectures}"
    if version > supported // 1000:
        return f"needs a driver for CUDA {version}, and this one is for {supported // 1000}"
    return None


def check_backend(backend: str | None) -> None:
    """Raise if the name does not exist, or the backend is not installed. backend: `None` takes the name from
    `HF_LOWBIT_KV_BACKEND`. Called when a cache is created."""
    name, source = (backend, "backend") if backend is not None else (backend_from_environment(), VARIABLE)
    if name is None:
        return
    if name not in BACKENDS:
        raise ValueError(f"{source}={name!r} is not known; allowed: {tuple(BACKENDS)}")
    if (missing := BACKENDS[name].missing()) is not None:
        raise ImportError(f"{source}={name!r} was requested, but {missing}")


def choose_backend(backend: str | None, setup: LayerSetup) -> str:
    """The name of the backend for a layer. Raises if that backend does not support the layer."""
    check_backend(backend)
    requested = backend or backend_from_environment()
    source = VARIABLE if backend is None and requested else "backend"
    chosen = requested or _default_backend(setup)
    BACKENDS[chosen].check(setup, source)
    return chosen


def _default_backend(setup: LayerSetup) -> str:
    if setup.device.type != "cuda":
        return "cpu" if setup.device.type == "cpu" else "torch"
    *preferred, last = ON_GPU[setup.attention_kind]
    for name in preferred:
        if BACKENDS[name].why_not(setup) is None:
            return name
    if setup.spec is not None and without_kernels(setup.spec.formats) is not None:
        return "torch"  # a format from outside the package; the cache warns that this is slow
    if (missing := BACKENDS[last].missing()) is not None:
        raise ImportError(f"on this GPU backend {last!r} is the default, and {missing}")
    return last


def why_not_faster(backend: str | None, chosen: str, setup: LayerSetup) -> str | None:
    """Why the default on this device is not a faster backend. `None`: there is no faster one, or `backend` or the environment
    named the backend."""
    device = setup.device
    if backend or backend_from_environment() or device.type == "cpu":
        return None
    if device.type != "cuda":
        triton = BACKENDS["triton"]
        if triton.missing() is None and triton.why_not(setup) is None:
            return f"no kernels are tested on {device.type!r}; backend='triton' may run there"
        return f"no kernels for {device.type!r}"
    if chosen == "torch" and setup.spec is not None and (fmt := without_kernels(setup.spec.formats)) is not None:
        return f"format {fmt.name!r} was registered without kernels"
    first = ON_GPU[setup.attention_kind][0]
    return None if chosen == first else f"{first} {BACKENDS[first].why_not(setup)}"


def why_slow_reference(backend: str | None, chosen: str, setup: LayerSetup) -> str | None:
    """Why the default is the slow reference; `None` if it is not."""
    return why_not_faster(backend, chosen, setup) if chosen == "torch" else None


_WARNED: set[str] = set()


def warn_of_reference(reason: str | None) -> None:
    """Warn that a cache runs on the reference, once per process and reason. reason: the result of `why_slow_reference`."""
    if reason is None or reason in _WARNED:
        return
    _WARNED.add(reason)
    warnings.warn(
        f"a low-bit cache runs on the slow PyTorch reference: {reason}; backend='torch' asks for that without this warning",
        stacklevel=3,
    )


def describe_backend(backend: str | None, chosen: str, setup: LayerSetup) -> str:
    """The chosen backend, for `summary()`. Notes follow in brackets: why the default is not the fastest backend, and whether
    this one is tested on this kind of device."""
    device, notes = setup.device, []
    if chosen == "triton" and is_rocm(device):
        notes.append("not tested on AMD GPUs")
    elif chosen == "triton" and device.type not in ("cpu", "cuda"):
        notes.append(f"not tested on {device.type!r}")
    if (reason := why_not_faster(backend, chosen, setup)) is not None:
        notes.append(f"{'slow reference: ' if chosen == 'torch' else ''}{reason}")
    elif chosen == "cuda" and (reason := why_triton_cannot_launch()) is not None:
        notes.append(f"slower with long chunks: {reason}")
    return f"{chosen} ({'; '.join(notes)})" if notes else chosen


def storage_spec(spec: LayerSpec, backend: str) -> LayerSpec:
    """`spec` with its pages in the layout that the backend's kernels read. Stored tokens decode to the same numbers."""
    return spec.with_layouts(*BACKENDS[backend].layouts[spec.attention_kind.name])


@functools.cache
def operations_of(backend: str, attention_kind: str) -> Operations:
    """The operations of the backend with this name, for layers of this attention kind."""
    return BACKENDS[backend].operations(attention_kind)
