"""The arguments of a `generate` call, checked before anything is allocated."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from ..cache.cache_options import PresetOptions, check_choice
from ..cache.implementation import NO_WEIGHTS
from ..cache.served_models import longest_text
from ..storage.layer_spec import check_count
from ..triton_kernels.toolchain import why_gpu_cannot_launch
from .sampling_settings import check_sampling

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
        check_choice("fuse", fuse)
        check_options(model, options)
        rows, tokens = prompt_shape(prompt)
        check_vocabulary(model, prompt.get("input_ids"))
        check_mask({**prompt, **options}.get("attention_mask"), rows, tokens)
        new_tokens = new_tokens_of(model, max_new_tokens, options, tokens)  # takes `max_length` into account
        rows *= return_sequences(model, options)
        check_sampling(model, prompt.get("input_ids"), options)
        others = {name: value for name, value in options.items() if name not in (*PROMPTS, "max_length")}
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


def cache_of(past_key_values: Any, cache: Any) -> Any:
    """The cache to continue: `past_key_values`, or `cache` (its name in transformers since 5.24)."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are both given, and mean the same; give one of them")
    return past_key_values if cache is None else cache


def which_step(model: Any, step: str | None, options: Mapping[str, Any]) -> str:
    """How steps run. Raises if they cannot run that way."""
    if step not in (None, *STEPS):
        raise ValueError(f"step={step!r} is not known; allowed: {', '.join(map(repr, STEPS))}")
    configured = getattr(options.get("generation_config"), "compile_config", None)
    if options.get("compile_config") is not None or configured is not None:
        if step not in (None, "compiled"):
            raise ValueError(f"step={step!r} and compile_config are both given; compile_config is for step='compiled'")
        step = "compiled"
    step = step or "recorded"
    if step != "compiled":
        return step
    if setting(model, options, "disable_compile"):
        raise ValueError("step='compiled' and disable_compile=True are both given; step='recorded' needs no compiler")
    if model.device.type == "cuda" and (reason := why_gpu_cannot_launch()) is not None:
        raise RuntimeError(f"the step cannot be compiled: {reason}; step='recorded' works without a compiler")
    return step


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise for options that cannot run on a preallocated cache, before anything is allocated."""
    for argument in (
        "assistant_model",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "use_mtp",
        "custom_generate",
    ):
        if (value := setting(model, options, argument)) is not None and value is not False:
            raise ValueError(
                f"{argument} is not allowed: its steps have several tokens; use model.generate with a growing cache"
            )
    if (beams := setting(model, options, "num_beams")) not in (None, 1):
        raise ValueError(
            f"num_beams={beams} is not allowed: a preallocated cache does not serve beam search; "
            "use model.generate with a growing cache"
        )
    if (implementation := options.get("cache_implementation")) is not None:
        raise ValueError(
            f"cache_implementation={implementation!r} is not allowed: the cache is a low-bit one; use model.generate for others"
        )
    if setting(model, options, "output_attentions"):
        raise ValueError(NO_WEIGHTS)
    if setting(model, options, "use_cache") is False and not of_checkpoint(model, options, "use_cache"):
        raise ValueError("use_cache=False is not allowed: there would be nothing to pack")


def setting(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """A generation setting: from the call, else from its generation configuration, else from the model's."""
    if options.get(name) is not None:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def of_checkpoint(model: Any, options: Mapping[str, Any], name: str) -> bool:
    """Whether a cache setting comes from the model's own generation configuration: checkpoints contain settings of their
    training, which give way."""
    own = getattr(model.generation_config, name)
    return options.get(name) is None and getattr(options.get("generation_config"), name, None) in (None, own)


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
) -> Mapping[str, Any] | None:
    """The options of a new cache: the caller's options and the calibration arguments."""
    if not isinstance(cache_options, Mapping | None):
        raise TypeError(f"cache_options={cache_options!r} is not allowed; it must be a dict of options, or None")
    check_choice("allow_other_weights", allow_other_weights)
    if allow_other_weights:
        cache_options = {**(cache_options or {}), "allow_other_weights": True}
    if calibration is None:
        return cache_options
    if (other := (cache_options or {}).get("calibration")) is not None:
        one, two = (repr(x) if isinstance(x, (str, os.PathLike)) else type(x).__name__ for x in (calibration, other))
        raise ValueError(f"calibration={one} and cache_options['calibration']={two} are both given; give one of them")
    return {**(cache_options or {}), "calibration": calibration}


