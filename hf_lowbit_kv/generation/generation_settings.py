"""Generation settings, checked once for every function that generates, before anything is allocated or changes.

transformers prepares and checks settings inside `generate`, some of them after the prompt was read, and it ignores numbers
that are out of range. Here its own methods run first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from .allowed_values import SWITCH, Allowed, number, one_or_list_of, text

#: decoding modes with one token per step, which preallocated caches support
ONE_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
#: setting -> its values
ALLOWED: dict[str, Allowed] = {
    **dict.fromkeys(("do_sample", "logprobs"), SWITCH),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), number(high=1)),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty", "max_time"), number()),
    **dict.fromkeys(("top_k", "no_repeat_ngram_size", "min_length", "min_new_tokens"), number(whole=True)),
    **dict.fromkeys(("max_length", "max_new_tokens", "num_return_sequences"), number(1, whole=True)),
    "seed": number(high=2**63 - 1, whole=True),
    "stop_strings": one_or_list_of(text()),
    # tokens per chunk; 0: the whole prompt; "auto": as many as fit into the free memory of the GPU
    "prefill_chunk_size": number(whole=True).or_("auto"),
}
_SEVERAL_TOKENS = "its steps have several tokens; use model.generate with a growing cache"
#: what a preallocated cache does not serve -> what to do instead. `None` and `False` are always served
PREALLOCATED = {
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"), _SEVERAL_TOKENS),
    **dict.fromkeys(("use_mtp", "custom_generate"), _SEVERAL_TOKENS),
    "num_beams": "a preallocated cache does not serve beam search; use model.generate with a growing cache",
    "cache_implementation": "the cache is a low-bit one; use model.generate for others",
}
#: values at which these have no effect
_NO_EFFECT = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1}


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of a call that can be served."""

    config: GenerationConfig
    """with special tokens and lengths as `generate` prepares them"""
    new_tokens: int
    """largest number of tokens to write; 0: the prompt is not known yet"""

    @property
    def sequences(self) -> int:
        return self.config.num_return_sequences or 1

    @classmethod
    def of(
        cls,
        model: Any,
        options: Mapping[str, Any],
        not_served: Mapping[str, str] = PREALLOCATED,
        tokens: int | None = None,
        device: Any = "cpu",
    ) -> GenerationSettings:
        """Check the settings among these options.

        Args:
            model: unwrapped.
            options: as for `model.generate`.
            not_served: names that the caller does not serve -> what to do instead.
            tokens: of the prompt; `None`: not known yet.
            device: of the special tokens.

        Raises:
            ValueError: a value is not allowed, or cannot be served. Others: transformers refuses a value.
        """
        check_values(options)
        given = options.get("generation_config")
        known = setting_names(model, given) - {"max_new_tokens", "max_length"}
        config, _ = model._prepare_generation_config(given, **{name: options[name] for name in known & set(options)})
        ignore_checkpoint(model, options, config)
        check_served(not_served, options, config)
        if config.use_cache is False:
            raise ValueError("use_cache=False is not allowed: there would be nothing to pack")
        if (mode := config.get_generation_mode()) not in ONE_TOKEN:
            raise ValueError(
                f"these options ask for {mode.value}, and the cache serves greedy search and sampling; use model.generate with "
                "a growing cache"
            )
        new_tokens = 0
        if tokens is not None:
            config.max_new_tokens = new_tokens = new_tokens_of(model, options, tokens)
            config.max_length = tokens + new_tokens
            if config.min_new_tokens is not None:
                config.min_length = tokens + config.min_new_tokens
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        processors_of(model, config, torch.zeros(1, 1, dtype=torch.long), options, device)  # raises for values
        return cls(config, new_tokens)


def setting_names(model: Any, config: GenerationConfig | None) -> set[str]:
    """Names of all generation settings, including those that the user has added."""
    configs = (each for each in (GenerationConfig(), model.generation_config, config) if each is not None)
    return {name for each in configs for name in vars(each) if not name.startswith("_")}


def check_values(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a setting of the call, or of its `generation_config`, does not have one of its `ALLOWED` values."""
    config = options.get("generation_config")
    for name, allowed in ALLOWED.items():
        value = getattr(config, name, None) if options.get(name) is None else options[name]
        if value is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} is not allowed; it must be {allowed}")


def check_served(not_served: Mapping[str, str], options: Mapping[str, Any], config: GenerationConfig) -> None:
    """Raise `ValueError` for a value that is not served. not_served: as for `GenerationSettings.of`."""
    for name, instead in not_served.items():
        value = getattr(config, name, None) if options.get(name) is None else options[name]
        if value is None or value is False or (name in _NO_EFFECT and value == _NO_EFFECT[name]):
            continue
        raise ValueError(f"{name}={value!r:.80} is not allowed: {instead}")


def setting(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """A generation setting: from the call, else from its generation configuration, else from the model's."""
    configs = options.get("generation_config"), model.generation_config
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def ignore_checkpoint(model: Any, options: Mapping[str, Any], config: GenerationConfig) -> None:
    """Reset cache settings in `config`, that of a call with these options, that come from the model's own generation
    configuration: checkpoints contain settings of their training."""
    for name, ours in (("cache_implementation", None), ("use_cache", True)):
        own = getattr(model.generation_config, name)
        if options.get(name) is None and getattr(options.get("generation_config"), name, None) in (None, own):
            setattr(config, name, ours)


def new_tokens_of(model: Any, options: Mapping[str, Any], tokens: int) -> int:
    """Largest number of tokens to write after a prompt of `tokens` tokens, from `max_new_tokens` or `max_length`."""
    new, length = options.get("max_new_tokens"), options.get("max_length")
    if new is None and length is None:
        config: Any = options.get("generation_config")
        new, length = (getattr(config, name, None) for name in ("max_new_tokens", "max_length"))
        if new is None and length is None:
            new = model.generation_config.max_new_tokens
    if new is not None:
        return int(new)
    if length is None:
        raise ValueError(
            "max_new_tokens=None: the cache is allocated before the first step, so give the most tokens to write"
        )
    if length <= tokens:
        raise ValueError(f"max_length={length} leaves no room for new tokens: the prompt has {tokens} tokens")
    return int(length - tokens)


def processors_of(
    model: Any, config: GenerationConfig, prompt_ids: torch.Tensor, options: Mapping[str, Any], device: Any
) -> LogitsProcessorList:
    """The logits processors that `model.generate` makes.

    Args:
        config: prepared as `generate` does.
        prompt_ids: int64 `[1, tokens]`.
        device: of the processors' tensors.
        options: as for `model.generate`; only `logits_processor` and `prefix_allowed_tokens_fn` are used.

    Raises:
        ValueError: a setting is not allowed.
    """
    own: Sequence[Any] = options.get("logits_processor") or []
    processors: LogitsProcessorList = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_ids.shape[1],
        encoder_input_ids=prompt_ids,
        prefix_allowed_tokens_fn=options.get("prefix_allowed_tokens_fn"),
        logits_processor=LogitsProcessorList(own),
        device=device,
        model_kwargs={},
    )
    return processors
