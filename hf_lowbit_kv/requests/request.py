"""Requests, and their options. They are checked against the model's `generate` before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ..cache.length_rope import length_rope
from ..cache.low_bit_cache import LowBitCache
from ..cache.served_models import check_in_memory
from ..generation.answer_parser import read_answer, unshown_tokens
from ..generation.call_options import check_names
from ..generation.chat_prompt import ChatPrompt, check_messages
from ..generation.generation_settings import PREALLOCATED, GenerationSettings
from .pool_models import check_tokens, placeholders
from .result import FinishReason, Result

#: keys of a request that say what the model reads; each request has one of them
PROMPTS = ("prompt", "messages", "input_ids")
#: options that are not settings of transformers' generation configuration
OWN_OPTIONS = (
    "seed",
    "logprobs",
    "chat_template_kwargs",
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "max_new_tokens",
    "max_length",
    "generation_config",
)
_ROWS = "rows of a pool are the cache; use lb.generate"
_TWICE = "it runs the model twice a step; use model.generate"
#: what a `Result` or a pool of rows does not have -> what to do instead
NOT_SERVED = {
    **PREALLOCATED,
    **dict.fromkeys(("cache", "past_key_values", "max_cache_len"), _ROWS),
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids"), _TWICE),
    "output_scores": "logprobs=True gives those of the tokens",
    "output_logits": "logprobs=True gives those of the tokens",
    "output_attentions": "no attention weights are computed",
    "output_hidden_states": "use lb.generate",
    "return_dict_in_generate": "results have all there is",
    "token_healing": "prompts are read as they are; use lb.generate",
    "cache_implementation": "rows have packed pages; preset= chooses them",
    "compile_config": "steps are recorded; use lb.generate(step='compiled')",
}
#: names that get an answer of their own
KNOWN = (*OWN_OPTIONS, *NOT_SERVED)


@dataclass(eq=False)
class Request:
    """A request that has been checked."""

    index: int
    id: str
    prompt_ids: list[int]
    config: GenerationConfig
    """with lengths and special tokens as `generate` prepares them"""
    new_tokens: int
    """tokens to write, at most"""
    options: dict[str, Any]
    """those of `OWN_OPTIONS` that were given"""
    end_tokens: frozenset[int]
    cache: LowBitCache | None = None
    """holds the beginning of the prompt"""
    prompt: ChatPrompt | None = None
    """of a request with messages"""

    def answer(self, model: Any, tokenizer: Any, tokens: list[int]) -> tuple[str, dict[str, Any] | None]:
        """The text of these tokens, and the message if the request has messages."""
        ends = list(self.end_tokens)
        if self.prompt is not None:
            prompt = self.prompt
            return read_answer(tokenizer, tokens, ends, prompt.parser(model), prompt.content_of, prompt.begun)
        unshown = unshown_tokens(tokenizer, ends, None)
        return tokenizer.decode([token for token in tokens if token not in unshown]), None

    def result(self, reason: FinishReason | None = None, sequence: int = 0) -> Result:
        """A result without tokens."""
        return Result(self.id, self.index, list(self.prompt_ids), finish_reason=reason, sequence=sequence)

    @property
    def sequences(self) -> int:
        return self.config.num_return_sequences or 1

    @property
    def limit(self) -> int:
        """Largest number of tokens that a row may have to hold."""
        return len(self.prompt_ids) + self.new_tokens

    def end_streamer(self) -> None:
        """Tell the streamer that no more tokens come. Only the first call does so."""
        if (streamer := self.options.pop("streamer", None)) is not None:
            streamer.end()


class RequestReader:
    """Reads requests for one model.

    Args:
        model: unwrapped.
        tokenizer: for texts, messages and stop strings; may be `None`.
        options: options of the call, which a request's own options override.

    Raises:
        ValueError: no request may have this option, or the model's first weights are not in memory.
    """

    def __init__(self, model: Any, tokenizer: Any, options: Mapping[str, Any]):
        self.model, self.tokenizer, self.options, self._rope = model, tokenizer, dict(options), length_rope(model)
        self._placeholders = placeholders(model.config)
        check_in_memory(model, "a pool of rows", "use lb.generate")
        if "max_length" not in options:
            options = {"max_new_tokens": 1, **options}
        self._settings(1, options)

    def read(self, user_request: Any, index: int) -> Request:
        """A request from what the caller gave.

        Raises:
            TypeError, ValueError: it is not a request, or it cannot be served. The message begins with the request's
                index.
        """
        try:
            request = dict(user_request) if isinstance(user_request, Mapping) else {_kind(user_request): user_request}
            named = request.pop("id", None)
            mask, cache = request.pop("attention_mask", None), request.pop("past_key_values", None)
            prompts = {name: request.pop(name) for name in PROMPTS if name in request}
            if len(prompts) != 1:
                raise ValueError(
                    f"it must have one of {', '.join(map(repr, PROMPTS))}, and has {list(prompts) or 'none'}"
                )
            options = {**self.options, **request}
            kind, prompt = next(iter(prompts.items()))
            chat = self._chat(prompt, options) if kind == "messages" else None
            ids = self._ids(kind, prompt if chat is None else chat.ids, mask)
            settings = self._settings(len(ids), options)
            config, new_tokens = settings.config, settings.new_tokens
            if self._rope is not None:
                self._rope.refuse_row(len(ids) + new_tokens)
            own_options = {name: options[name] for name in OWN_OPTIONS if options.get(name) is not None}
            ends = config._eos_token_tensor
            end_tokens = frozenset() if ends is None else frozenset(ends.tolist())
            name = str(index) if named is None else str(named)
            return Request(index, name, ids, config, new_tokens, own_options, end_tokens, cache, chat)
        except TypeError as error:
            raise TypeError(f"request {index}: {error}") from error
        except Exception as error:  # a chat template raises errors of its own kind
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"request {index}: {kind}{error}") from error

    # ---- prompts --------------------------------------------------------------------------------------------------

    def _ids(self, kind: str, prompt: Any, mask: Any) -> list[int]:
        if kind != "prompt":
            ids = _flat(kind, prompt)
            if mask is not None and kind == "input_ids":
                ids = [token for token, real in zip(ids, _flat("attention_mask", mask), strict=True) if real]
        else:
            ids = self._from_text(prompt)
        if not ids:
            raise ValueError(f"{kind}={prompt!r} has no token: there is nothing to read")
        check_tokens(self.model, ids)
        if (token := next((token for token in ids if token in self._placeholders), None)) is not None:
            raise ValueError(
                f"token {token} is the place of {self._placeholders[token]} input, and requests are text; use lb.generate"
            )
        return ids

    def _check_tokenizer(self, kind: str) -> None:
        if self.tokenizer is None:
            raise ValueError(f"tokenizer=None: {kind!r} needs one; or give input_ids")

    def _from_text(self, prompt: Any) -> list[int]:
        self._check_tokenizer("prompt")
        return _flat("input_ids", self.tokenizer(prompt)["input_ids"])

    def _chat(self, messages: Any, options: Mapping[str, Any]) -> ChatPrompt:
        self._check_tokenizer("messages")
        check_messages("messages", messages)
        prompt = ChatPrompt(self.tokenizer, messages, options.get("chat_template_kwargs") or {})
        prompt.parser(self.model)  # raises for a response template that is not valid
        return prompt

    # ---- options --------------------------------------------------------------------------------------------------

    def _settings(self, tokens: int, options: Mapping[str, Any]) -> GenerationSettings:
        """The settings of a request with a prompt of this many tokens."""
        model: Any = self.model
        check_names("lb.generate_many", model, options, KNOWN, model_inputs=False)
        settings = GenerationSettings.of(model, options, NOT_SERVED, tokens, model.device)
        if settings.sequences > 1 and options.get("streamer") is not None:
            raise ValueError(f"num_return_sequences={settings.sequences} and a streamer: a streamer shows one sequence")
        if settings.config.stop_strings is not None and self.tokenizer is None:
            raise ValueError("tokenizer=None: stop_strings need one")
        keys = [key if isinstance(key, tuple) else key[0] for key in settings.config.sequence_bias or ()]
        check_tokens(model, [token for key in keys for token in key], "sequence_bias: ")
        return settings


def _kind(prompt: Any) -> str:
    """Which of `PROMPTS` something is that is no dict."""
    if isinstance(prompt, str):
        return "prompt"
    if isinstance(prompt, torch.Tensor) or (hasattr(prompt, "dtype") and hasattr(prompt, "tolist")):
        return "input_ids"
    if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, (bytes, bytearray)):
        return "messages" if isinstance(prompt[0], Mapping) else "input_ids"
    raise TypeError(
        f"{prompt!r} is not allowed: a request is a text, token ids, a list of messages, or a dict with one of "
        f"{', '.join(map(repr, PROMPTS))}"
    )


def _flat(name: str, numbers: Any) -> list[int]:
    """A list of integers from a list, a tensor or an array, `[n]` or `[1, n]`."""
    ids = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not all(isinstance(number, int) for number in ids):
        raise ValueError(f"{name} must be integers [n], of one request; a batch is several requests")
    return list(ids)
