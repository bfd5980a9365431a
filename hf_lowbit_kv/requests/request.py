"""Requests, and their options. They are checked against the model's `generate` before anything is allocated."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from ..cache.length_rope import length_rope
from ..cache.low_bit_cache import LowBitCache
from ..cache.served_models import check_in_memory
from ..generation.answer_parser import read_answer, unshown_tokens
from ..generation.call_options import check_names, check_options, new_tokens_of, of_checkpoint, return_sequences
from ..generation.chat_prompt import ChatPrompt, check_messages
from ..generation.sampling_settings import check_settings, check_text, processors_of
from .pool_models import check_tokens, placeholders

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
#: settings for outputs that a `Result` does not have, or for features that a pool of rows does not have
REFUSED = {
    "output_scores": "logprobs=True gives those of the tokens",
    "output_logits": "logprobs=True gives those of the tokens",
    "output_attentions": "no attention weights are computed",
    "output_hidden_states": "use lb.generate",
    "return_dict_in_generate": "results have all there is",
    "token_healing": "prompts are read as they are; use lb.generate",
    "guidance_scale": "it runs the model twice a step; use model.generate",
    "cache_implementation": "rows have packed pages; preset= chooses them",
    "compile_config": "steps are recorded; use lb.generate(step='compiled')",
}
#: arguments of `generate` that select another cache
CACHES = ("cache", "past_key_values", "max_cache_len", "use_cache")
#: names that get an answer of their own
KNOWN = (*OWN_OPTIONS, *REFUSED, *CACHES, "assistant_model", "custom_generate", "negative_prompt_ids")


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
        unshown = unshown_tokens(tokenizer, list(self.end_tokens))
        if self.prompt is None:
            return tokenizer.decode([token for token in tokens if token not in unshown]), None
        return read_answer(tokenizer, tokens, unshown, self.prompt.parser(model), self.prompt.content_of)

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
        if "max_new_tokens" not in options and "max_length" not in options:
            options = {"max_new_tokens": 1, **options}
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(f"tokenizer={tokenizer!r} is not allowed; it must be a tokenizer of transformers, or None")
        try:
            self._config([0], dict(options))
        except (TypeError, ValueError):
            raise
        except Exception as error:  # of transformers, about a value that it did not expect
            raise ValueError(f"the options cannot be used: {type(error).__name__}: {error}") from error

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
            if not isinstance(cache, (LowBitCache, type(None))):
                raise TypeError(
                    f"past_key_values is not allowed to be {cache!r}; it must be a LowBitCache that holds the beginning of the "
                    "prompt, or None"
                )
            prompts = {name: request.pop(name) for name in PROMPTS if name in request}
            if len(prompts) != 1:
                raise ValueError(
                    f"it must have one of {', '.join(map(repr, PROMPTS))}, and has {list(prompts) or 'none'}"
                )
            if unnamed := [name for name in request if not isinstance(name, str)]:
                raise TypeError(f"{unnamed[0]!r} is not the name of an option")
            options = {**self.options, **request}
            kind, prompt = next(iter(prompts.items()))
            chat = self._chat(prompt, options) if kind == "messages" else None
            ids = self._ids(kind, prompt if chat is None else chat.ids, mask, options)
            config, new_tokens = self._config(ids, options)
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

    def _ids(self, kind: str, prompt: Any, mask: Any, options: Mapping[str, Any]) -> list[int]:
        if kind != "messages" and options.get("chat_template_kwargs") and "chat_template_kwargs" not in self.options:
            raise ValueError("chat_template_kwargs belong to messages")
        if kind != "prompt":
            ids = _flat(kind, prompt)
            if mask is not None and kind == "input_ids":
                kept = _flat("attention_mask", mask)
                if len(kept) != len(ids):
                    raise ValueError(f"attention_mask has {len(kept)} numbers, and input_ids {len(ids)}")
                ids = [token for token, real in zip(ids, kept, strict=True) if real]
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
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be a text, not {type(prompt).__name__}")
        check_text("prompt", prompt)
        return _flat("input_ids", self.tokenizer(prompt)["input_ids"])

    def _chat(self, messages: Any, options: Mapping[str, Any]) -> ChatPrompt:
        self._check_tokenizer("messages")
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages={messages!r} is not allowed; it must be a list of messages, at least one")
        check_messages("messages", messages)
        prompt = ChatPrompt(self.tokenizer, messages, options.get("chat_template_kwargs") or {})
        prompt.parser(self.model)  # raises for a response template that is not valid
        return prompt

    # ---- options --------------------------------------------------------------------------------------------------

    def _config(self, ids: Sequence[int], options: Mapping[str, Any]) -> tuple[GenerationConfig, int]:
        """The generation configuration of a request as `generate` would prepare it, and the number of tokens to write."""
        model: Any = self.model
        request = dict(options)
        check_names("lb.generate_many", model, request, KNOWN, model_inputs=False)
        check_options(model, request)
        if name := next((name for name in CACHES if request.get(name) is not None), None):
            raise ValueError(f"{name} is not allowed: rows of a pool are the cache; use lb.generate")
        if request.get("negative_prompt_ids") is not None:
            raise ValueError("negative_prompt_ids is not allowed: it runs the model twice a step; use model.generate")
        _check_own_options(request)
        check_settings(request)
        return_sequences(model, request)
        new_tokens = new_tokens_of(model, request.get("max_new_tokens"), request, len(ids))
        request.pop("max_length", None)  # `new_tokens` has it
        base = copy.deepcopy(request.get("generation_config"))
        if base is not None:
            base.max_length = None
        settings = {name: value for name, value in request.items() if name not in OWN_OPTIONS}
        config, _ = model._prepare_generation_config(base, **settings)
        if of_checkpoint(model, request, "cache_implementation"):
            config.cache_implementation = None
        for name, instead in REFUSED.items():
            value = getattr(config, name, None)
            if value is not None and value is not False and (name, value) != ("guidance_scale", 1):
                raise ValueError(f"{name}={value!r} is not allowed: {instead}")
        if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"these options ask for {config.get_generation_mode().value}, and rows of a pool are decoded greedily or "
                "sampled; use model.generate with a growing cache"
            )
        config.validate()  # as in `generate`; also for several sequences that would be the same text
        sequences = config.num_return_sequences or 1
        if sequences > 1 and request.get("streamer") is not None:
            raise ValueError(f"num_return_sequences={sequences} and a streamer: a streamer shows one sequence")
        if config.stop_strings is not None and self.tokenizer is None:
            raise ValueError("tokenizer=None: stop_strings need one")
        config.max_new_tokens = new_tokens
        model._prepare_special_tokens(config, True, device=model.device, batch_size=1)
        tokens = torch.tensor([ids])
        model._prepare_generated_length(config, True, True, "input_ids", len(ids), tokens)
        processors_of(model, config, tokens, request, model.device)  # raises for values that are not allowed
        keys = [key if isinstance(key, tuple) else key[0] for key in config.sequence_bias or ()]
        check_tokens(self.model, [token for key in keys for token in key], "sequence_bias: ")
        return config, new_tokens


def _check_own_options(request: Mapping[str, Any]) -> None:
    seed = request.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise ValueError(f"seed={seed!r} is not allowed; it must be an integer from 0 to 2**63 - 1")
    if not isinstance(request.get("logprobs", False), (bool, type(None))):
        raise ValueError(f"logprobs={request['logprobs']!r} is not allowed; it must be True or False")
    if not isinstance(request.get("chat_template_kwargs", {}), (Mapping, type(None))):
        raise TypeError(f"chat_template_kwargs={request['chat_template_kwargs']!r} is not allowed; it must be a dict")


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
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
        raise TypeError(f"{name}={numbers!r} is not allowed; it must be integers [n]")
    if len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise ValueError(f"{name} must be integers [n], of one request; a batch is several requests")
    return list(ids)
