"""Links and names of pages: everything that a page links to, and every page that a message or docstring names, is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "eval").rglob("*.md")]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
        for path in SOURCES + PAGES
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
