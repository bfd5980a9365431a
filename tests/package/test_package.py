"""The wheel, used from outside the checkout, and what the checkout itself must not contain."""

import ast
import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_lowbit_kv import installation

ROOT = Path(__file__).resolve().parents[2]


#: folders of the checkout, and what they are called in the wheel
FOLDERS = {"hf_lowbit_kv": "hf_lowbit_kv", "triton_kernels": "hf_lowbit_kv/triton_kernels", "eval": "hf_lowbit_kv/eval"}
#: what only this repository runs, and its records
NOT_SHIPPED = ROOT / "eval" / "benchmarks", ROOT / "eval" / "results"


def shipped_files() -> list[Path]:
    """The files of the checkout that belong in the wheel."""
    return [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not set(NOT_SHIPPED) & set(path.parents)
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as pip builds it without isolation: by the backend that pyproject.toml names, in a process of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building in place would leave `build/` in the checkout
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *FOLDERS):
        (source / name).symlink_to(ROOT / name)
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, folder], check=True, cwd=source, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_is_the_tree_without_benchmarks_and_results(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    expected = {
        "/".join([FOLDERS[path.relative_to(ROOT).parts[0]], *path.relative_to(ROOT).parts[1:]])
        for path in shipped_files()
    }
    assert len(expected) > 100
    assert {name for name in names if not name.startswith(f"{metadata}/")} == expected
    assert len(names) == len(set(names))


def test_the_modules_of_extras_are_those_of_the_project():
    """`need` and `doctor` look for modules; the project names packages."""
    of_module = importlib.metadata.packages_distributions()
    required = [Requirement(each) for each in importlib.metadata.requires(installation.NAME)]
    for name, extra in installation.EXTRAS.items():
        wanted = {canonicalize_name(each.name) for each in required if f'extra == "{name}"' in str(each.marker)}
        packages = {canonicalize_name(package) for module in extra.modules for package in of_module[module]}
        assert packages == wanted, name
        assert set(extra.data) <= installation.DATA.keys()


def test_links_of_the_readme_are_absolute_on_an_index(wheel):
    """They begin with the repository's address, and name files of the checkout."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(archive.read(name).decode())
    repository = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", metadata.get_payload())
    assert len(links) >= 20
    for picture, link in links:
        start = f"{repository}/{'raw' if picture else 'blob'}/main/"
        assert link.startswith(start)
        assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file()


def test_what_is_shipped_uses_no_benchmark():
    """Not late either, and not by a name in a string. `eval` imports the package's modules, never the package itself."""
    wrong = []
    for path in shipped_files():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "eval.benchmarks" in node.value:
                names = [node.value]
            front = path.parent == ROOT / "eval" and "hf_lowbit_kv" in names
            if front or any("benchmarks" in name.split(".") or "eval.benchmarks" in name for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {names}")
    assert wrong == []


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
    assert {ROOT / "README.md", ROOT / "Makefile", ROOT / "hf_lowbit_kv/cache/low_bit_cache.py", Path(__file__)} <= set(
        files
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:200]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
