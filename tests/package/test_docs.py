"""What pages of the documentation state, compared with records and sources."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import accuracy_rows
import pytest

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.presets import DEFAULT_PRESET, PAPER_PRESETS

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def bits(preset: str) -> float:
    return lb.get_preset(preset).spec().bits_per_value(32768, 128)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{name}.md" for name in ("choose", "dev/recording"))])
def test_every_preset_that_a_page_names_is_listed(document):
    """A preset is any word that `get_preset` knows: suffixes make names that are not listed."""
    named = {word for word in re.findall(r"\w[\w.-]*\w", page(document)) if is_preset(word)}
    assert DEFAULT_PRESET in named
    known = {*lb.preset_names(), *(PAPER_PRESETS if document == "docs/choose.md" else ())}
    assert sorted(named - known) == []


def is_preset(word: str) -> bool:
    try:
        lb.get_preset(word)
    except ValueError:
        return False
    return True


SHORT_ANSWER = {
    wanted: (preset, float(stored), same)
    for wanted, preset, stored, same in re.findall(
        r"^\| ([^|`]+) \| `([\w.-]+)` \| ([\d.]+) \| ([\d.]+) of 100", page("docs/choose.md"), re.MULTILINE
    )
}


@pytest.mark.parametrize("wanted", SHORT_ANSWER)
def test_the_short_answer_gives_the_records_figures(wanted):
    preset, stored, same = SHORT_ANSWER[wanted]
    (row,) = (row for row in accuracy_rows.rows() if row.preset == preset)
    assert stored == pytest.approx(bits(preset), abs=0.051)
    digits = len(same.partition(".")[2])
    assert float(same) == pytest.approx(100 * row.essays["top1"], abs=0.501 * 10**-digits)


def test_the_short_answer_names_the_smallest():
    """Of all presets, and of those that need no calibration; `dense` and latents aside, and with sinks."""
    assert len(SHORT_ANSWER) >= 6
    presets = [name for row in accuracy_rows.rows() if lb.get_preset(name := row.preset).spec().sink]
    presets = [name for name in presets if name not in PAPER_PRESETS]
    plain = [name for name in presets if not lb.get_preset(name).spec().parameters(128, 128, 8)]
    assert bits(SHORT_ANSWER["the least memory of all, with one calibration run"][0]) == min(map(bits, presets))
    assert bits(SHORT_ANSWER["the least memory without calibration"][0]) == min(map(bits, plain))


def test_contributing_lists_every_folder():
    """And files that exist. What each file is for, it says itself."""
    text = page("CONTRIBUTING.md")
    section = text[text.index("## Where things are") : text.index("\nFolders import each other")]
    listed = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", section)
    package = ROOT / "hf_lowbit_kv"
    modules = {path.name for path in (*package.rglob("[!_]*.py"), *ROOT.glob("*.py"))}
    assert sorted({name for name in listed if name.endswith(".py")} - modules) == [], "files that do not exist"
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert sorted(folders - {name[:-1] for name in listed}) == [], "folders that are not listed"
    assert all((ROOT / name).is_dir() or (package / name).is_dir() for name in listed if name.endswith("/"))
    assert len(listed) == len(set(listed))


def test_every_file_says_what_it_is_for():
    for folder in ("hf_lowbit_kv", "triton_kernels", "eval"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not text.strip() or re.match(r'r?"""\S[^"]{10,}', text), (
                f"{path} does not begin with a sentence on itself"
            )


@pytest.mark.parametrize("document", ["docs/dev/recording.md"])
def test_a_compiled_step_stands_beside_one_of_the_same_run(document):
    """With `dense` pages in place of packed ones. An eager step of another cache would show Python's time as well."""
    found = re.findall(
        r"([\d.]+) ms with `kivi-2` and ([\d.]+) ms with `dense`.*?`(\w{7})`", " ".join(page(document).split())
    )
    assert found
    for packed, dense, commit in found:
        for cache, stated in (("kivi-2", packed), ("dense", dense)):
            measured = [
                record["step_ms"]
                for record in read_records(RESULTS / "generate-nvidia-h200.jsonl")
                if record["commit"].startswith(commit)
                and (record["cache"], record["mode"], record["batch"], record["tokens"]) == (cache, "tuned", 1, 131072)
            ]
            assert float(stated) == pytest.approx(measured[-1], abs=0.051)


PAGES = [
    path
    for pattern in ("*.md", "Makefile", "docs/**/*.md", "eval/**/*.md", "notebooks/*.ipynb", "tests/data/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def has(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_modules_that_pages_and_notebooks_run_and_import_exist():
    """`python -m ...` and `from ... import ...`; names that are imported too."""
    commands, imports = set[str](), set[tuple[str, str]]()
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\n", "\n").replace('\\"', '"')
        commands |= set(re.findall(r"-m[\s\",]+(hf_lowbit_kv(?:[\w.]*\w)?)", text))
        for module, names in re.findall(r"from (hf_lowbit_kv[\w.]*) import ([\w, ]+)", text):
            imports |= {(module, name.split(" as ")[0].strip()) for name in names.split(",")}
    assert {"hf_lowbit_kv", "hf_lowbit_kv.eval.accuracy", "hf_lowbit_kv.eval.benchmarks.bench_decode"} <= commands
    assert ("hf_lowbit_kv.eval.local_models", "load_model") in imports
    assert [name for name in sorted(commands) if importlib.util.find_spec(name) is None] == []
    assert [f"from {module} import {name}" for module, name in sorted(imports) if not has(module, name)] == []
