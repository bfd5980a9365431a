"""Examines this machine: versions, the backend of each preset with the reason, missing packages, and a check of one
attention step."""

from __future__ import annotations

import importlib.util
import io
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .cache.attention_function import lowbit_attention
from .cache.implementation import ATTENTION_NAME
from .cache.preset_cache import cache_of_preset
from .generation import decoding_loop
from .installation import EXTRAS, install_extra, install_missing, not_installed
from .presets import get_preset, preset_names, recommended_first
from .triton_kernels.toolchain import (
    INSTALL_TRITON,
    accelerator,
    install_bindings,
    install_nvrtc,
    version,
    why_triton_cannot_launch,
)

PACKAGES = ("hf-lowbit-kv", "torch", "transformers", "triton", "cuda-bindings")
#: the checked attention step: preset, stored tokens, and largest allowed relative error against the reference
CHECKED, TOKENS, BOUND = "kivi-4-sink", 400, 0.01
_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
_LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 1}


class Diagnosis(dict):
    """Result of `doctor`: a dictionary for JSON that prints as a report.

    Keys:
        packages: version of each package, or `None` if it is not installed.
        python, platform: text. cuda, rocm: the CUDA or ROCm that torch was built with, or `None`. driver: the NVIDIA driver, or
            `None`.
        accelerator: type of the devices that torch can use, e.g. "cuda" (NVIDIA, AMD), "mps" or "xpu". `None`: only the
            CPU.
        devices: per GPU `{"name", "capability", "memory_bytes"}`. `capability` is e.g. "9.0", or the architecture of an
            AMD GPU ("gfx942"). Values that torch does not report are `None`.
        kernels: `{"directory", "files", "bytes", "why_refused"}` of the compiled CUDA kernels on disk.
        backends: per pair of formats `{"keys", "values", "attention_kind", "presets", "backend", "why"}`. `attention_kind`
            is "separate" for keys and values, "latent" for MLA. `backend` is `None` if no backend supports the pair.
            `why` is the reason why no faster backend is used, or `None`.
        check: one attention step over packed pages `{"preset", "device", "dtype", "backend", "tokens",
            "relative_error", "bound", "error"}`.
        missing: per missing package or tool `{"what", "for", "command"}`.
        ok: whether the checked step ran and agrees with the reference.
    """

    @property
    def ok(self) -> bool:
        return self["ok"]

    def __str__(self) -> str:
        return _render(self)

    __repr__ = __str__


def doctor(device: str | torch.device | None = None) -> Diagnosis:
    """Examine this machine, and run one attention step over packed pages.

    Args:
        device: the device of the checked step. By default torch's accelerator (a GPU of NVIDIA, AMD, Apple or
            Intel), else the CPU.

    Returns:
        A `Diagnosis`.

    Raises:
        ValueError: torch cannot use the device.

    Example:
        >>> diagnosis = lb.doctor("cpu")
        >>> diagnosis.ok, diagnosis["check"]["preset"]
        (True, 'kivi-4-sink')
    """
    try:
        checked_device = torch.device(device or accelerator() or "cpu")
        _check_usable(checked_device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from error
    dtype = torch.float32 if checked_device.type == "cpu" else torch.bfloat16
    check = _check(checked_device, dtype)
    device_type = accelerator()
    return Diagnosis(
        packages={name: version(name) for name in PACKAGES},
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        driver=_driver(),
        accelerator=device_type and device_type.type,
        devices=_devices(),
        kernels=_kernels(),
        backends=_backends(checked_device, dtype),
        check=check,
        missing=_missing() + _extras(),
        ok=check["error"] is None,
    )


def _check_usable(device: torch.device) -> None:
    torch.empty(0, device=device)


def _devices() -> list[dict[str, Any]]:
    if (device := accelerator()) is None:
        return []
    module = torch.get_device_module(device)
    return [_device(device.type, module, index) for index in range(torch.accelerator.device_count())]


def _device(kind: str, module: Any, index: int) -> dict[str, Any]:
    """The properties of one device, from torch's module for its kind (`torch.cuda`, `torch.xpu`, `torch.mps`)."""
    properties_of = getattr(module, "get_device_properties", None)
    if properties_of is None:  # Apple's one device
        name = getattr(torch.backends.mps, "get_name", None) if kind == "mps" else None
        memory = getattr(module, "recommended_max_memory", None)
        return {"name": name() if name else kind, "capability": None, "memory_bytes": memory() if memory else None}
    properties, capability = properties_of(index), None
    if kind == "cuda":
        amd = torch.version.hip is not None
        capability = properties.gcnArchName.partition(":")[0] if amd else f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory}


