"""The arguments of a `generate` call, checked before anything is allocated."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationMixin

from ..cache.cache_options import PresetOptions
from ..cache.served_models import longest_text
from ..triton_kernels.toolchain import why_gpu_cannot_launch
from .generation_settings import GenerationSettings, setting_names

#: how a decoding step may run
STEPS = ("recorded", "compiled", "eager")
#: names that a prompt may have among the options
PROMPTS = ("input_ids", "inputs_embeds")
#: generation settings that this package adds to a call
_ADDED = (
    "max_new_tokens",
    "disable_compile",
    "compile_config",
    "cache_implementation",
    "use_cache",
    "prefill_chunk_size",
)
#: options of `generate` that are not in its signature
_UNLISTED_OPTIONS = ("tokenizer", "assistant_tokenizer", "trust_remote_code")


@dataclass(frozen=True)
class Call:
    """The checked arguments of a `generate` call. Immutable.

    Attributes:
        model: unwrapped.
        prompt: the prompt as keyword arguments of `model.generate`.
        tokens: its tokens per row.
        rows: rows of the cache: the rows of the prompt times the sequences to generate for each.
        new_tokens: largest number of tokens to write.
        step: one of `STEPS`.
        fuse: see `generate`.
        options: the caller's options for `model.generate`.
    """

    model: Any
    prompt: Mapping[str, Any]
    rows: int
    tokens: int
    new_tokens: int
    step: str
    fuse: bool
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: Any,
        inputs: Any,
        max_new_tokens: int | None,
        step: str | None,
        fuse: bool,
        options: Mapping[str, Any],
    ) -> Call:
        """Check the arguments of `generate`. Raises for options that cannot run on a preallocated cache."""
        prompt = prompt_of(inputs, options)
        step = which_step(model, step, options)
        rows, tokens = prompt_shape(prompt)
        check_vocabulary(model, prompt.get("input_ids"))
        check_mask({**prompt, **options}.get("attention_mask"), rows, tokens)
        settings = GenerationSettings.of(model, {**options, "max_new_tokens": max_new_tokens}, tokens=tokens)
        others = {name: value for name, value in options.items() if name not in (*PROMPTS, "max_length")}
        rows, new_tokens = rows * settings.sequences, settings.new_tokens
        return cls(model, MappingProxyType(prompt), rows, tokens, new_tokens, step, fuse, MappingProxyType(others))

    @property
    def length(self) -> int:
        """Largest number of tokens of a row at the end."""
        return self.tokens + self.new_tokens

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for `model.generate`, without the cache and the options that depend on `step`."""
        return {**self.prompt, "max_new_tokens": self.new_tokens, **self.options}


