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
from collections.abc import Sequence

import torch

from . import cpu, reference
from .formats import Affine, Boosted, Dense, Format, fragment
from .pages import LayerSpec, LayerState
from .toolchain import INSTALL_TRITON, install_bindings, install_nvrtc, why_no_launcher, why_not_launched
from .transforms import NONE, Map

BACKENDS = ("torch", "cpu", "triton", "cuda")
#: preferred on a GPU where nothing is asked for: `cuda` (where it cannot serve, `triton`) or `triton`
DEFAULT_ON_GPU = "cuda"
#: layouts in which a backend's kernels read keys and values
LAYOUTS = {"cuda": fragment.LAYOUTS}
#: lowest compute capability that the CUDA kernels are written for
CUDA_CAPABILITY = (8, 0)
#: dtypes of models, and formats of keys and of values, that they cover
CUDA_DTYPES = (torch.float16, torch.bfloat16)
CUDA_FORMATS = ((Affine, Boosted, Dense), (Affine, Dense))
#: readings that a backend's kernels attend to; the reference attends to all
READINGS_COVERED = {
    "torch": ("separate", "latent"),
    "cpu": ("separate", "latent"),
    "triton": ("separate",),
    "cuda": ("separate",),
}
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
    reading: str = "separate",
) -> str:
    """The backend for tensors of `dtype` on `device` and for pages of these formats (keys, values). Raises where it cannot
    serve them."""
    check_backend(backend)
    covering = [name for name in BACKENDS if reading in READINGS_COVERED[name]]
    chosen = backend or _of_environment() or _default_backend(device, dtype, formats)
    source = VARIABLE if backend is None and _of_environment() else "backend"
    if chosen not in covering:
        if backend or _of_environment():
            raise ValueError(f"{source}={chosen!r} has no kernels for the reading {reading!r}; allowed: {covering}")
        chosen = covering[0]
    if chosen == "cpu" and device.type != "cpu":
        raise ValueError(f"{source}='cpu' needs the model on the CPU, and it is on {device.type!r}")
    if chosen == "triton":
        _check_triton(device, formats, source)
    elif chosen == "cuda":
        _check_cuda(device, dtype, formats, source)
    return chosen


def reason_for(
    backend: str | None, chosen: str, device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format]
) -> str | None:
    """Why the default on this GPU is not `cuda`; `None` where it is, or where `backend` or the environment chose."""
    if chosen != "triton" or backend or _of_environment() or DEFAULT_ON_GPU != "cuda":
        return None
    return why_not_cuda(device, dtype, formats)


def describe(
    backend: str | None, chosen: str, device: torch.device, dtype: torch.dtype | None, formats: Sequence[Format]
) -> str:
    """The chosen backend in words, for `summary()`: with what keeps the default from being `cuda`, and what from being fast."""
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
def _module(backend: str):
    """Module with `turn`, `attend`, `attend_turned`, `append` and `read` as in `reference`, and perhaps `attend_and_append`,
    which does a step at once."""
    if backend == "torch":
        return reference
    if backend == "cpu":
        return cpu
    if backend == "cuda":
        return importlib.import_module("hf_lowbit_kv.triton_kernels.cuda.launch")
    from hf_lowbit_kv.triton_kernels import launch

    return launch


# The operations take the state tensor by tensor: inductor updates a mutated tensor in place, but clones a mutated list.
# Preallocated caches have one block of pages; only growing ones, which are not compiled, have `more` of them.


def _map(layer: LayerSpec, key_scale: torch.Tensor | None, query_scale: torch.Tensor | None) -> Map | None:
    return None if layer.transform == NONE else Map(key_scale, query_scale, layer.transform.rotated)


def _attended(module, q, k, v, mask, state: LayerState, layer: LayerSpec, how: Map | None, options: tuple):
    """The output, and the chunk's keys as they are to be stored."""
    if how is None:
        return module.attend(q, k, v, mask, state, layer, *options), k
    return module.attend_turned(q, k, v, mask, state, layer, how, *options)