def _driver() -> str | None:
    """The version of the NVIDIA driver, from `nvidia-smi`."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(result.stdout.split()), None) if result.returncode == 0 else None


def _kernels() -> dict[str, Any]:
    from hf_lowbit_kv.triton_kernels.cuda.kernel_cache import cache_directory, why_refused

    directory = cache_directory()
    try:
        reason = why_refused(directory)
        sizes = [path.stat().st_size for path in directory.iterdir() if path.is_file()]
    except FileNotFoundError:  # nothing has been compiled yet
        reason, sizes = None, []
    except OSError as error:
        reason, sizes = error.strerror or str(error), []
    return {"directory": str(directory), "files": len(sizes), "bytes": sum(sizes), "why_refused": reason}


#: tool that comes with a GPU's driver -> how to install a torch that can use the GPU
_TORCH_FOR_GPU = {
    "nvidia-smi": "pip install --upgrade --force-reinstall torch",
    "amd-smi": "torch for ROCm, see https://pytorch.org/get-started/locally",
    "rocm-smi": "torch for ROCm, see https://pytorch.org/get-started/locally",
    "xpu-smi": "torch for Intel GPUs, see https://pytorch.org/get-started/locally",
}


def _missing() -> list[dict[str, str]]:
    """Missing packages and tools that would make something faster here, with the commands that install them."""
    missing = []

    def lacks(name: str, purpose: str, command: str) -> None:
        missing.append({"what": name, "for": purpose, "command": command})

    for purpose, why in decoding_loop.lacking().items():
        lacks(why, purpose, install_extra(None))

    if accelerator() is None:
        commands = [command for tool, command in _TORCH_FOR_GPU.items() if shutil.which(tool)]
        if commands:
            lacks("a torch that can use this GPU", "every kernel", commands[0])
        return missing
    if not torch.cuda.is_available():  # there are no tested kernels for such devices, so no installation helps
        return missing
    if importlib.util.find_spec("triton") is None:
        lacks("Triton", "kernels on GPUs, long prompts", INSTALL_TRITON)
    elif (reason := why_triton_cannot_launch()) is not None:
        lacks(reason, "Triton's kernels: long prompts", f"apt-get install gcc libpython3.{sys.version_info.minor}-dev")
    if torch.version.hip is None:
        if version("cuda-bindings") is None:
            lacks("cuda-bindings", "the CUDA kernels, the fastest ones", install_bindings())
        else:
            try:
                from cuda.bindings import nvrtc

                nvrtc.nvrtcVersion()
            except (ImportError, OSError, RuntimeError) as error:
                lacks(f"NVRTC ({str(error).splitlines()[0]})", "the CUDA kernels, the fastest ones", install_nvrtc())
    return missing


def _extras() -> list[dict[str, str]]:
    """Extras that are not complete: their missing packages, the commands that need them, and how to install them."""
    lacking = {name: not_installed((*extra.modules, *extra.data)) for name, extra in EXTRAS.items()}
    return [
        {"what": ", ".join(modules), "for": EXTRAS[name].purpose, "command": install_missing(name)}
        for name, modules in lacking.items()
        if modules
    ]


# ---- backends -------------------------------------------------------------------------------------------------------


def _layer(preset: str, backend: str | None = None) -> Any:
    """The cache layer of this preset for a model with one layer: with separate keys and values, or with a latent."""
    errors: list[Exception] = []
    for family, sizes in (("llama", {"head_dim": 128, "num_key_value_heads": 2}), ("deepseek_v3", _LATENT)):
        config = AutoConfig.for_model(family, **{**_SIZES, **sizes})
        config._attn_implementation = ATTENTION_NAME
        try:
            source = (
                config if family == "llama" else AutoModelForCausalLM.from_config(config)
            )  # latents need the model itself
            return cache_of_preset(preset, source, backend=backend, parameters=_parameters(preset)).packed_layers[0]
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _parameters(preset: str) -> dict[int, dict[str, torch.Tensor]] | None:
    """Random parameters in place of a calibration. The choice of a backend depends only on their shapes."""
    parameters, random = get_preset(preset).spec().parameters(128, 128, 2), torch.Generator().manual_seed(0)
    tensors = {x.name: (torch.rand(x.shape, generator=random) + 0.5).to(x.dtype) for x in parameters}
    return {0: tensors} if tensors else None


def _states(layer: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random query `[1, 4, tokens, 128]`, key and value `[1, 2, tokens, 128]` of a chunk, the same for all layers."""
    random = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads, tokens, 128) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


