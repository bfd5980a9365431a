"""The architecture: folders import each other in one direction and few floors deep, and a stem names one file."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: folder of the checkout -> its name after `hf_lowbit_kv.`
TOPS = {"hf_lowbit_kv": (), "triton_kernels": ("triton_kernels",), "eval": ("eval",)}
MOST_FLOORS = 9
#: a format or an operation may share its stem with its kernels, Triton's and CUDA's
SHARED = {
    *("affine", "append", "attend", "boosted", "codebook", "common", "dense", "fp8", "fp8_centered"),
    *("fragment", "latent", "static", "static_fragment", "transform"),
}
#: names that Python itself gives a meaning
PYTHONS = {"__init__", "__main__"}


def modules() -> dict[tuple[str, ...], Path]:
    """Module name after `hf_lowbit_kv`, in parts -> its file."""
    names = {}
    for top, prefix in TOPS.items():
        for path in (ROOT / top).rglob("*.py"):
            parts = prefix + path.relative_to(ROOT / top).with_suffix("").parts
            names[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return names


MODULES = modules()


def node(module: tuple[str, ...]) -> str:
    """A folder, the benchmarks inside `eval`, or a single file at the root."""
    if module[:2] == ("eval", "benchmarks"):
        return "eval/benchmarks"
    return module[0] if module else "__init__"


def imported(module: tuple[str, ...], path: Path) -> set[tuple[str, ...]]:
    """Modules of this package that a file imports: late, only for type checkers and by a string, too."""
    package = module if path.name == "__init__.py" else module[:-1]
    targets = set()
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom):
            named = tuple(statement.module.split(".")) if statement.module else ()
            if statement.level:
                base = package[: len(package) - statement.level + 1] + named
            elif named[:1] == ("hf_lowbit_kv",):
                base = named[1:]
            else:
                continue
            for alias in statement.names:
                targets.add((*base, alias.name) if (*base, alias.name) in MODULES else base)
        elif isinstance(statement, ast.Import):
            targets.update(
                tuple(alias.name.split(".")[1:])
                for alias in statement.names
                if alias.name.split(".")[0] == "hf_lowbit_kv"
            )
        elif isinstance(statement, ast.Constant) and isinstance(statement.value, str):
            name = tuple(statement.value.split("."))
            if len(name) > 1 and name[0] == "hf_lowbit_kv" and name[1:] in MODULES:
                targets.add(name[1:])
    return targets & MODULES.keys()


@functools.cache
def graph() -> dict[str, set[str]]:
    edges = defaultdict(set)
    for module, path in MODULES.items():
        edges[node(module)] |= {node(target) for target in imported(module, path)} - {node(module)}
    return dict(edges)


def floors_of(edges: dict[str, set[str]]) -> dict[str, int]:
    """Folder -> its floor: one above the highest of those that it imports. Fails if there is a circle."""
    floors: dict[str, int] = {}
    while len(floors) < len(edges):
        ready = [name for name in edges if name not in floors and edges[name] <= floors.keys()]
        circle = {name: sorted(edges[name] - floors.keys()) for name in edges if name not in floors}
        assert ready, f"these import each other in a circle: {circle}"
        floors |= {name: 1 + max((floors[target] for target in edges[name]), default=0) for name in ready}
    return floors


def test_folders_import_each_other_in_one_direction_and_few_floors_deep():
    floors = floors_of(graph())
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda item: item[1])


def test_folders_are_on_the_floors_that_the_design_shows():
    page = (ROOT / "docs" / "dev" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE)
    shown = {name.removesuffix(".py"): int(floor) for floor, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert len(shown) > 10
    assert shown.items() <= floors_of(graph()).items()


def test_the_graph_sees_every_kind_of_import():
    """Imports that other tests of this file rely on: relative, late, by a string."""
    edges = graph()
    assert "backends" in edges["cache"]
    assert "triton_kernels" in edges["backends"], "kernels are imported late, by the name of their module"
    assert "eval" in edges["cli"]
    assert edges["formats"] == set()


def test_a_files_stem_stands_for_one_file():
    stems = defaultdict(list)
    for path in MODULES.values():
        if path.stem not in PYTHONS:
            stems[path.stem].append(str(path.relative_to(ROOT)))
    twice = {stem: paths for stem, paths in stems.items() if len(paths) > 1 and stem not in SHARED}
    assert twice == {}
