"""Which code runs a step, and the operations a step consists of.

Backends: `torch` (the reference, any device), `cpu` (CPUs, with PyTorch's own attention), `triton` (GPUs that Triton supports)
and `cuda` (NVIDIA GPUs, sm80 and later, models in float16 or bfloat16; pages in a layout of its own). Chosen by the `backend=`
argument of a cache, else by the environment variable `HF_LOWBIT_KV_BACKEND`, else on a GPU `cuda` where it serves device,
dtype and formats, and `triton` where not (`why_not_cuda` tells, and a cache's `summary()`); on a CPU `cpu`; `torch`
elsewhere. Nothing falls back silently: what was asked for and cannot run raises.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import get_origin, get_type_hints

import torch

from . import cpu, reference
from .formats import Affine, Boosted, Codebook, Dense, Format, fragment
from .pages import READ_ONLY, LayerSpec, LayerState
from .reading import READINGS
from .toolchain import INSTALL_TRITON, install_bindings, install_nvrtc, why_no_launcher, why_not_launched

BACKENDS = ("torch", "cpu", "triton", "cuda")
#: preferred on a GPU where nothing is asked for: `cuda` (where it cannot serve, `triton`) or `triton`
DEFAULT_ON_GPU = "cuda"
#: layouts in which a backend's kernels read keys and values
LAYOUTS = {"cuda": fragment.LAYOUTS}
#: lowest compute capability that the CUDA kernels are written for
CUDA_CAPABILITY = (8, 0)
#: dtypes of models, and formats of keys and of values, that they cover
CUDA_DTYPES = (torch.float16, torch.bfloat16)
CUDA_FORMATS = ((Affine, Boosted, Codebook, Dense), (Affine, Codebook, Dense))
#: modules for a backend and a reading other than `separate`: operations as in `reference`, `why_not(spec)` and
#: `why_not_widths(first, second)`. The backends `torch` and `cpu` attend to all readings by themselves
READING_MODULES = {("cuda", "latent"): "hf_lowbit_kv.triton_kernels.cuda.latent"}
ANY_READING = ("torch", "cpu")
SEPARATE = READINGS["separate"]
VARIABLE = "HF_LOWBIT_KV_BACKEND"


def check_backend(backend: str | None) -> None:
    """Raise for a name that does not exist, or for Triton where it is not installed. Called when a cache is made."""
    source = "backend"
    if backend is None:
        backend, source = _of_environment(), VARIABLE
        if backend is None:
            return
    if backend not in BACKENDS:
        raise ValueError(f"{source}={backend!r} is not known; allowed: {BACKENDS}")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"{source}='triton' was asked for and Triton is not installed: {INSTALL_TRITON}, "
            "or use backend='torch' (slow reference)"
        )
    if backend == "cuda" and not _has_cuda_bindings():
        raise ImportError(
            f"{source}='cuda' was asked for and cuda-bindings is not installed: {install_bindings()}, "
            "or use backend='triton'"
        )


def _of_environment() -> str | None:
    return os.environ.get(VARIABLE) or None  # set to nothing is not set


def _has_cuda_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def why_not_cuda(device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format]) -> str | None:
    """What keeps the CUDA kernels from serving a model on `device` and these formats, or `None`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, and the model is on {device.type!r}"
    if (found := torch.cuda.get_device_capability(device)) < CUDA_CAPABILITY:
        return f"needs compute capability {CUDA_CAPABILITY}, and {torch.cuda.get_device_name(device)} has {found}"
    if dtype not in (None, *CUDA_DTYPES):
        return f"computes in {CUDA_DTYPES}, not in {dtype}"
    for fmt, covered, side in zip(formats, CUDA_FORMATS, ("keys", "values"), strict=False):
        if not isinstance(fmt, covered):
            return f"has no kernels for {side} in format {fmt.name!r} yet"
    if importlib.util.find_spec("triton") is None:
        return f"needs Triton for long prompts: {INSTALL_TRITON}"
    return _why_no_compiler(found)


