"""Compiles CUDA C++ sources by NVRTC, with a cache on disk (`kernel_cache.py`), and launches kernels through the driver.

No CUDA toolkit is needed: `cuda-bindings` finds the NVRTC library that PyTorch's CUDA wheels bring.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..common import on_device
from . import kernel_cache

logger = logging.getLogger("hf_lowbit_kv")
SOURCES = Path(__file__).parent
#: the last option makes lambdas with `auto` arguments device functions
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
#: lines of the compiler's log in an error message
LOG_LINES = 12
#: by file name: locks held while a file is compiled; binaries that `compile_ahead` compiled and no launch has used yet
_compiling: dict[str, threading.Lock] = {}
_early: dict[str, bytes] = {}


class CompileError(RuntimeError):
    """NVRTC could not compile a kernel's source."""


def _bindings() -> tuple[Any, Any]:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def _checked(result: tuple) -> Any:
    """The result of a call of the bindings, without its status. Raises if the status is an error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values[0] if len(values) == 1 else values or None


@functools.cache
def source(name: str, headers: tuple[tuple[str, str], ...] = ()) -> str:
    """The text of a source file, with each included file's text in place of its first include. headers: see `joined`."""
    return joined(name, lambda name: (SOURCES / name).read_text(encoding="utf-8"), dict(headers))


def headers_in(defines: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The macros that name a file to include: `"name"`, with its quotes."""
    return tuple((macro, value) for macro, value in defines if macro.endswith("_HEADER"))


def joined(name: str, read: Callable[[str], str], headers: Mapping[str, str] | None = None) -> str:
    """The same for any files; `read` returns a file's text.

    Args:
        headers: macro -> a file's name in quotes, for `#include MACRO`. Includes of other macros stay unchanged.
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(read(name).splitlines(), 1):
            if include := re.fullmatch(r'#include ("?\w.*)', line):
                file = (headers or {}).get(include[1], include[1])
                lines += [expand(file.strip('"')), f'#line {number + 1} "{name}"'] if file[0] == '"' else [line]
            elif line != "#pragma once":
                lines.append(line)
        return "\n".join(lines)

    return expand(name)


def text(name: str, defines: tuple[tuple[str, str], ...]) -> str:
    """The text that NVRTC compiles for the file `name` with these macros."""
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines)
    return macros + source(name, headers_in(defines))


def binary(
    name: str, defines: tuple[tuple[str, str], ...], arch: str, recompile: bool = False, early: bool = False
) -> bytes:
    """The binary of the file `name` compiled with these macros. recompile: ignore the cache on disk. early: keep the binary
    in memory for a later caller, because the cache on disk may be unusable."""
    _, nvrtc = _bindings()
    code, version = text(name, defines), _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((code, arch, OPTIONS, version)).encode()).hexdigest()[:32]
    file = f"{Path(name).stem}-{arch}-{key}.cubin"
    with _compiling.setdefault(file, threading.Lock()):  # another thread may be compiling it
        if not recompile and (kernel := _early.pop(file, None) or kernel_cache.load(file)) is not None:
            return kernel
        _announce(arch)
        out, _ = _compile(code, name, arch)
        kernel_cache.save(file, out)
        if early:
            _early[file] = out
        return out


def compile_ahead(name: str, defines: tuple[tuple[str, str], ...], device: torch.device) -> None:
    """Compile the file in a thread, unless it is compiled already. `binary` waits for that thread. Errors are not raised
    here: the first launch compiles again and raises them."""

    def work() -> None:
        with contextlib.suppress(Exception):
            binary(name, defines, _arch(device), early=True)

    # NVRTC releases the GIL. The thread is not a daemon, because libraries must not be unloaded while it runs. So the
    # interpreter waits for it at exit, a few seconds at most per kernel
    threading.Thread(target=work, name="hf-lowbit-kv-compile").start()


def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _announce(arch: str) -> None:
    logger.warning("compiling CUDA kernels for %s, once; they are kept in %s", arch, kernel_cache.cache_directory())


def _compile(code: str, name: str, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compiled code, and NVRTC's log. options: added to `OPTIONS`."""
    _, nvrtc = _bindings()
    program = _checked(nvrtc.nvrtcCreateProgram(code.encode(), name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}", *options)]
        status, *_ = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        compiler_log = log.decode(errors="replace").strip("\0\n")
        if int(status) != 0:
            first_lines = "\n".join(compiler_log.splitlines()[:LOG_LINES])
            raise CompileError(
                f"NVRTC could not compile {name} for {arch} ({status!r}); use backend='triton' meanwhile. "
                f"Its log begins:\n{first_lines}"
            )
        out = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, out))
        return bytes(out), compiler_log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _enter_context(device: int) -> None:
    """Make torch's context of the device current in this thread, like torch's first call."""
    driver, _ = _bindings()
    context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
    _checked(driver.cuCtxSetCurrent(context))


class Module:
    """A compiled file, loaded on one device."""

    def __init__(
        self, name: str, defines: tuple[tuple[str, str], ...], device: torch.device, arch_specific: bool = False
    ):
        self._driver, _ = _bindings()
        self.device = device
        arch = _arch(device) + ("a" if arch_specific else "")
        data = binary(name, defines, arch)
        with torch.cuda.device(device):
            _enter_context(device.index)
            status, module = self._driver.cuModuleLoadData(data)
            if int(status) != 0:  # the cached binary may not fit this driver
                module = _checked(self._driver.cuModuleLoadData(binary(name, defines, arch, recompile=True)))
            self._module = module
        self._functions: dict[str, Any] = {}

    def integer(self, name: str) -> int:
        """The value of an `int` in the module's memory."""
        with torch.cuda.device(self.device):
            address, _ = _checked(self._driver.cuModuleGetGlobal(self._module, name.encode()))
            value = ctypes.c_int()
            _checked(self._driver.cuMemcpyDtoH(ctypes.addressof(value), address, 4))
        return value.value

    def function(self, name: str, shared: int = 0) -> Any:
        if name not in self._functions:
            driver = self._driver
            _enter_context(self.device.index)  # this thread may not have used the device yet
            function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
            if shared:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuFuncSetAttribute(function, attribute, shared))
            self._functions[name] = function
        return self._functions[name]

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0, early: bool = False
    ) -> None:
        """Launch on torch's current stream. args: ctypes objects, copied before this returns. early: it may begin before the
        previous kernel ends, for which it waits itself; not before Hopper."""
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        with on_device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            function, driver = self.function(name, shared), self._driver
            launch: Any = driver.cuLaunchKernel
            call: tuple = (function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(pointers), 0)
            if early and torch.cuda.get_device_capability(self.device) >= (9, 0):
                launch = driver.cuLaunchKernelEx
                call = (_launched_early(driver, grid, threads, shared, stream), function, ctypes.addressof(pointers), 0)
            status = launch(*call)[0]
            if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used the device yet
                _enter_context(self.device.index)
                status = launch(*call)[0]
        _checked((status,))


def _launched_early(driver: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int) -> Any:
    """The configuration of a launch that may begin before the previous kernel ends."""
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def load(name: str, defines: tuple[tuple[str, str], ...], device: torch.device, arch_specific: bool = False) -> Module:
    """The file `name` compiled with these macros and loaded on `device` (with an index), once for each process.
    arch_specific: use instructions that only this architecture has (`sm_90a`)."""
    return Module(name, defines, device, arch_specific)
