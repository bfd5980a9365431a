"""Which fields a request may have, and their values. A field that cannot be honoured is refused by name.

Every value is bounded, so that no request takes much longer than the tokens that it reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig

from ...generation.allowed_values import SWITCH, Allowed, list_of, number, one_or_list_of, text
from ...generation.chat_prompt import check_messages as chat_messages
from .openai_errors import Refused, not_allowed, shown

#: fields that are honoured
HONOURED = {
    *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("stop", "seed", "logit_bias", "tools", "tool_choice", "chat_template_kwargs", "generation_config"),
}
#: fields of OpenAI's API that change no answer. The usage is always reported, at the end of a stream too
WITHOUT_EFFECT = {
    *("user", "safety_identifier", "metadata", "store", "service_tier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}
#: values at which a field has no effect
USUAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),  # transformers would append it to the answer
    "parallel_tool_calls": (True,),  # a model may always write several calls
    "logprobs": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),  # transformers would use it as another kind of penalty
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "tools": ([],),
    "stop": ([],),
    "top_logprobs": (0,),
    # what clients send for "not set"
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "seed": (-1,),
}
#: what the model reads -> its type, and which values it may have
READS = {"messages": (list, "a list of messages, at least one"), "prompt": (str, "a text, at least one character")}
#: fields of this server that OpenAI's API does not have
OWN = {"top_k", "repetition_penalty"}

#: the most messages and tools of a request, texts that end an answer and their characters, and biased tokens
MESSAGES, TOOLS, STOPS, STOP_CHARACTERS, BIASED = 2048, 128, 16, 256, 1024
#: the most characters of `generation_config` and of `chat_template_kwargs` in JSON
SETTINGS_CHARACTERS = 2**16
#: the most token ids of a setting, and of one of the sequences in `bad_words_ids`
IDS, BAD_WORDS, BAD_WORD_IDS = 64, 16, 16

_COUNT, _BIAS = number(1, 2**31 - 1, whole=True), number(-100, 100)
#: settings that a request may have, in fields or in `generation_config` -> their values
ALLOWED: dict[str, Allowed] = {
    **dict.fromkeys(("do_sample", "remove_invalid_values", "renormalize_logits"), SWITCH),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), number(high=1)),
    "temperature": number(1e-5, 100).or_(0),
    "top_k": number(0, 2**31 - 1, whole=True),
    "repetition_penalty": number(0.01, 100),
    "max_new_tokens": _COUNT,
    "min_new_tokens": number(0, 2**31 - 1, whole=True),
    "max_time": number(0, 10**9),
    "stop_strings": one_or_list_of(text(STOP_CHARACTERS), STOPS),
}
#: fields that are settings -> their values
FIELDS: dict[str, Allowed] = {
    **{name: ALLOWED[name] for name in ("temperature", "top_p", "repetition_penalty")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), _COUNT),
    "top_k": number(-1, 2**31 - 1, whole=True),
    "seed": number(0, 2**63 - 1, whole=True),
    "stop": ALLOWED["stop_strings"],
}
#: what files of transformers say, and what changes no answer
UNUSED_SETTINGS = ("pad_token_id", "bos_token_id", "transformers_version", "_from_model_config")


def check_fields(body: dict[str, Any], known: Collection[str], reads: str) -> None:
    """Check a request, and drop fields that change no answer. Values of another type than a field has raise errors of Python
    where they are used.

    Args:
        known: names that this request may have.
        reads: the field that says what the model reads.

    Raises:
        Refused: with the name of the field.
    """
    check_json(body)
    for name, value in list(body.items()):
        if value is None or (name in WITHOUT_EFFECT and name in known):
            del body[name]  # treated as not given
        elif any(type(value) is type(usual) and value == usual for usual in USUAL.get(name, ())):  # True is not 1
            del body[name]
        elif name not in known:
            raise Refused(400, f"{name:.200} is not a field of this request", name[:200])
        elif name not in HONOURED | OWN or (name == "tool_choice" and value != "none"):
            raise Refused(400, f"{name}={shown(value)} cannot be honoured by this server; leave it out", name)
    kind, allowed_text = READS[reads]
    if not isinstance(body.get(reads), kind) or not body[reads]:  # an empty text has no token
        raise not_allowed(reads, body.get(reads), allowed_text)
    if reads == "messages":
        _check_messages(body["messages"])
    if len(body.get("tools", ())) > TOOLS:
        raise Refused(400, f"tools: {len(body['tools'])} are too many; at most {TOOLS} are served", "tools")
    bias = body.get("logit_bias", {})
    if len(bias) > BIASED or any(value not in _BIAS for value in bias.values()):
        raise not_allowed("logit_bias", bias, f"an object of at most {BIASED} tokens, each with {_BIAS}")
    for name, allowed in FIELDS.items():
        if name in body and body[name] not in allowed:
            raise not_allowed(name, body[name], str(allowed))


def check_json(value: Any, name: str | None = None) -> None:
    """Raise for what JSON of other programs cannot have: half of a character, and numbers that are infinite.

    Args:
        name: of the field; `None`: the value is the whole body.
    """
    where = name or "the body"
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"{where} has half of a surrogate pair, {error.object[error.start]!a}", name) from error
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, f"{where} has a number that is not finite, or is nested too deeply: {error}", name
        ) from error


def _check_messages(messages: list[Any]) -> None:
    """Raise for content that is not text, which transformers would drop silently."""
    if len(messages) > MESSAGES:
        raise Refused(400, f"messages: {len(messages)} are too many; at most {MESSAGES} are served", "messages")
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if (kind := part.get("type")) != "text":
                raise Refused(400, f"messages: content of type {shown(kind)} is not served; only text is", "messages")
    chat_messages("messages", messages)


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that were checked, for the chat template. All fields that are not null stay. Content is a text or parts, and
    arguments of tool calls, which are JSON in OpenAI's API, are objects, as templates read them."""
    read = [_template_message(message) for message in messages]
    check_json(read, "messages")  # escapes in arguments are read here
    return read


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    message.setdefault("content", "")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "function": _template_function(call["function"])} for call in calls]
    return message


