"""transformers' request handlers. Fields that cannot be honoured are refused by name instead of being ignored."""

from __future__ import annotations

import math
import re
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from .generation_manager import MAY_SHORTEN, SEED

#: fields that are honoured
HONOURED = {
    *("model", "messages", "prompt", "suffix", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("stop", "seed", "logit_bias", "tools", "chat_template_kwargs", "generation_config"),
}
#: fields of OpenAI's API that change no answer. The usage is always reported, at the end of a stream too
WITHOUT_EFFECT = {
    *("user", "safety_identifier", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
#: values at which a field has no effect
USUAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),  # transformers would use it as another kind of penalty
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
}
#: fields of one type: their type, and its name
KINDS = (
    ("stream", bool, "true or false"),
    ("suffix", str, "a text"),
    ("generation_config", str, "a text in JSON"),
    ("chat_template_kwargs", dict, "an object"),
    ("tools", list, "a list of objects"),
)
#: fields of this server that OpenAI's API does not have
OWN = {"top_k", "repetition_penalty"}


class _Strict:
    """A mixin for transformers' handlers."""

    _valid_params_class: Any
    #: the field that says what the model reads, and what it must be
    _reads: tuple[str, str]

    def _validate_request(self, body: dict) -> None:
        name, allowed = self._reads
        if body.get(name) in (None, "", []):  # an empty text has no token
            raise HTTPException(400, f"{name}={body.get(name)!r} is not allowed; it must be {allowed}")
        known = set(getattr(self._valid_params_class, "__mutable_keys__", set())) | OWN
        for name, value in list(body.items()):
            if value is None or (name in WITHOUT_EFFECT and name in known):
                del body[name]  # treated as not given
            elif any(type(value) is type(usual) and value == usual for usual in USUAL.get(name, ())):  # True is not 1
                del body[name]
            elif name not in known:
                raise HTTPException(400, f"{name} is not a field of this request")
            elif name not in HONOURED | OWN:
                raise HTTPException(400, f"{name}={value!r} cannot be honoured by this server; leave it out")
        _check_messages(body.get("messages"))
        for name, kind, text in KINDS:
            if name in body and not isinstance(body[name], kind):
                raise HTTPException(400, f"{name}={body[name]!r} is not allowed; it must be {text}")
        if not all(isinstance(tool, dict) for tool in body.get("tools", [])):
            raise HTTPException(400, f"tools={body['tools']!r} is not allowed; it must be a list of objects")
        _check_bias(body.get("logit_bias", {}))
        _check_number(body, "temperature", 0, None)
        _check_number(body, "top_p", 0, 1)
        _check_number(body, "repetition_penalty", 0, None)
        for name in ("max_tokens", "max_completion_tokens", "top_k"):
            _check_number(body, name, 1, None, whole=True)
        _check_number(body, "seed", 0, 2**63 - 1, whole=True)
        stop = body.get("stop", [])
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            raise HTTPException(400, f"stop={stop!r} is not allowed; it must be a text, or a list of texts")
        super()._validate_request({name: x for name, x in body.items() if name not in OWN})  # type: ignore[misc]

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        # transformers would seed the whole process
        settings = {name: value for name, value in body.items() if name not in ("seed", "logit_bias")}
        if settings.get("stop") == []:
            del settings["stop"]
        try:
            config = super()._build_generation_config(settings, model_generation_config, use_cb=use_cb)  # type: ignore[misc]
        except (AttributeError, TypeError, ValueError) as error:  # of generation_config or logit_bias
            raise HTTPException(400, f"{type(error).__name__}: {error}") from error
        config.use_cache = True
        for name in OWN & body.keys():
            setattr(config, name, body[name])
        if bias := body.get("logit_bias"):  # transformers wants floats, and ignores it in texts
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()}
        if body.get("temperature") == 0:
            config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
        elif {"temperature", "top_p", "top_k"} & body.keys():
            config.do_sample = True  # transformers leaves a greedy model greedy at any temperature
        if body.get("top_p") == 0:
            config.top_p, config.top_k = None, 1
        setattr(config, SEED, body.get("seed"))
        limits = {"max_tokens", "max_completion_tokens", "generation_config"}
        setattr(config, MAY_SHORTEN, not limits & body.keys())
        return config


def _check_messages(messages: Any) -> None:
    """Raise for content that is not text, which transformers would drop silently."""
    if messages is None:
        return
    if not isinstance(messages, list):
        raise HTTPException(400, f"messages={messages!r} is not allowed; it must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise HTTPException(400, f"messages: {message!r} is not allowed; it must be an object with a role")
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else part
                raise HTTPException(400, f"messages: content of type {kind!r} is not served; only text is")
            if not isinstance(part.get("text"), str):
                raise HTTPException(400, f"messages: {part!r} is not allowed; its text must be a text")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise HTTPException(400, f"messages: tool_calls={calls!r} is not allowed; it must be a list of objects")
        if not isinstance(content, (str, list, type(None))):
            raise HTTPException(400, f"messages: content={content!r} is not allowed; it must be a text")


def _check_bias(bias: Any) -> None:
    """Raise unless `bias` is an object of tokens and numbers."""
    if not isinstance(bias, dict):
        raise HTTPException(400, f"logit_bias={bias!r} is not allowed; it must be an object")
    for token, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,18}", token):
            raise HTTPException(400, f"logit_bias: {token!r} is not allowed; it must be the number of a token")
        _check_number({f"logit_bias of {token}": value}, f"logit_bias of {token}", -100, 100)


def _check_number(body: dict, name: str, least: float, most: float | None, whole: bool = False) -> None:
    if name not in body:
        return
    value = body[name]
    kinds = (int,) if whole else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or not least <= value < math.inf or (most is not None and value > most):  # NaN too
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise HTTPException(400, f"{name}={value!r} is not allowed; it must be a number {allowed}")


class ChatHandler(_Strict, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    _reads = "messages", "a list of messages, at least one"

    def _resolve_model(self, body: dict) -> Any:
        """transformers calls this before it applies the chat template. A template raises for what it does not know, such as a
        system message, and transformers would answer that the server is broken."""
        resolved = super()._resolve_model(body)
        _, model, processor = resolved
        modality = self.model_manager.get_model_modality(model, processor=processor)
        more = {**getattr(self, "chat_template_kwargs", {}), **body.get("chat_template_kwargs", {})}
        try:
            messages = self.get_processor_inputs_from_messages(body["messages"], modality)
            processor.apply_chat_template(
                messages, add_generation_prompt=True, tools=body.get("tools"), tokenize=False, **more
            )
        except Exception as error:
            raise HTTPException(400, f"messages: the chat template says {type(error).__name__}: {error}") from error
        return resolved


class TextHandler(_Strict, CompletionHandler):
    """`/v1/completions`."""

    _reads = "prompt", "a text that is not empty"


class NotServed:
    """transformers' endpoints that run the model without packed pages."""

    async def handle_request(self, *args: Any) -> Any:
        raise HTTPException(404, "this server has /v1/chat/completions, /v1/completions, /v1/models and /health")