def _backends(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for preset in preset_names():
        layer = _layer(preset)
        pair = str(layer.spec.key_format), str(layer.spec.value_format), str(layer.spec.attention_kind.name)
        if pair in rows:
            rows[pair]["presets"].append(preset)
            continue
        row: dict[str, Any] = dict(zip(("keys", "values", "attention_kind"), pair)) | {
            "presets": [preset],
            "backend": None,
            "why": None,
        }
        rows[pair] = row
        try:
            _initialize(layer, device, dtype)
        except (ValueError, ImportError, RuntimeError) as error:
            row["why"] = str(error)
        else:
            row["backend"] = layer.backend
            row["why"] = layer.backend_shown.partition(" (")[2].removesuffix(")") or None
            if layer.backend == "cpu":
                row["why"] = "torch finds no GPU" if accelerator() is None else "the CPU was selected"
    return list(rows.values())


def _initialize(layer: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Initialize a layer, which chooses its backend."""
    if layer.spec.attention_kind.name == "latent":
        sizes = (_LATENT["kv_lora_rank"], _LATENT["qk_rope_head_dim"])
        layer.lazy_initialization(*(torch.zeros(1, 1, 1, size, device=device, dtype=dtype) for size in sizes))
    else:
        layer.lazy_initialization(*_states(layer, 1, device, dtype)[1:])


def _check(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare a prompt and a decode step of the preset `CHECKED` on the chosen backend with the reference."""
    row: dict[str, Any] = {"preset": CHECKED, "device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    row |= {"backend": None, "tokens": TOKENS, "relative_error": None, "bound": BOUND, "error": None}
    try:
        layer = _layer(CHECKED)
        out = _attend(layer, device, dtype)
        row["backend"] = layer.backend
        # if the chosen backend is the reference, compare with the CPU: it would always agree with itself
        reference_device = torch.device("cpu") if layer.backend == "torch" else device
        expected = _attend(_layer(CHECKED, "torch"), reference_device, dtype).to(out.device)
        row["relative_error"] = float((out - expected).norm() / expected.norm())
    except Exception as error:  # report the reason to the user
        row["error"] = f"{type(error).__name__}: {error}"
    else:
        if not row["relative_error"] <= BOUND:  # NaN too
            row["error"] = f"differs from the reference by {row['relative_error']:.3g}; at most {BOUND} is allowed"
    return row


@torch.no_grad()
def _attend(layer: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The output of a decode step after `TOKENS` tokens, `[1, 1, 4, 128]`, float32."""
    module: Any = SimpleNamespace(training=False, config=layer.config)
    for tokens in (TOKENS, 1):
        q, k, v = _states(layer, tokens, device, dtype)
        keys, values = layer.update(k, v)
        out, _ = lowbit_attention(module, q, keys, values, None)
    return out.float()


# ---- the report -----------------------------------------------------------------------------------------------------


def _description_of(gpu: dict[str, Any]) -> list[str]:
    capability, memory = gpu["capability"], gpu["memory_bytes"]
    words = [gpu["name"]]
    if capability:
        words.append(f"sm {capability}" if capability[0].isdigit() else capability)
    if memory:
        words.append(f"{memory / 1e9:.0f} GB")
    return words


def _render(diagnosis: Diagnosis) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=80, force_jupyter=False, color_system=None, highlight=False)
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in diagnosis["packages"].items())
    kernels, check = diagnosis["kernels"], diagnosis["check"]
    stored = f"{kernels['directory']}: {kernels['files']} files, {kernels['bytes'] / 1e6:.1f} MB"
    if kernels["why_refused"]:
        stored += f"; not used: {kernels['why_refused']}"
    gpus = [", ".join(_description_of(gpu)) for gpu in diagnosis["devices"]]
    built_for = [f"{name} {diagnosis[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "rocm")) if diagnosis[key]]
    result = check["error"] or f"agrees with the reference (relative error {check['relative_error']:.1e})"
    lines = {
        "packages": packages,
        "python": f"{diagnosis['python']} on {diagnosis['platform']}",
        "GPU": "; ".join(gpus) or "none",
        "driver": f"{diagnosis['driver'] or 'none'}; torch is built for {(*built_for, diagnosis['accelerator'] or 'CPUs')[0]}",
        "kernels kept in": stored,
        f"{check['preset']} on {check['device']}": f"{check['backend']}, {check['dtype']}: {result}",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in lines.items():
        table.add_row(*map(escape, row))
    console.print(table)
    table = Table("backend", "why", "presets", title="Backends", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    groups: dict[tuple[str, str], list[str]] = {}
    for each in diagnosis["backends"]:
        groups.setdefault((each["backend"] or "none", each["why"] or ""), []).extend(each["presets"])
    for choice, presets in groups.items():
        table.add_row(
            *map(escape, choice), "all" if len(groups) == 1 else escape(", ".join(recommended_first(presets)))
        )
    console.print(table)
    for each in diagnosis["missing"]:
        console.print(escape(f"missing: {each['what']} (for {each['for']}). Install:"))
        console.print(escape(f"  {each['command']}"), soft_wrap=True)  # one line, to be pasted
    if not diagnosis["missing"]:
        console.print("nothing is missing")
    return out.getvalue()