@torch.library.custom_op("hf_lowbit_kv::attend", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    spec: str,
    scaling: float,
    softcap: float | None,
    seen: int | None,
    backend: str,
    block: torch.Tensor,
    more: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    page_address: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    tail_k: torch.Tensor,
    tail_v: torch.Tensor,
    length: torch.Tensor,
    paged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = LayerState([block, *more], page_table, page_address, sink_k, sink_v, tail_k, tail_v, length, paged)
    layer, options = LayerSpec.parse(spec), (scaling, softcap, sinks, seen)
    how = _map(layer, key_scale, query_scale)
    out, keys = _attended(_module(backend), q, k, v, mask, state, layer, how, options)
    return out.contiguous(), k.new_empty(0) if how is None else keys.contiguous()


@_attend.register_fake
def _(q, k, v, mask, sinks, query_scale, key_scale, spec, *args):
    keys = k.new_empty(0 if LayerSpec.parse(spec).transform == NONE else k.shape)
    return _fake_output(q, k, v, spec), keys


@torch.library.custom_op(
    "hf_lowbit_kv::step",
    mutates_args=("block", "sink_k", "sink_v", "tail_k", "tail_v", "length", "paged"),
)
def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    spec: str,
    scaling: float,
    softcap: float | None,
    seen: int | None,
    backend: str,
    block: torch.Tensor,
    more: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    page_address: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    tail_k: torch.Tensor,
    tail_v: torch.Tensor,
    length: torch.Tensor,
    paged: torch.Tensor,
) -> torch.Tensor:
    state = LayerState([block, *more], page_table, page_address, sink_k, sink_v, tail_k, tail_v, length, paged)
    layer, module, options = LayerSpec.parse(spec), _module(backend), (scaling, softcap, sinks, seen)
    how = _map(layer, key_scale, query_scale)
    if (fused := getattr(module, "attend_and_append", None)) is not None:
        return fused(q, k, v, mask, state, layer, how, *options).contiguous()
    out, keys = _attended(module, q, k, v, mask, state, layer, how, options)
    module.append(keys, v, mask, state, layer)
    return out.contiguous()


@_step.register_fake
def _(q, k, v, mask, sinks, query_scale, key_scale, spec, *args):
    return _fake_output(q, k, v, spec)


def _fake_output(q, k, v, spec: str) -> torch.Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, LayerSpec.parse(spec).reading.widths(k.shape[-1], v.shape[-1])[1])


@torch.library.custom_op(
    "hf_lowbit_kv::append",
    mutates_args=("block", "sink_k", "sink_v", "tail_k", "tail_v", "length", "paged"),
)
def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: str,
    backend: str,
    block: torch.Tensor,
    more: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    page_address: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    tail_k: torch.Tensor,
    tail_v: torch.Tensor,
    length: torch.Tensor,
    paged: torch.Tensor,
) -> None:
    state = LayerState([block, *more], page_table, page_address, sink_k, sink_v, tail_k, tail_v, length, paged)
    _module(backend).append(k, v, mask, state, LayerSpec.parse(spec))


@_append.register_fake
def _(*args):
    return None


@torch.library.custom_op("hf_lowbit_kv::turn", mutates_args=())
def _turn(
    q: torch.Tensor | None,
    k: torch.Tensor,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    rotated: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = _module(backend).turn(q, k, Map(key_scale, query_scale, rotated))
    return (k.new_empty(0) if queries is None else queries.contiguous()), keys.contiguous()


@_turn.register_fake
def _(q, k, *args):
    return k.new_empty(0 if q is None else q.shape), k.new_empty(k.shape)


def _flat(state: LayerState) -> list:
    return [state.pool[0], state.pool[1:], *state[1:]]


def turn(q, k, how: Map | None, backend: str):
    """`reference.turn` on the chosen backend, as one operation that compilation can take up; without a transform, q and k as
    they are."""
    if how is None:
        return q, k
    return _turn(q, k, how.query_scale, how.key_scale, how.rotated, backend)


def attend(
    q, k, v, mask, state: LayerState, spec: LayerSpec, how: Map | None, scaling, softcap, sinks, backend: str, seen=None
):
    """`reference.attend_turned` on the chosen backend, as one operation that compilation can take up: the output, and the
    chunk's keys as they are to be stored. how: the map of `spec.transform`; without one, it is `reference.attend`, and the keys
    are what they were."""
    scales = (None, None) if how is None else (how.query_scale, how.key_scale)
    out, keys = _attend(q, k, v, mask, sinks, *scales, spec.key, scaling, softcap, seen, backend, *_flat(state))
    return out, k if how is None else keys


def step(
    q, k, v, mask, state: LayerState, spec: LayerSpec, how: Map | None, scaling, softcap, sinks, backend: str, seen=None
):
    """`attend`, then `append` of the chunk, as one operation: compilation can neither move nor separate the two, and a backend
    may do both at once. The output."""
    scales = (None, None) if how is None else (how.query_scale, how.key_scale)
    return _step(q, k, v, mask, sinks, *scales, spec.key, scaling, softcap, seen, backend, *_flat(state))


def append(k, v, mask, state: LayerState, spec: LayerSpec, backend: str) -> None:
    """`reference.append` on the chosen backend, as one operation that compilation can take up. Behind an `attend` of the same
    state, use `step`: inductor moves a lone append before the attend, where it must copy the whole pool."""
    _append(k, v, mask, spec.key, backend, *_flat(state))


def read(state: LayerState, spec: LayerSpec, head_dim_k: int, head_dim_v: int, max_length: int, backend: str):
    """`reference.read` on the chosen backend."""
    return _module(backend).read(state, spec, head_dim_k, head_dim_v, max_length)
