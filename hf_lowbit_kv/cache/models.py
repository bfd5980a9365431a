"""What users wrap models in, and the model inside."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside `torch.compile` and PEFT wrappers, with its adapters in place.

    Raises:
        TypeError: there is no transformers model inside.
        ValueError: a PEFT adapter that puts keys and values of its own in front of the prompt (prompt learning).
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, torch.nn.Module) and hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            if learned := [name for name, config in inner.peft_config.items() if config.is_prompt_learning]:
                raise ValueError(
                    f"adapter {learned[0]!r} is not supported: it puts tokens of its own in front of the prompt, which a "
                    "low-bit cache does not know; adapters that change weights (LoRA and others) are supported"
                )
            inner = inner.get_base_model()
        else:
            raise TypeError(
                f"model must be a transformers model (PEFT or torch.compile may wrap it), not {type(model)}"
            )
    return inner


def generates(model: Any) -> Any:
    """The object whose `generate` to call: the outermost PEFT model (it may switch adapters), else the model inside."""
    while isinstance(model, torch.nn.Module) and hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model
