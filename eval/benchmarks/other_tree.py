"""Another state of this package in the same process, under another name. `bench_decode --against` compares with it.

The other tree's files are imported with the package's name replaced in their text. So its modules, and the operations
that it registers with torch, do not collide with ours. Only requested modules are imported. Nothing is registered with
transformers.

`compile_kernels` compiles those of both trees in parallel before they are timed. A matrix needs some hundred kernels.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hf_lowbit_kv.backends.choice import storage_spec
from hf_lowbit_kv.eval.benchmarks.packed_layer import PackedCase, Shape, build
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import determinism

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
        """The other tree's `hf_lowbit_kv.backends.operations`. It takes `StepInputs` and a `PagedStore` of this tree."""
        step = self.module("storage.step")
        return _TheirOperations(self.module("backends.operations"), getattr(step, "StepInputs", None) or step.Chunk)

    def spec(self, spec: Any, widths: tuple[int, int], dtype: Any) -> Any:
        """The other tree's `LayerSpec` from the same text. widths: channels of keys and of values.

        Raises:
            ValueError: the other tree does not know a format, or its pages have another size.
        """
        kind = self.module("storage.layer_spec").LayerSpec
        if not hasattr(kind, "attention_kind"):
            kind.attention_kind = property(lambda each: each.reading)  # its name before
        parsed = kind.parse(spec.key)
        ours, theirs = (each.part_bytes(*widths, dtype) for each in (spec, parsed))
        if ours != theirs:
            raise ValueError(f"{self.name} stores a page of {spec.key} in {theirs} bytes, and this tree in {ours}")
        return parsed

    def state(self, state: Any) -> Any:
        """The other tree's `LayerState` with the same tensors."""
        kind = self.module("storage.paged_store").LayerState
        return kind(*(getattr(state, name) for name in kind._fields))


class _TheirOperations:
    """Operations of a tree whose `StepInputs` may have other fields, or the name that it had before (`Chunk`)."""

    def __init__(self, operations: ModuleType, kind: Any):
        self._operations, self._kind = operations, kind

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._operations, name)

        def call(inputs: Any, *rest: Any) -> Any:
            if isinstance(inputs, StepInputs):
                inputs = self._kind(
                    *(getattr(inputs, {"lacking": "score_bias"}.get(field, field)) for field in self._kind._fields)
                )
            return operation(inputs, *rest)

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
        module_path = top.joinpath(*parts)
        is_package = (module_path / "__init__.py").is_file()
        file = module_path / "__init__.py" if is_package else module_path.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _Renaming(fullname, str(file), self.package)
        locations = [str(module_path)] if is_package else None
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


def tiny_case(
    shape: Shape, preset: str, backend: str, head_dim: int, query_length: int, dtype, device, per_head
) -> PackedCase:
    """A layer with few tokens that needs the same kernels as the shape, because kernels depend on rows and heads, not
    on lengths."""
    spec = storage_spec(get_preset(preset).spec(), backend)
    least = spec.sink + spec.tail_size + query_length
    short = shape._replace(tokens=least, shortest=None)
    return build(short, spec, shape.head_dim or head_dim, query_length, dtype, device, per_head)


def compile_kernels(
    layers: Sequence[Callable[[], PackedCase]], backend: str, jobs: int, against: OtherTree | None = None
) -> None:
    """Compile the kernels that measurements of these layers (`tiny_case`) need, in `jobs` threads: each layer attends with any
    order of pages and with a fixed one, steps and stores. NVRTC releases the GIL. Errors are ignored, because they are raised
    again when the layer is measured."""

    def use(layer: Callable[[], PackedCase], tree: OtherTree | None) -> None:
        with suppress(Exception):
            case = layer() if tree is None else layer().of(tree)
            case.attend(backend)
            case.step(0, backend)
            case.append(0, backend)

    for order in ("0", "1"):
        with patch.dict(os.environ, {determinism.VARIABLE: order}), ThreadPoolExecutor(jobs) as threads:
            for layer, tree in itertools.product(layers, (None, against) if against else (None,)):
                threads.submit(use, layer, tree)
