"""Names in the docs: files, modules, classes and functions of ours that a page names in backticks are there."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "dev").glob("*.md"))]
#: folder of the checkout -> the package that its modules are imported from
TOPS = {"hf_lowbit_kv": "hf_lowbit_kv", "triton_kernels": "hf_lowbit_kv.triton_kernels", "eval": "hf_lowbit_kv.eval"}
SUFFIXES = "py|md|cu|cuh|json|jsonl|toml|txt|yml|png"

#: a file that an example of the page writes
WRITTEN = re.compile(r"^<!-- file(?: only)?: (\S+) -->", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+(?=$|\()")
PRIVATE = re.compile(r"_[a-z]\w*(?=$|\()")
PATH = re.compile(rf"[\w.-]*(?:/[\w.-]*)+|[\w.-]+\.(?:{SUFFIXES})")

#: first part of a dotted name -> the class of the object that pages call so
OBJECTS = {"cache": "LowBitCache", "chat": "Chat", "nbytes": "CacheBytes", "result": "Result"}
#: first parts of dotted names that are not ours: other packages, a user's model, layer or output, instructions of a GPU
OTHERS = {"copy", "layer", "model", "output", "tl", "torch", "transformers", "cp", "ldmatrix", "mma", "stmatrix"}
#: page -> files, or stems of files, that the reader writes, that a command writes, or that other packages have
ELSEWHERE = {
    "add-a-format.md": {"mx8"},
    "calibrate.md": {"rows.json"},
    "calibrated-presets.md": {"popular.txt", "worked.txt"},
    "faq.md": {"calibrations/", "kernels/"},
    "models.md": {"config.json"},
    "protocols.md": {"longbench_qasper.jsonl"},
    "vecinfer.md": {"calibration.safetensors"},
}


def code_words(page: Path) -> list[str]:
    """What is in backticks, without blocks of code."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return CODE.findall(text)


@functools.cache
def paths() -> list[str]:
    """Every file and folder of the checkout, hidden ones apart: "/docs/dev/design.md", "/docs/dev/"."""
    tops = [path for path in ROOT.iterdir() if path.name == ".github" or path.name[0] != "."]
    everything = tops + [path for top in tops if top.is_dir() for path in top.rglob("*")]
    return [f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in everything]


@functools.cache
def files() -> dict[str, list[str]]:
    """Stem of a file or name of a folder -> names of the modules."""
    stems: dict[str, list[str]] = {}
    for top, package in TOPS.items():
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            name = ".".join((package, *parts))
            stems.setdefault(name.rpartition(".")[2], []).append(name)
    for path in (ROOT / "tests" / "support").glob("*.py"):
        stems.setdefault(path.stem, []).append(path.stem)
    return stems


@functools.cache
def definitions() -> tuple[dict[str, list[str]], set[str]]:
    """Class -> names of its modules; and all names that a module or class defines or assigns."""
    classes: dict[str, list[str]] = {}
    defined: set[str] = set()
    for modules in files().values():
        for module in modules:
            text = source(module)
            for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
                classes.setdefault(name, []).append(module)
            defined |= set(re.findall(r"^\s*(?:def |class )?(\w+)(?=\(.*:$|\(|:| =)", text, re.MULTILINE))
    return classes, defined


def source(module: str) -> str:
    for top, package in sorted(TOPS.items(), key=lambda item: -len(item[1])):
        if module == package or module.startswith(f"{package}."):
            path = ROOT.joinpath(top, *module[len(package) + 1 :].split("."))
            break
    else:
        path = ROOT / "tests" / "support" / module
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def has_attribute(owner: object, name: str) -> bool:
    """Also fields without a default, and what methods of our classes assign."""
    if hasattr(owner, name):
        return True
    ours = [base for base in getattr(owner, "__mro__", ()) if base.__module__.startswith("hf_lowbit_kv")]
    return any(
        name in getattr(base, "__annotations__", {})
        or re.search(rf"\bself\.{name}(?:: [^=]+)? = ", inspect.getsource(base))
        for base in ours
    )


