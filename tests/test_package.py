"""The wheel, used from outside the checkout, and what the checkout itself must not contain."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_lowbit_kv import reference
from hf_lowbit_kv.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building in place would leave `build/` in the checkout
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hf_lowbit_kv", "triton_kernels", "eval"):
        (source / name).symlink_to(ROOT / name)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_lowbit_kv"}
    for folder, inside in (
        ("hf_lowbit_kv", ""),
        ("hf_lowbit_kv/cli", "cli/"),
        ("triton_kernels", "triton_kernels/"),
        ("eval", "eval/"),
    ):
        for module in (ROOT / folder).glob("*.py"):
            assert f"hf_lowbit_kv/{inside}{module.name}" in names
    for source in (ROOT / "triton_kernels" / "cuda").glob("*.[pc]*"):
        assert f"hf_lowbit_kv/triton_kernels/cuda/{source.name}" in names
    assert "hf_lowbit_kv/formats/base.py" in names
    assert "hf_lowbit_kv/py.typed" in names


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    command = ["install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, cwd=tmp_path)
    program = """
import sys
import hf_lowbit_kv, hf_lowbit_kv.cli, hf_lowbit_kv.eval.local_models
modules = [hf_lowbit_kv, hf_lowbit_kv.cli, hf_lowbit_kv.eval]
try:
    import triton
except ImportError:
    pass  # the kernels are of no use without it
else:
    import hf_lowbit_kv.triton_kernels
    modules.append(hf_lowbit_kv.triton_kernels)
assert all(m.__file__.startswith(sys.argv[1]) for m in modules), modules
assert hf_lowbit_kv.get_preset("kivi-2").spec().bits_per_value(32768, 128) < 2.5
assert "triton_kernels" not in sys.modules and "eval" not in sys.modules
"""
    # PYTHONPATH comes before the editable install of the checkout
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *_paths_without_checkout()])}
    subprocess.run([sys.executable, "-c", program, str(target)], check=True, cwd=tmp_path, env=env)


def _paths_without_checkout() -> list[str]:
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in inherited if path and Path(path).resolve() != ROOT]


def test_every_extra_that_is_named_exists():
    """Of the project's extras, those in messages, documentation and notebooks."""
    declared = set(importlib.metadata.metadata("hf-lowbit-kv").get_all("Provides-Extra"))
    named = {
        extra
        for glob in ("*.py", "*.md", "*.ipynb", "Makefile")
        for path in ROOT.rglob(glob)
        if not {".venv", "tests"} & set(path.relative_to(ROOT).parts)
        for extras in re.findall(r"(?:hf-lowbit-kv|\./?|\")\[([a-z][a-z,_]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"eval", "dev"} <= declared
    assert named - declared == set()


def test_linux_gets_what_the_kernels_need():
    requirements = [Requirement(text) for text in importlib.metadata.requires("hf-lowbit-kv")]
    linux, mac = (
        {"platform_system": system, "platform_machine": machine, "extra": ""}
        for system, machine in (("Linux", "x86_64"), ("Darwin", "arm64"))
    )
    wanted = [
        {each.name for each in requirements if each.marker is None or each.marker.evaluate(where)}
        for where in (linux, mac)
    ]
    assert wanted[0] - wanted[1] == {"cuda-bindings", "triton"}


MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:(?:home|root|work|Users|mnt|opt)/\w|tmp\b)")


def test_no_machine_paths_in_the_checkout():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    assert {ROOT / "README.md", ROOT / "Makefile", ROOT / "hf_lowbit_kv/cache.py", Path(__file__)} <= set(files)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:200]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["home", "root", "work", "Users", "mnt", "opt", "tmp"])
def test_machine_paths_are_recognized(folder):
    path = f"/{folder}/someone/file.txt"
    assert all(MACHINE_PATH.search(line) for line in (path, f"write to {path}", f'open("{path}")', f"--out={path}"))
    assert not MACHINE_PATH.search(f"tests{path} and $HOME{path}")  # inside the checkout, and below a variable


@pytest.mark.parametrize("name", BACKENDS)
def test_operations_of_a_backend_take_what_the_references_take(name):
    if name in ("triton", "cuda"):
        pytest.importorskip("triton")
    for reading in BACKENDS[name].modules:
        module = BACKENDS[name].operations(reading)
        for operation in ("attend", "append", "read", "step"):
            if operation == "step" and not hasattr(module, "step"):
                continue
            taken = inspect.signature(getattr(module, operation)).parameters.values()
            expected = inspect.signature(getattr(reference, operation, reference.attend)).parameters.values()
            assert [(x.name, x.default) for x in taken] == [(x.name, x.default) for x in expected]
