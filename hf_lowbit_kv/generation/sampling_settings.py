"""Settings that say how tokens are drawn, checked before a prompt is read. transformers checks most of them afterwards,
when it makes its logits processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..storage.layer_spec import check_count

#: settings that are numbers; transformers compares them before it looks at their type
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens"),
)


def check_sampling(model: Any, prompt_ids: torch.Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise what transformers would raise for these settings after it has read the prompt.

    Args:
        model: unwrapped. prompt_ids: int64 `[rows, tokens]`; `None`: not known.
        options: as for `model.generate`.

    Raises:
        ValueError: a setting has another type, or a value that is not allowed.
    """
    check_numbers(options)
    known = vars(GenerationConfig())
    settings = {name: value for name, value in options.items() if name in known}
    config, _ = model._prepare_generation_config(options.get("generation_config"), **settings)
    config.validate()
    config.guidance_scale = None  # its processor refers to the model
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    processors_of(model, config, None if prompt_ids is None else prompt_ids[:1], options, "cpu")


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for settings that are no numbers, and for a bad `num_return_sequences`."""
    for name in NUMBERS:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{name}={value!r} is not allowed; it must be a number")
    check_count("num_return_sequences", options.get("num_return_sequences"), optional=True, unit="texts of a prompt")


def processors_of(
    model: Any, config: GenerationConfig, prompt_ids: torch.Tensor | None, options: Mapping[str, Any], device: Any
) -> LogitsProcessorList:
    """The logits processors that `model.generate` makes.

    Args:
        config: prepared as `generate` does. prompt_ids: int64 `[1, tokens]`. device: of the processors' tensors.
        options: as for `model.generate`; only the caller's own processors and `prefix_allowed_tokens_fn` are taken.

    Raises:
        ValueError: a setting has a value that is not allowed.
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
