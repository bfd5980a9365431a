"""Checks of sampling settings before the prompt is read. transformers checks most of them afterwards, when it makes its
logits processors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..storage.layer_spec import check_count


@dataclass(frozen=True)
class Allowed:
    """The range of numbers allowed for a setting."""

    low: float = 0
    high: float = math.inf
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        return number and self.low <= value <= min(
            self.high, sys.float_info.max
        )  # neither NaN nor beyond the range of floats

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        return f"{kind} of {self.low} or more" if math.isinf(self.high) else f"{kind} from {self.low} to {self.high}"


_SHARE, _COUNT = Allowed(high=1), Allowed(whole=True)
#: settings that are numbers. transformers compares some of them before it checks their type, and ignores others if they
#: are out of range
NUMBERS = {
    "temperature": Allowed(),
    "top_k": _COUNT,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "epsilon_cutoff": _SHARE,
    "eta_cutoff": _SHARE,
    "repetition_penalty": Allowed(),
    "encoder_repetition_penalty": Allowed(),
    "no_repeat_ngram_size": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "max_time": Allowed(),
}


def check_sampling(model: Any, prompt_ids: torch.Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise the errors that transformers would raise for these settings after it has read the prompt.

    Args:
        model: unwrapped.
        prompt_ids: int64 `[rows, tokens]`; `None`: unknown.
        options: as for `model.generate`.

    Raises:
        ValueError, TypeError: a setting has another type, or a value that is not allowed.
    """
    check_settings(options)
    setting_names = vars(GenerationConfig())
    settings = {name: value for name, value in options.items() if name in setting_names}
    config, _ = model._prepare_generation_config(options.get("generation_config"), **settings)
    config.validate()
    config.guidance_scale = None  # its processor refers to the model
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    processors_of(model, config, None if prompt_ids is None else prompt_ids[:1], options, "cpu")


def check_text(name: str, text: str) -> None:
    """Raise `ValueError` for a text that no tokenizer reads. name: of the argument, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a surrogate pair, {text[error.start]!a}, as character {error.start}, which no tokenizer "
            "reads; leave it out, or read the text again from where it comes from"
        ) from None


def check_settings(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a setting of the call, or of its `generation_config`, is not a number or is out of range, or
    if `num_return_sequences`, `do_sample`, `stop_strings`, `eos_token_id` or `pad_token_id` is invalid. `TypeError`: see
    `_check_objects`."""

    def setting(name: str) -> Any:
        value = options.get(name)
        return getattr(options.get("generation_config"), name, None) if value is None else value

    for name, allowed in NUMBERS.items():
        value = setting(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} is not allowed; it must be {allowed}")
    check_count("num_return_sequences", options.get("num_return_sequences"), optional=True, unit="texts of a prompt")
    if (value := setting("do_sample")) is not None and not isinstance(value, bool):
        raise ValueError(f"do_sample={value!r} is not allowed; it must be True or False")
    stops = setting("stop_strings")
    texts = [stops] if isinstance(stops, str) else stops
    listed = isinstance(texts, (list, tuple)) and texts and all(isinstance(each, str) and each for each in texts)
    if stops is not None and not listed:
        raise ValueError(f"stop_strings={stops!r} is not allowed; it must be a non-empty text, or a list of such texts")
    for text in texts or ():
        check_text("stop_strings", text)
    for name in ("eos_token_id", "pad_token_id"):
        tokens = setting(name)
        numbers = tokens.reshape(-1).tolist() if isinstance(tokens, torch.Tensor) else tokens
        for number in numbers if isinstance(numbers, (list, tuple)) else [] if numbers is None else [numbers]:
            if not isinstance(number, int) or isinstance(number, bool):
                raise ValueError(f"{name}={tokens!r} is not allowed; it must be the id of a token, or a list of ids")
    _check_objects(options)


def _check_objects(options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for objects that the first step could not call."""
    streamer: Any = options.get("streamer")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer={streamer!r} is not allowed; it must have the methods put and end")
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise TypeError(f"prefix_allowed_tokens_fn={allowed!r} is not allowed; it must be a function")
    for name in ("logits_processor", "stopping_criteria"):
        objects = options.get(name)
        listed = objects is None or isinstance(objects, Sequence)
        if not listed or not all(callable(each) for each in objects or ()):
            raise TypeError(
                f"{name}={objects!r} is not allowed; it must be a list of transformers' objects of that kind"
            )


def processors_of(
    model: Any, config: GenerationConfig, prompt_ids: torch.Tensor | None, options: Mapping[str, Any], device: Any
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
        input_ids_seq_length=0 if prompt_ids is None else prompt_ids.shape[1],
        encoder_input_ids=prompt_ids,
        prefix_allowed_tokens_fn=options.get("prefix_allowed_tokens_fn"),
        logits_processor=LogitsProcessorList(own),
        device=device,
        model_kwargs={},
    )
    return processors