def prompt_of(inputs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt as keyword arguments, from `inputs` or else from the options."""
    named: dict[str, Any] = {name: options[name] for name in PROMPTS if name in options}
    if inputs is None:
        return named
    if named:
        raise ValueError(f"inputs and {next(iter(named))} are both given; give one of them")
    return dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}


def which_step(model: Any, step: str | None, options: Mapping[str, Any]) -> str:
    """How steps run. Raises if they cannot run that way."""
    if step not in (None, *STEPS):
        raise ValueError(f"step={step!r} is not known; allowed: {', '.join(map(repr, STEPS))}")
    configs = (options.get("compile_config"), getattr(options.get("generation_config"), "compile_config", None))
    step = step or ("recorded" if configs == (None, None) else "compiled")
    if step == "compiled" and model.device.type == "cuda" and (reason := why_gpu_cannot_launch()) is not None:
        raise RuntimeError(f"the step cannot be compiled: {reason}; step='recorded' works without a compiler")
    return step


def in_one_configuration(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options. Settings that this package adds are moved into a copy of the caller's generation configuration, because
    transformers warns of a configuration together with settings."""
    others, config = dict(options), copy.deepcopy(options.get("generation_config"))
    if config is None:
        return others
    for name in set(_ADDED) & set(options):
        # transformers replaces `None` of a configuration by the model's setting
        if options[name] is not None or getattr(model.generation_config, name, None) is None:
            setattr(config, name, others.pop(name))
    config.max_length = None  # `max_new_tokens` contains it
    return {**others, "generation_config": config}


def options_of_cache(
    cache_options: Mapping[str, Any] | None, calibration: Any, allow_other_weights: bool = False
) -> dict[str, Any]:
    """The options of a new cache: the caller's options and the calibration arguments."""
    options = dict(cache_options or {})
    if allow_other_weights is not False:
        options["allow_other_weights"] = allow_other_weights
    if calibration is not None:
        if options.get("calibration") is not None:
            raise ValueError("calibration= and cache_options['calibration'] are both given; give one of them")
        options["calibration"] = calibration
    return options


def prompt_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of the prompt and tokens per row."""
    prompt = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
    if not isinstance(prompt, torch.Tensor) or prompt.dim() < 2 or 0 in prompt.shape:
        raise ValueError(
            "inputs must be token ids [batch, tokens], at least one, or hold such 'input_ids' (tokenizers return them with "
            f"return_tensors='pt'), not {prompt!r:.80}"
        )
    return prompt.shape[0], prompt.shape[1]


def check_vocabulary(model: Any, ids: torch.Tensor | None) -> None:
    """Raise if a token has no embedding: on a GPU, reading it would end the process's use of the device. Waits for the device.
    Models that also read images may give such a token another embedding, and are not checked."""
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if ids is None or vocabulary is None or model.config.get_text_config(decoder=True) is not model.config:
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(
            f"input_ids have token {wrong}, which is not one of the model's {vocabulary}: is it of another tokenizer?"
        )


def warn_of_length(model: Any, tokens: int, length: int) -> None:
    """Warn if the sequence may become longer than the model's positions.

    Args:
        tokens: length of the prompt, padding included.
        length: the prompt and all tokens that may be generated.
    """
    longest = longest_text(model.config)
    if longest is not None and length > longest:
        subject = "the prompt has" if tokens > longest else "prompt and answer may have"
        warnings.warn(
            f"{subject} {tokens if tokens > longest else length} tokens, and the model was made for at most {longest} "
            "(max_position_embeddings and RoPE scaling of its configuration): beyond that its output is usually useless",
            stacklevel=3,
        )


def check_mask(mask: Any, rows: int, tokens: int) -> None:
    """Raise if a padding mask does not have the shape of the prompt. Masks with more dimensions are rejected later."""
    if mask is not None and mask.dim() <= 2 and tuple(mask.shape) != (rows, tokens):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be [batch, tokens], here {(rows, tokens)}"
        )


# ---- names of options -------------------------------------------------------------------------------------------------


def check_names(
    caller: str,
    model: Any,
    options: Mapping[str, Any],
    own: Collection[str],
    model_inputs: bool = True,
) -> None:
    """Raise if an option is unknown.

    Args:
        caller: name of the function, for the message.
        model: unwrapped.
        options: keyword arguments of the call.
        own: names of the function's own options.
        model_inputs: whether the function also accepts options of `model.generate` and inputs of the model
            (`pixel_values`, `token_type_ids`). As in `model.generate`, any input may be `None`.

    Raises:
        ValueError: an option is unknown. The message says where an option of the cache belongs, or suggests a similar
            name.
    """
    allowed = {*own, *setting_names(model, options.get("generation_config"))}
    if model_inputs:
        allowed |= {*inspect.signature(GenerationMixin.generate).parameters, *_UNLISTED_OPTIONS} - {"self", "kwargs"}
    for name, value in options.items():
        if name in allowed or (model_inputs and (value is None or _is_model_input(model, name))):
            continue
        raise ValueError(_advice(caller, name, allowed, model_inputs))


def _is_model_input(model: Any, name: str) -> bool:
    """Whether the model accepts an input of this name, according to transformers."""
    try:
        model._validate_model_kwargs({name: True})
    except ValueError:
        return False
    return True


def _advice(caller: str, name: str, allowed: Collection[str], model_inputs: bool) -> str:
    if name in PresetOptions.__annotations__:
        return f"{name!r} is an option of the cache; pass it as {caller}(..., cache_options={{{name!r}: ...}})"
    known = sorted({*allowed, *PresetOptions.__annotations__})
    hint = ""
    for close in difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        hint = f"; did you mean {close!r}{'' if close in allowed else f', as cache_options={{{close!r}: ...}}'}?"
    others = ", nor an input of the model" if model_inputs else " (images and other inputs than tokens are not served)"
    return f"{name!r} is not known: neither an option of {caller}, nor of the generation configuration{others}{hint}"