def _check_cuda(device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format], source: str) -> None:
    """Raise where the CUDA kernels were asked for and cannot serve."""
    if (reason := why_not_cuda(device, dtype, formats)) is not None:
        advice = "; use backend='triton'" if device.type == "cuda" else ""
        raise ValueError(f"{source}='cuda' {reason}{advice}")


def storage_spec(spec: LayerSpec, backend: str) -> LayerSpec:
    """`spec` with its pages in the layout that the backend's kernels read. What is stored decodes to the same numbers."""
    layouts = LAYOUTS.get(backend, ("planar-1", "planar-1"))
    keys, values = (fmt.with_layout(layout) for fmt, layout in zip(spec.formats, layouts, strict=True))
    return dataclasses.replace(spec, key_format=keys, value_format=values)


@functools.cache
def _why_no_compiler(capability: tuple[int, int]) -> str | None:
    """What keeps CUDA kernels from being compiled and loaded here, or `None`."""
    if not _has_cuda_bindings():
        return f"needs cuda-bindings: {install_bindings()}"
    try:
        from cuda.bindings import driver, nvrtc

        status, version, _ = nvrtc.nvrtcVersion()
        _, architectures = nvrtc.nvrtcGetSupportedArchs()
        _, supported = driver.cuDriverGetVersion()
    except (ImportError, OSError, RuntimeError) as error:  # the bindings without the libraries, or with unfit ones
        return f"needs NVRTC and the driver's library ({error}): {install_nvrtc()}"
    if int(status) != 0:
        return f"needs NVRTC, which fails ({status!r})"
    if 10 * capability[0] + capability[1] not in architectures:
        return f"needs an NVRTC that knows this GPU, and {version} knows {architectures}"
    if version > supported // 1000:
        return f"needs a driver for CUDA {version}, and this one is for {supported // 1000}"
    return None


def choose_backend(
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    formats: Sequence[Format] = (),
    layer: tuple[LayerSpec, int, int] | None = None,
) -> str:
    """The backend for tensors of `dtype` on `device` and for pages of these formats (keys, values). Raises where it cannot
    serve them. layer: the spec and the widths of both streams, which a reading other than `separate` needs."""
    check_backend(backend)
    asked = backend or _of_environment()
    source = VARIABLE if backend is None and _of_environment() else "backend"
    if layer is not None and layer[0].reading != SEPARATE:
        return _choose_for_reading(asked, source, device, dtype, *layer)
    chosen = asked or _default_backend(device, dtype, formats)
    if chosen == "cpu" and device.type != "cpu":
        raise ValueError(f"{source}='cpu' needs the model on the CPU, and it is on {device.type!r}")
    if chosen == "triton":
        _check_triton(device, formats, source)
    elif chosen == "cuda":
        _check_cuda(device, dtype, formats, source)
    return chosen


def _choose_for_reading(
    asked: str | None, source: str, device: torch.device, dtype: torch.dtype | None, spec: LayerSpec, *widths: int
) -> str:
    """As `choose_backend`, for a layer whose reading is not `separate`."""
    chosen = asked or ("cpu" if device.type == "cpu" else "cuda")
    reason = _why_not_reading(chosen, device, dtype, spec, *widths)
    if reason is None:
        return chosen
    if asked:
        raise ValueError(f"{source}={chosen!r} {reason}; use backend='torch' (slow reference)")
    return "torch"


def _why_not_reading(backend: str, device: torch.device, dtype: torch.dtype | None, spec: LayerSpec, *widths: int):
    """What keeps a backend from a layer whose reading is not `separate`, or `None`."""
    if backend in ANY_READING:
        return "needs the model on the CPU" if backend == "cpu" and device.type != "cpu" else None
    if (name := READING_MODULES.get((backend, spec.reading.name))) is None:
        return f"has no kernels for the reading {spec.reading.name!r}"
    if (reason := why_not_cuda(device, dtype, ())) is not None:
        return reason
    module = importlib.import_module(name)
    return module.why_not(spec) or module.why_not_widths(*widths)


