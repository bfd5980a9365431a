"""The CUDA backend's entry points on the CPU: what a test changes so that kernels run in `cuda_emulator`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points as cuda
from hf_lowbit_kv.triton_kernels.cuda import decode_kernel, modules

needs_emulator = pytest.mark.skipif(
    kernels.GPU or kernels.INTERPRETED or not cuda_emulator.available(),
    reason="needs g++, an x86 processor, and no GPU (the kernels themselves run there)",
)


@contextmanager
def emulated(
    monkeypatch, shared: int = 228, processors: int = 2, module: Callable = cuda_emulator.Module
) -> Iterator[ModuleType]:
    """`cuda_entry_points` on a GPU with so many KiB of shared memory a multiprocessor. Two: warp groups share rows. module:
    the fake of a loaded file, made from its name and macros."""
    properties = SimpleNamespace(multi_processor_count=processors, shared_memory_per_multiprocessor=shared * 1024)
    for changed in (cuda, modules):
        monkeypatch.setattr(changed, "load", lambda name, defines, device: module(name, defines))
    for changed in (decode_kernel, modules):
        monkeypatch.setattr(changed, "properties", lambda device: properties)
    monkeypatch.setattr(cuda, "read", reference.OPERATIONS.read)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels, "launch", cuda)
    modules.forget()
    yield cuda
    modules.forget()


class Noted:
    """In the place of a loaded file: notes its name and macros in `loaded`, and launches nothing."""

    def __init__(self, loaded: dict, name: str, macros: tuple):
        loaded[name, macros] = None
        self.macros = dict(macros)

    def integer(self, name: str) -> int:
        return int(self.macros[name.upper()])

    def launch(self, *arguments, **options) -> None:
        pass
