"""The site of these pages: `make docs` builds it into build/docs, offline, with warnings as errors."""

import re
from pathlib import Path

import hf_lowbit_kv
from hf_lowbit_kv import presets

presets.PresetName = str  # signatures would print all names; modules that use it are imported later

project = "hf-lowbit-kv"
author = "the authors of hf-lowbit-kv"
version = release = hf_lowbit_kv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns: list[str] = []

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# pages also link files of the checkout that are no pages (records, notebooks); a test looks those up
suppress_warnings = ["myst.xref_missing", "myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
napoleon_custom_sections = ["Keys"]
default_role = "code"  # docstrings mark names by single backticks

html_theme = "furo"
html_title = "hf-lowbit-kv"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


SECTIONS = ("Args:", "Returns:", "Raises:", "Attributes:", "Keys:", "Yields:", "Example:")


def examples_as_code(app, what, name, obj, options, lines):
    """Docstrings show examples as indented lines; docutils would take those for quotations."""
    end = next((i for i, line in enumerate(lines) if line.strip() in SECTIONS), len(lines))
    shown, inside = [], False
    for previous, line in zip(["", *lines], lines[:end], strict=False):
        begins = line.startswith("    ") and not previous.strip()
        if begins and not inside:
            shown += [".. code-block:: python", ""]
            inside = True
        elif line.strip() and not line.startswith("    "):
            inside = False
        shown.append(line)
    lines[:] = [*shown, *lines[end:]]


def titles_as_texts(app, docname, source):
    """Pages write links as `[start.md](start.md)`, which reads well in a checkout; a site shows the title of the page or
    of its section. Files outside these pages keep their name."""

    def title(link):
        page = (Path(app.srcdir) / docname).parent / link[1]
        return f"[]({link[1]}{link[2]})" if page.resolve().is_relative_to(Path(app.srcdir).resolve()) else link[0]

    source[0] = re.sub(r"\[[\w/-]+\.md\]\(([\w/.-]+\.md)(#[\w-]+|)\)", title, source[0])


def setup(app):
    app.connect("source-read", titles_as_texts)
    # before napoleon, which has the default priority of 500
    app.connect("autodoc-process-docstring", examples_as_code, priority=100)
