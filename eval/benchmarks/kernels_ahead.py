"""Compiles kernels of `bench_decode` in parallel processes before they are timed. A matrix needs some hundred
kernels."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_lowbit_kv.backends.operations import storage_spec
from hf_lowbit_kv.eval.benchmarks.decode_shapes import Shape
from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree
from hf_lowbit_kv.eval.benchmarks.packed_layer import PackedCase, build
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import modules, nvrtc


class Wanted(NamedTuple):
    """A compilation. tree: name of the tree; `None`: this tree."""

    tree: str | None
    file: str
    defines: tuple[tuple[str, str], ...]
    arch_specific: bool


class _Noted:
    """Replaces a loaded file: notes that the file is wanted, and launches nothing."""

    def __init__(self, wanted: dict[Wanted, None], tree: str | None):
        self.wanted, self.tree = wanted, tree

    def __call__(
        self, name: str, defines: tuple[tuple[str, str], ...], device: Any, arch_specific: bool = False
    ) -> _Noted:
        self.wanted[Wanted(self.tree, name, defines, arch_specific)] = None
        module = _Noted(self.wanted, self.tree)
        module.macros = dict(defines)
        return module

    macros: dict[str, str]

    def integer(self, name: str) -> int:
        return int(self.macros[name.upper()])

    def launch(self, *args: Any, **options: Any) -> None:
        pass


def _modules(tree: OtherTree | None) -> tuple[ModuleType, ModuleType]:
    if tree is None:
        return modules, nvrtc
    return tree.module("triton_kernels.cuda.modules"), tree.module("triton_kernels.cuda.nvrtc")


@contextmanager
def _noting(tree: OtherTree | None, wanted: dict[Wanted, None]) -> Iterator[None]:
    """Inside this context nothing is compiled or launched. The needed compilations are added to `wanted`."""
    layouts, compiler = _modules(tree)

    def forget() -> None:
        layouts.forget()
        compiler.load.cache_clear()

    forget()
    with patch.object(compiler, "Module", _Noted(wanted, tree and tree.name)):
        yield
    forget()


def wanted_by(case: PackedCase, tree: OtherTree | None, backend: str) -> list[Wanted]:
    """The compilations that a measurement of a case needs: attention in any order of pages and in fixed order, a step,
    and storing."""
    wanted: dict[Wanted, None] = {}
    cases = [case if tree is None else case.of(tree)]
    if tree is None and not case.spec.untransformed:
        cases.append(case.without_transform())
    with _noting(tree, wanted):
        for each in cases:
            for order in ("0", "1"):
                with patch.dict(os.environ, {determinism.VARIABLE: order}):
                    each.attend(backend)
        cases[0].step(0, backend)
        cases[0].append(0, backend)
    return list(wanted)


def tiny(
    shape: Shape, preset: str, backend: str, head_dim: int, query_length: int, dtype, device, per_head
) -> PackedCase:
    """A layer with few tokens that needs the same kernels as the shape, because kernels depend on rows and heads, not
    on lengths."""
    spec = storage_spec(get_preset(preset).spec(), backend)
    least = spec.sink + spec.tail_size + query_length
    short = shape._replace(tokens=least, shortest=None)
    return build(short, spec, shape.head_dim or head_dim, query_length, dtype, device, per_head)


_trees: dict[str | None, OtherTree | None] = {None: None}


def _compile(wanted: Wanted, arch: str) -> None:
    compiler = _modules(_trees[wanted.tree])[1]
    compiler.binary(wanted.file, wanted.defines, arch + ("a" if wanted.arch_specific else ""))


class Compilers:
    """Processes that compile into the folder of kept kernels. The constructor forks them. Call it before CUDA is used,
    and after the other tree is found."""

    def __init__(self, jobs: int, against: OtherTree | None = None):
        if against is not None:
            _trees[against.name] = against
            _modules(against)
        self._against = against
        self._pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"))
        for started in [self._pool.submit(os.getpid) for _ in range(jobs)]:
            started.result()
        self._begun: dict[Wanted, Future] = {}

    def begin(self, cell: Callable[[], PackedCase], backend: str, device: torch.device) -> list[Future]:
        """Start the compilations that a cell needs, except those that another cell has started."""
        case = cell()
        major, minor = torch.cuda.get_device_capability(device)
        kernels: list[Wanted] = []
        for tree in (None, self._against) if self._against else (None,):
            kernels += wanted_by(case, tree, backend)
        for wanted in kernels:
            if wanted not in self._begun:
                self._begun[wanted] = self._pool.submit(_compile, wanted, f"sm_{major}{minor}")
        return [self._begun[wanted] for wanted in kernels]

    @staticmethod
    def wait(begun: Iterable[Future]) -> None:
        """Wait for compilations. Errors are ignored, because they are raised again when the kernel is used."""
        for future in begun:
            future.exception()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
