"""`ChatPrompt`: messages as a tokenizer writes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

from .answer_parser import AnswerParser, parser_for

#: a text that no template changes
_PROBE = "5791684230"


class ChatPrompt:
    """The prompt of a conversation.

    Args:
        tokenizer: writes messages with a chat template, or in its own way.
        messages: as `check_messages` allows them. A template that reads content only as a list of parts, or only as a
            text, gets it so.
        options: for the template, such as `tools`.
        date: what the template shows as the current date and time; `None`: the time of the call.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], date: datetime | None = None
    ):
        self.tokenizer, self.options = tokenizer, dict(options)
        if date is not None and getattr(tokenizer, "chat_template", None):
            template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
            if "strftime_now" in template:
                self.options["chat_template"] = _dated(template, date)
        self.messages = self._as_read(list(messages))

    @functools.cached_property
    def ids(self) -> list[int]:
        """Its tokens, with the beginning of an answer. Raises what the template raises."""
        ids = self._written(self.messages, tokenize=True, return_dict=True)["input_ids"]
        return list(ids[0] if isinstance(ids[0], (list, tuple)) else ids)

    @property
    def text(self) -> str:
        """The prompt as the template writes it, before it is split into tokens."""
        text: str = self._written(self.messages, tokenize=False)
        return text

    @functools.cached_property
    def _text(self) -> str:
        return self.tokenizer.decode(self.ids)

    @property
    def begun(self) -> str | None:
        """Content of the last message if the answer continues it (`continue_final_message`); otherwise `None`."""
        if not self.options.get("continue_final_message") or self.messages[-1]["role"] != "assistant":
            return None
        return _as_text(self.messages[-1].get("content") or "")

    def parser(self, model: Any) -> AnswerParser | None:
        """A parser of the answer to this prompt. Arguments and errors as for `parser_for`."""
        return parser_for(self.tokenizer, model, self._text, self.options.get("tools"))

    def content_of(self, answer: str) -> str:
        """The part of an answer that has not been parsed which the template expects as content. If the template writes
        special tokens before the content, such as the name of a channel, this is the text after the last of these; it is
        empty if the model has not written them. Otherwise it is the whole answer."""
        try:
            begun = self._written(self.messages, tokenize=False)
            message = self._as_read([{"role": "assistant", "content": _PROBE}])
            ended = self._written([*self.messages, *message], tokenize=False, add_generation_prompt=False)
        except Exception:  # a tokenizer may not write a conversation that ends with an answer
            return answer
        common = next((i for i, pair in enumerate(zip(begun, ended, strict=False)) if pair[0] != pair[1]), len(begun))
        head = ended[common:].split(_PROBE)[0]
        if not any(token in head for token in self.tokenizer.all_special_tokens):
            return answer
        return answer.rsplit(head, 1)[1] if head in answer else ""

    def _written(self, messages: list[Any], **options: Any) -> Any:
        begins = not self.options.get("continue_final_message")
        return self.tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": begins, **self.options, **options}
        )

    def _as_read(self, messages: list[Any]) -> list[Any]:
        lists = any(isinstance(message.get("content"), list) for message in messages)
        texts = self._reads(_PROBE)
        parts = (lists or not texts) and self._reads([{"type": "text", "text": _PROBE}])
        if texts == parts or not (lists or parts):
            return messages
        return [
            {**message, "content": _as_parts(message["content"]) if parts else _as_text(message["content"])}
            if message.get("content") is not None
            else message
            for message in messages
        ]

    def _reads(self, content: Any) -> bool:
        """Whether the template shows content in this form."""
        try:
            text = self._written([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # whatever a template raises
            return False
        as_data = [form(part) for part in content for form in (str, json.dumps)] if isinstance(content, list) else []
        return _PROBE in text and not any(form in text for form in as_data)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def _dated(template: str, date: datetime) -> str:
    """This template with another date. A template of another text has an environment of its own, so nobody else's date
    changes. Jinja removes the line of the comment."""
    template = f"{{# begun {date.isoformat()} #}}\n{template}"
    _compile_jinja_template(template).environment.globals["strftime_now"] = date.strftime
    return template


def check_messages(name: str, messages: Sequence[Any]) -> None:
    """Raise `ValueError` for anything that a template would skip or misread.

    Args:
        name: of the argument, for the message.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{name}[{index}]={message!r} is not allowed; it must be a message: {{'role': ..., 'content': ...}}"
            )
        check_content(f"{name}[{index}]", message.get("content"))


def check_content(name: str, content: Any) -> None:
    """Raise `ValueError` for content that is neither a text nor a list of parts that are texts. `None` is allowed."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"{name} has a part of type {kind!r}, and only text is served here; use lb.generate")
        if kind is None or not isinstance(text, str):  # templates skip a text that is no part
            raise ValueError(
                f"{name} has content {content!r}; it must be a text or a list of {{'type': 'text', 'text': ...}}"
            )
        check_text(name, text)


def check_text(name: str, text: str) -> None:
    """Raise `ValueError` for a text that no tokenizer reads. name: of the argument, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a surrogate pair, {text[error.start]!a}, as character {error.start}, which no tokenizer "
            "reads; leave it out, or read the text again from where it comes from"
        ) from None
