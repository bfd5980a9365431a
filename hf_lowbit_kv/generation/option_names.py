"""Names of options. A call that takes any option of `model.generate` says first which name it does not know."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from ..cache.cache_options import PresetOptions

#: options of `generate` that are not in its signature
_OF_GENERATE = ("tokenizer", "assistant_tokenizer", "trust_remote_code")


def check_names(
    caller: str,
    model: Any,
    options: Mapping[str, Any],
    own: Collection[str],
    model_inputs: bool = True,
) -> None:
    """Raise for an option that a call does not take.

    Args:
        caller: name of the function, for the message. model: unwrapped. options: those that the user gave by name.
        own: names of the function's own options.
        model_inputs: whether the function also takes further options of `model.generate`, and inputs of the model
            (`pixel_values`, `token_type_ids`). As in `model.generate`, their value may be `None` for any model.

    Raises:
        ValueError: an option is not known. The message says where an option of the cache belongs, or names the nearest
            option.
        TypeError: `generation_config` is none.
    """
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config={config!r} is not allowed; it must be a GenerationConfig")
    known = {*own, *_settings(model, config)}
    if model_inputs:
        known |= {*inspect.signature(GenerationMixin.generate).parameters, *_OF_GENERATE} - {"self", "kwargs"}
    for name, value in options.items():
        if name in known or (model_inputs and (value is None or _reads(model, name))):
            continue
        raise ValueError(_advice(caller, name, known, model_inputs))


def _settings(model: Any, config: Any) -> set[str]:
    """Names of the settings of a generation configuration, including those that a user has added."""
    configs = (each for each in (GenerationConfig(), model.generation_config, config) if each is not None)
    return {name for each in configs for name in vars(each) if not name.startswith("_")}


def _reads(model: Any, name: str) -> bool:
    """Whether the model takes an input of this name. transformers decides."""
    try:
        model._validate_model_kwargs({name: True})
    except ValueError:
        return False
    return True


def _advice(caller: str, name: str, known: Collection[str], model_inputs: bool) -> str:
    of_cache = PresetOptions.__annotations__
    if name in of_cache:
        return f"{name!r} is an option of the cache; pass it as {caller}(..., cache_options={{{name!r}: ...}})"
    close = difflib.get_close_matches(name, sorted({*known, *of_cache}), n=1, cutoff=0.7)
    hint = "".join(f"; did you mean {each!r}{_place(each, known)}?" for each in close)
    others = ", nor an input of the model" if model_inputs else " (images and other inputs than tokens are not served)"
    return f"{name!r} is not known: neither an option of {caller}, nor of the generation configuration{others}{hint}"


def _place(name: str, known: Collection[str]) -> str:
    return "" if name in known else f", as cache_options={{{name!r}: ...}}"
