"""Links of pages, what the site and the API page list, and the code that seeded defects name."""

import re
from pathlib import Path

import pytest

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
        path, function = re.findall(r"`([^`\n]+)`", place)
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b{re.split(r'[.:]+', function)[-1]}\(", source), f"{defect}: {path} has no {function}"
        changes = re.findall(r"`([^`]+)` -> `([^`]+)`", changes)
        assert changes, defect
        for old, _ in changes:
            assert old in source, f"{defect}: {path} has no {old!r}"
        file, _, name = test.strip("`").partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{defect}: there is no {test}"