def return_sequences(model: Any, options: Mapping[str, Any]) -> int:
    count = setting(model, options, "num_return_sequences")
    check_count("num_return_sequences", count, optional=True, unit="texts of a prompt")
    return count or 1


def new_tokens_of(model: Any, max_new_tokens: int | None, options: Mapping[str, Any], tokens: int) -> int:
    """Largest number of tokens to generate, from `max_new_tokens` or `max_length`."""
    length = options.get("max_length")
    if max_new_tokens is not None and length is not None:
        raise ValueError(f"max_new_tokens={max_new_tokens} and max_length={length} are both given; give one of them")
    config = options.get("generation_config")
    if max_new_tokens is None and length is None:
        max_new_tokens = getattr(config, "max_new_tokens", None)
        length = getattr(config, "max_length", None) if max_new_tokens is None else None
    if length is not None:
        check_count("max_length", length)
        if length <= tokens:
            raise ValueError(f"max_length={length} leaves no room for new tokens: the prompt has {tokens} tokens")
        max_new_tokens = length - tokens
    if max_new_tokens is None:
        max_new_tokens = model.generation_config.max_new_tokens
    if max_new_tokens is None:
        raise ValueError(
            "max_new_tokens=None: the cache is allocated before the first step, so give the most tokens to write"
        )
    check_count("max_new_tokens", max_new_tokens)
    return max_new_tokens


def prompt_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of the prompt and tokens per row. Raises if ids are not integers."""
    prompt = ids = inputs.get("input_ids")
    if prompt is None:
        prompt = inputs.get("inputs_embeds")
    if not isinstance(prompt, torch.Tensor) or prompt.dim() < 2 or 0 in prompt.shape:
        raise ValueError(
            "inputs must be token ids [batch, tokens], at least one, or hold such 'input_ids' (tokenizers return them with "
            f"return_tensors='pt'), not {_described(prompt)}"
        )
    if ids is not None and ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids have dtype {ids.dtype}; token ids must be integers, torch.long or torch.int32")
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


def _described(prompt: Any) -> str:
    return f"a tensor of shape {tuple(prompt.shape)}" if isinstance(prompt, torch.Tensor) else f"{prompt!r:.80}"


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
            "(max_position_embeddings and RoPE scaling of its configuration): beyond that its output is usually useless, "
            "or it fails. Shorten the prompt, lower max_new_tokens, or load the model with RoPE scaling",
            stacklevel=3,
        )


def check_mask(mask: Any, rows: int, tokens: int) -> None:
    """Raise if a padding mask is no tensor, or does not have the shape of the prompt. Masks with more dimensions are rejected
    later."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor {(rows, tokens)}, not {_described(mask)}")
    if mask.dim() <= 2 and tuple(mask.shape) != (rows, tokens):
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
        TypeError: `generation_config` is not a `GenerationConfig`.
    """
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config={config!r} is not allowed; it must be a GenerationConfig")
    allowed = {*own, *_settings(model, config)}
    if model_inputs:
        allowed |= {*inspect.signature(GenerationMixin.generate).parameters, *_UNLISTED_OPTIONS} - {"self", "kwargs"}
    for name, value in options.items():
        if name in allowed or (model_inputs and (value is None or _is_model_input(model, name))):
            continue
        raise ValueError(_advice(caller, name, allowed, model_inputs))


def _settings(model: Any, config: Any) -> set[str]:
    """Names of all generation settings, including those that the user has added."""
    configs = (each for each in (GenerationConfig(), model.generation_config, config) if each is not None)
    return {name for each in configs for name in vars(each) if not name.startswith("_")}


def _is_model_input(model: Any, name: str) -> bool:
    """Whether the model accepts an input of this name, according to transformers."""
    try:
        model._validate_model_kwargs({name: True})
    except ValueError:
        return False
    return True


def _advice(caller: str, name: str, allowed: Collection[str], model_inputs: bool) -> str:
    preset_options = PresetOptions.__annotations__
    if name in preset_options:
        return f"{name!r} is an option of the cache; pass it as {caller}(..., cache_options={{{name!r}: ...}})"
    close = difflib.get_close_matches(name, sorted({*allowed, *preset_options}), n=1, cutoff=0.7)
    hint = "".join(f"; did you mean {each!r}{_how_to_pass(each, allowed)}?" for each in close)
    others = ", nor an input of the model" if model_inputs else " (images and other inputs than tokens are not served)"
    return f"{name!r} is not known: neither an option of {caller}, nor of the generation configuration{others}{hint}"


def _how_to_pass(name: str, allowed: Collection[str]) -> str:
    return "" if name in allowed else f", as cache_options={{{name!r}: ...}}"