def reason_for(
    backend: str | None, chosen: str, device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format]
) -> str | None:
    """Why the default on this GPU is not `cuda`; `None` where it is, or where `backend` or the environment chose."""
    if chosen != "triton" or backend or _of_environment() or DEFAULT_ON_GPU != "cuda":
        return None
    return why_not_cuda(device, dtype, formats)


def describe(
    backend: str | None,
    chosen: str,
    device: torch.device,
    dtype: torch.dtype | None,
    formats: Sequence[Format],
    layer: tuple[LayerSpec, int, int] | None = None,
) -> str:
    """The chosen backend in words, for `summary()`: with what keeps the default from being `cuda`, and what from being fast."""
    if layer is not None and layer[0].reading != SEPARATE:
        if chosen != "torch" or device.type == "cpu" or backend or _of_environment():
            return chosen
        return f"{chosen} (slow reference: cuda {_why_not_reading('cuda', device, dtype, *layer)})"
    if (reason := reason_for(backend, chosen, device, dtype, formats)) is not None:
        return f"{chosen} (cuda {reason})"
    if chosen == "cuda" and (reason := why_no_launcher()) is not None:
        return f"{chosen} (slower with long chunks: {reason})"
    return chosen


def _default_backend(device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format]) -> str:
    if device.type != "cuda":
        return "cpu" if device.type == "cpu" else "torch"
    if DEFAULT_ON_GPU == "cuda" and why_not_cuda(device, dtype, formats) is None:
        return "cuda"
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"on this GPU the Triton kernels are the default and Triton is not installed: {INSTALL_TRITON}, "
            "or ask for the slow reference with backend='torch'"
        )
    return "triton"