def _template_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else None
    return {**function, "arguments": {} if arguments is None else arguments}


def read_settings(json_text: str, vocabulary: int) -> dict[str, Any]:
    """The settings of `generation_config`, without those that change no answer.

    Args:
        json_text: an object.
        vocabulary: number of tokens.

    Raises:
        Refused: a setting is not served or out of range. ValueError: it is no JSON.
    """
    if len(json_text) > SETTINGS_CHARACTERS:
        message = f"generation_config has {len(json_text)} characters; at most {SETTINGS_CHARACTERS}"
        raise Refused(400, message, "generation_config")
    settings = json.loads(json_text)
    check_json(settings, "generation_config")  # its escapes are read here
    token = number(0, vocabulary - 1, whole=True)
    served = ALLOWED | {
        "eos_token_id": one_or_list_of(token, IDS),
        "suppress_tokens": list_of(token, IDS),
        "bad_words_ids": list_of(list_of(token, BAD_WORD_IDS), BAD_WORDS),
    }
    neutral = GenerationConfig._get_default_generation_params()
    for name, value in list(settings.items()):
        usual = neutral.get(name)
        if value is None or name in UNUSED_SETTINGS:
            del settings[name]
        elif name in served:
            if value not in served[name]:
                raise not_allowed(f"generation_config: {name}", value, str(served[name]))
        elif type(value) is type(usual) and value == usual:
            del settings[name]
        else:
            message = f"generation_config: {name:.200}={shown(value)} is not served; leave it out. These are: "
            raise Refused(400, message + ", ".join(sorted(served)), "generation_config")
    return settings


def check_template_values(values: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise unless `values` are variables of the chat template, and short."""
    if len(json.dumps(values)) > SETTINGS_CHARACTERS:
        message = f"chat_template_kwargs have more than {SETTINGS_CHARACTERS} characters"
        raise Refused(400, message, "chat_template_kwargs")
    for name in values:
        if name not in allowed:
            variables = ", ".join(sorted(allowed)) or "none"
            message = (
                f"chat_template_kwargs: {name:.200} is not a variable of the chat template; these are: {variables}"
            )
            raise Refused(400, message, "chat_template_kwargs")
