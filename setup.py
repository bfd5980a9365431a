"""README for a package index, where links must be absolute. Everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative links and pictures are those of the repository's main branch."""
    return re.sub(
        r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)",
        lambda link: f"{link[1]}{link[2]}({repository}/{'raw' if link[1] else 'blob'}/main/",
        text,
    )


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    setup(
        long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), urls["Repository"]),
        long_description_content_type="text/markdown",
    )