def resolves(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    if first == "lb":
        owners = [importlib.import_module("hf_lowbit_kv")]
    elif first == "hf_lowbit_kv":
        return any(dotted in modules for modules in files().values())
    else:
        first = OBJECTS.get(first, first)
        classes = definitions()[0].get(first, [])
        owners = [getattr(importlib.import_module(module), first) for module in classes]
        owners += [importlib.import_module(module) for module in files().get(first, [])]
    return any(has_attribute(owner, rest[0]) for owner in owners)


def path_exists(word: str) -> bool:
    return any(path.rstrip("/").endswith("/" + word.rstrip("/")) for path in paths())


def unknown(page: Path) -> list[str]:
    missing, elsewhere = set(), ELSEWHERE.get(page.name, set())
    elsewhere = elsewhere | set(WRITTEN.findall(page.read_text(encoding="utf-8")))
    for word in code_words(page):
        if word in elsewhere or Path(word).stem in elsewhere:
            continue
        if PATH.fullmatch(word):
            # "/v1/models" is an address of a server, ".txt" a suffix
            if word[0] != "/" and word.lstrip(".") not in SUFFIXES.split("|") and not path_exists(word):
                missing.add(word)
        elif match := DOTTED.match(word):
            if match[0].partition(".")[0] not in OTHERS and not resolves(match[0]):
                missing.add(word)
        elif (match := PRIVATE.match(word)) and match[0] not in definitions()[1]:
            missing.add(word)
    return sorted(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_backticks_are_there(page):
    assert unknown(page) == [], "files of the reader's own belong into ELSEWHERE, names of other packages into OTHERS"


def test_wrong_names_are_noticed(tmp_path):
    """Names that pages had, and the ways in which a name is looked up."""
    right = [
        *("choice.storage_spec", "LayerStore.kernels", "RowMemory.select_rows", "nbytes.parameters"),
        "lb.generate",
    ]
    right += ["cache.fork(n)", "LayerState.parameters", "kernel_cases.check_steps", "_pack_row", "hf_lowbit_kv.eval"]
    right += ["storage/reference.py", "store.cuh", "docs/dev/", "triton_kernels/cuda", ".github/workflows/nightly.yml"]
    wrong = [
        *("backends.BACKENDS", "mla.Absorbed", "LayerStore.kernel", "nbytes.pages_", "lb.generates"),
        "hf_lowbit_kv.evals",
    ]
    wrong += ["nobodys.name", "_pack_rows", "storage/references.py", "stores.cuh", "docs/deve/"]
    page = tmp_path / "page.md"
    page.write_text(" ".join(f"`{name}`" for name in right + wrong), encoding="utf-8")
    assert unknown(page) == sorted(wrong)


# ---- links ----------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
LINKING_PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "eval").rglob("*.md")]
SOURCES = [
    path
    for folder in ("hf_lowbit_kv", "triton_kernels", "eval", "tests", "notebooks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cu", ".cuh", ".ipynb"}
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\bdocs/[\w/.-]+\.(?:md|png)\b")


def anchors(page: Path) -> set[str]:
    """Names of the page's headings, as sites make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_links_of_the_readme_are_seen():
    assert len(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) > 8


def test_pages_that_sources_and_pages_name_are_there():
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES + LINKING_PAGES
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert sorted(f"{path}: {name}" for path, name in named if not (ROOT / name).exists()) == []


def test_the_site_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w./*-]+)$", index, re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")} - {"index"}
    assert sorted(page for page in pages if page not in listed) == []


def test_the_api_page_has_every_public_name():
    import hf_lowbit_kv as lb

    shown = set(
        re.findall(r"^\.\. auto\w+:: (\w+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert sorted(set(lb.__all__) - shown - {"ATTENTION_NAME"}) == []
    assert sorted(shown - set(lb.__all__)) == []


def test_seeded_defects_are_of_code_and_tests_that_are_there():
    lines = (ROOT / "tests" / "support" / "seeded_defects.md").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")]
    rows = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows if "`" in row[1]]
    assert len(rows) > 90
    for defect, place, changes, test in rows:
        path, function = CODE.findall(place)
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b{re.split(r'[.:]+', function)[-1]}\(", source), f"{defect}: {path} has no {function}"
        changes = re.findall(r"`([^`]+)` -> `([^`]+)`", changes)
        assert changes, defect
        for old, _ in changes:
            assert old in source, f"{defect}: {path} has no {old!r}"
        file, _, name = test.strip("`").partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{defect}: there is no {test}"