def _check_triton(device: torch.device, formats: Sequence[Format], source: str) -> None:
    """Raise where the Triton kernels cannot serve."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{source}='triton' needs a GPU, and the model is on 'cpu'; allowed there: 'cpu', 'torch'")
    if device.type != "cpu" and (reason := why_not_launched()) is not None:
        raise RuntimeError(
            f"{source}='triton' cannot run: {reason}. Install a C compiler, or use backend='cuda', whose kernels need none, "
            "or backend='torch' (slow reference)"
        )
    from hf_lowbit_kv.triton_kernels.registry import kernels

    for fmt in formats:
        kernels(fmt)  # raises for a format without kernels


@functools.cache
def _module(backend: str, reading: str = "separate"):
    """Module with `attend`, `append` and `read` as in `reference`, and perhaps `step`, which does the first two at once."""
    if (own := READING_MODULES.get((backend, reading))) is not None:
        return importlib.import_module(own)
    if backend == "torch":
        return reference
    if backend == "cpu":
        return cpu
    if backend == "cuda":
        return importlib.import_module("hf_lowbit_kv.triton_kernels.cuda.launch")
    from hf_lowbit_kv.triton_kernels import launch

    return launch


# ---- operations -----------------------------------------------------------------------------------------------------
#
# They take the state tensor by tensor: inductor updates a mutated tensor in place, but clones a mutated list. Preallocated
# caches have one block of pages; only growing ones, which are not compiled, have `more` of them. Lists that are only read cost
# nothing. Signatures follow `LayerState`: a new field needs no change here.


def _state_schema(mutated: bool) -> str:
    """The part of a signature that `_flat` fills."""
    found = []
    for name, kind in get_type_hints(LayerState).items():
        tensor = f"Tensor(a_{name}!)" if mutated and name not in READ_ONLY else "Tensor"
        if name == "pool":
            found += [f"{tensor} pool", "Tensor[] more"]
        else:
            found.append(f"Tensor[] {name}" if get_origin(kind) is list else f"{tensor} {name}")
    return ", ".join(found)


def _flat(state: LayerState) -> list:
    return [state.pool[0], state.pool[1:], *state[1:]]


def _state(tensors) -> LayerState:
    """The inverse of `_flat`."""
    block, more, *rest = tensors
    return LayerState([block, *more], *rest)


def _operation(name: str, inputs: str, result: str, mutates: bool, work: Callable, fake: Callable) -> Callable:
    """A `torch.library` operation `(inputs, spec, backend, state) -> result`.

    Args:
        work: called with the backend's module, the inputs, the state and the `LayerSpec`.
        fake: called with the `LayerSpec` and the inputs.
    """
    count = inputs.count(",") + 1
    schema = f"({inputs}, str spec, str backend, {_state_schema(mutates)}) -> {result}"
    written = [field for field in LayerState._fields if field not in READ_ONLY] if mutates else []

    def run(*args):
        spec, backend = LayerSpec.parse(args[count]), args[count + 1]
        return work(_module(backend, spec.reading.name), args[:count], _state(args[count + 2 :]), spec)

    operation = torch.library.custom_op(f"hf_lowbit_kv::{name}", run, mutates_args=written, schema=schema)
    operation.register_fake(lambda *args: fake(LayerSpec.parse(args[count]), *args[:count]))

    def call(*args, state: LayerState, spec: LayerSpec, backend: str):
        return operation(*args, spec.key, backend, *_flat(state))

    return call


_CHUNK = "Tensor q, Tensor k, Tensor v, Tensor? mask, float scaling, float? softcap, Tensor? sinks, SymInt? seen"


def _attend_work(module, inputs, state: LayerState, spec: LayerSpec) -> torch.Tensor:
    return module.attend(*inputs[:4], state, spec, *inputs[4:]).contiguous()


def _step_work(module, inputs, state: LayerState, spec: LayerSpec) -> torch.Tensor:
    if (at_once := getattr(module, "step", None)) is not None:
        return at_once(*inputs[:4], state, spec, *inputs[4:]).contiguous()
    out = _attend_work(module, inputs, state, spec)
    module.append(*inputs[1:4], state, spec)
    return out


def _append_work(module, inputs, state: LayerState, spec: LayerSpec) -> None:
    module.append(*inputs, state, spec)


def _output(spec: LayerSpec, q, k, v, *args) -> torch.Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, spec.reading.widths(k.shape[-1], v.shape[-1])[1])


_attend = _operation("attend", _CHUNK, "Tensor", False, _attend_work, _output)
_step = _operation("step", _CHUNK, "Tensor", True, _step_work, _output)
_append = _operation("append", "Tensor k, Tensor v, Tensor? mask", "()", True, _append_work, lambda *args: None)


def attend(q, k, v, mask, state: LayerState, spec: LayerSpec, scaling, softcap, sinks, backend: str, seen=None):
    """`reference.attend` on the chosen backend, as one operation that compilation can take up."""
    return _attend(q, k, v, mask, scaling, softcap, sinks, seen, state=state, spec=spec, backend=backend)


def step(q, k, v, mask, state: LayerState, spec: LayerSpec, scaling, softcap, sinks, backend: str, seen=None):
    """`attend`, then `append` of the chunk, as one operation: compilation can neither move nor separate the two, and a backend
    may do both at once. The output."""
    return _step(q, k, v, mask, scaling, softcap, sinks, seen, state=state, spec=spec, backend=backend)


def append(k, v, mask, state: LayerState, spec: LayerSpec, backend: str) -> None:
    """`reference.append` on the chosen backend, as one operation that compilation can take up. Behind an `attend` of the same
    state, use `step`: inductor moves a lone append before the attend, where it must copy the whole pool."""
    _append(k, v, mask, state=state, spec=spec, backend=backend)


def read(state: LayerState, spec: LayerSpec, max_length: int, backend: str):
    """`reference.read` on the chosen backend."""
    return _module(backend, spec.reading.name).read(state, spec, max_length)
