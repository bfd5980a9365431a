"""The result of a request of `generate_many`, and the exception that it raises when it is interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..generation.decoding_loop import FinishReason


@dataclass
class Result:
    """One finished sequence of a request. Names are those of transformers' `GenerationOutput`.

    Attributes:
        id: the request's id; by default its index as text.
        index: the request's position among all requests, from 0.
        prompt_ids: the tokens that the model read.
        generated_tokens: the tokens that it wrote, including an end-of-text token.
        text: what a person reads of the answer; `None` without a tokenizer or before the first token. For messages, if the
            model has a response template: the content without reasoning and tool calls. Otherwise the generated tokens,
            without special tokens that begin and end texts.
        logprobs: for every generated token, the logarithm of the probability with which it was drawn, after all logits
            processors; empty without `logprobs=True`.
        finish_reason: `"stop"`: an end-of-text token, a stop string or a stopping criterion; `"length"`: the limit of
            tokens or seconds; `"error"`: see `error`; `"cancelled"`.
        error: the error, with the name of the exception; otherwise `None`.
        cached_tokens: tokens of the prompt that were taken from a kept prefix instead of being read.
        timestamps: `time.perf_counter()` when each generated token arrived on the CPU.
        sequence: index among the request's `num_return_sequences`, from 0.
        message: for messages: the answer as a message, as in `Chat.messages`, to append to them; otherwise `None`.

    Example:
        >>> results = lb.generate_many(model, ["one", "two"], tokenizer=tokenizer, max_new_tokens=4)
        >>> [result.index for result in results]
        [0, 1]
        >>> results[0].error is None and len(results[0].generated_tokens) <= 4
        True
    """

    id: str
    index: int
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    timestamps: list[float] = field(default_factory=list)
    sequence: int = 0
    message: dict[str, Any] | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came while `generate_many` ran. The memory of its rows is free.

    Attributes:
        results: all results in order. Requests that had not ended have the tokens so far, and
            `finish_reason="cancelled"`. Results that a generator (`as_completed=True`) had already yielded are not
            included.

    Example:
        >>> try:
        ...     results = lb.generate_many(model, ["one", "two"], tokenizer=tokenizer, max_new_tokens=4)
        ... except lb.Interrupted as stop:  # Ctrl-C
        ...     results = stop.results
    """

    def __init__(self, results: list[Result]):
        ended = sum(result.finish_reason != "cancelled" for result in results)
        super().__init__(
            f"{ended} of {len(results)} sequences had ended; .results has them, and the others' beginnings"
        )
        self.results = results


def described(error: BaseException) -> str:
    """An exception as `Result.error` shows it."""
    return f"{type(error).__name__}: {error}"
