"""Another state of this package in the same process, under another name. `bench_decode --against` compares with it.

The other tree's files are imported with the package's name replaced in their text. So its modules, and the operations
that it registers with torch, do not collide with ours. Only requested modules are imported. Nothing is registered with
transformers.

`Compilers` compile kernels of both trees in parallel processes before they are timed. A matrix needs some hundred kernels.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_lowbit_kv.backends.choice import storage_spec
from hf_lowbit_kv.eval.benchmarks.packed_layer import PackedCase, Shape, build
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.step import Chunk
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import modules, nvrtc

OURS = "hf_lowbit_kv"
#: the folders of a tree that kernels need
FOLDERS = ("hf_lowbit_kv", "triton_kernels")
_numbers = itertools.count(1)


class OtherTree:
    """A commit of this checkout, or a folder with the `hf_lowbit_kv/` and `triton_kernels/` of another checkout.

    Raises:
        ValueError: there is neither such a folder nor such a commit.
    """

    def __init__(self, where: str):
        self.name = where
        self._package = f"{OURS}_{next(_numbers)}"
        folder = Path(where)
        if not all((folder / name).is_dir() for name in FOLDERS):
            archive = _archive(where)
            folder = Path(tempfile.mkdtemp())  # Triton and NVRTC read sources later
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            with tarfile.open(fileobj=BytesIO(archive)) as packed:
                packed.extractall(folder, filter="data")
        self.folder = folder
        sys.meta_path.insert(0, _Finder(self._package, folder))

    def module(self, name: str) -> ModuleType:
        """The other tree's module `hf_lowbit_kv.<name>`."""
        return importlib.import_module(f"{self._package}.{name}")

    def operations(self) -> Any:
        """The other tree's `hf_lowbit_kv.backends.operations`. It takes a `Chunk` and a `LayerStore` of this tree."""
        return _TheirChunks(self.module("backends.operations"), self.module("storage.step").Chunk)

    def spec(self, spec: Any, widths: tuple[int, int], dtype: Any) -> Any:
        """The other tree's `LayerSpec` from the same text. widths: channels of keys and of values.

        Raises:
            ValueError: the other tree does not know a format, or its pages have another size.
        """
        parsed = self.module("storage.layer_spec").LayerSpec.parse(spec.key)
        ours, theirs = (each.part_bytes(*widths, dtype) for each in (spec, parsed))
        if ours != theirs:
            raise ValueError(f"{self.name} stores a page of {spec.key} in {theirs} bytes, and this tree in {ours}")
        return parsed

    def state(self, state: Any) -> Any:
        """The other tree's `LayerState` with the same tensors."""
        kind = self.module("storage.paged_store").LayerState
        if lacking := [name for name in kind._fields if name not in state._fields]:
            raise ValueError(f"{self.name} wants {lacking[0]!r} of a layer's state, which this tree does not have")
        return kind(*(getattr(state, name) for name in kind._fields))


class _TheirChunks:
    """Operations of a tree whose `Chunk` may have other fields."""

    def __init__(self, operations: ModuleType, kind: Any):
        self._operations, self._kind = operations, kind

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._operations, name)

        def call(chunk: Any, *rest: Any) -> Any:
            if isinstance(chunk, Chunk):
                chunk = self._kind(*(getattr(chunk, field) for field in self._kind._fields))
            return operation(chunk, *rest)

        return call


def _archive(commit: str) -> bytes:
    """The folders of a commit, as a tar archive."""
    command = ["git", "archive", commit, *FOLDERS]
    try:
        done = subprocess.run(command, cwd=RESULTS.parents[1], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise ValueError(
            f"against={commit!r} is neither a folder with {' and '.join(FOLDERS)} nor a commit: {output}"
        ) from None
    return done.stdout


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of a package in a tree."""

    def __init__(self, package: str, folder: Path):
        self.package, self.folder = package, folder

    def find_spec(self, fullname, path=None, target=None):
        root, *parts = fullname.split(".")
        if root != self.package:
            return None
        top = self.folder / (parts.pop(0) if parts[:1] == ["triton_kernels"] else OURS)
        place = top.joinpath(*parts)
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _Renaming(fullname, str(file), self.package)
        locations = [str(place)] if is_package else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=locations
        )


class _Renaming(importlib.machinery.SourceFileLoader):
    """Loads a file with the package's name replaced in its text."""

    def __init__(self, fullname: str, path: str, package: str):
        super().__init__(fullname, path)
        self.package = package

    def path_stats(self, path):
        raise OSError("compiled files beside the sources are of the package by its usual name")

    def get_data(self, path):
        if self.name == self.package:
            return b""  # importing the package itself would register it with transformers
        # replaces names of modules and operations, but not of folders, loggers and distributions
        text = super().get_data(path).decode()
        return re.sub(rf"\b{OURS}(?=\.\w|::)", self.package, text).encode()


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
    with patch.object(compiler, "Module", _Noted(wanted, None if tree is None else tree.name)):
        yield
    forget()


def wanted_by(case: PackedCase, tree: OtherTree | None, backend: str) -> list[Wanted]:
    """The compilations that a measurement of a case needs: attention in any order of pages and in fixed order, a step,
    and storing."""
    wanted: dict[Wanted, None] = {}
    if tree is not None:
        case = case.of(tree)
    with _noting(tree, wanted):
        for order in ("0", "1"):
            with patch.dict(os.environ, {determinism.VARIABLE: order}):
                case.attend(backend)
        case.step(0, backend)
        case.append(0, backend)
    return list(wanted)


def tiny_case(
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
