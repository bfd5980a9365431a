"""An answer as a person reads it, and as a message: content, reasoning and tool calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from warnings import warn

from transformers.cli.serving.utils import _normalize_tool_call, get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

#: tokenizers without a response template whose special tokens were shown
_WARNED = weakref.WeakSet[Any]()


class AnswerParser(ResponseParser):
    """transformers' parser of answers, but a part that cannot be parsed, such as an invalid tool call, becomes text.

    Args:
        template: the response template of the model.
        prefix: the prompt.
        tools: the tools of the request.
        calls: whether tool calls are supported; otherwise all of them become text.
    """

    def __init__(self, template: Any, prefix: str, tools: list[Any] | None, calls: bool = True):
        self._calls, self._opened_at = calls, 0
        self._content, self._space, self._tool_calls = "", "", list[Any]()
        super().__init__(template, prefix=prefix, tools=tools)
        self._show(self.initial_events)

    def read(self, text: str) -> str:
        """The new part of the content after the next part of the answer. The whole content has no white space at its
        ends."""
        return self._show(self.feed(text))

    def finish(self) -> tuple[str, dict[str, Any]]:
        """The rest of the content, and the message. The answer may end anywhere, so all parts are optional."""
        events: list[dict] = []
        self._process(events, eos=True)
        rest = self._show(events)
        own = ("role", "content", "tool_calls")
        others = {name: x for name, x in self._output.items() if x not in (None, "", [], {}) and name not in own}
        message = {"role": "assistant", **others}
        if (
            "thinking" in others
        ):  # the name in templates of gpt-oss and of older releases; other chat templates read this
            message.setdefault("reasoning_content", others["thinking"])
        if self._content or not self._tool_calls:
            message["content"] = self._content
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return rest, message

    def _show(self, events: list[dict]) -> str:
        self._tool_calls += [
            event["value"] for event in events if event["type"] == "region_close" and event["field"] == "tool_calls"
        ]
        chunks = [event for event in events if event["type"] == "region_chunk" and event["field"] == "content"]
        text = self._space + "".join(event["text"] for event in chunks if not event["dirty"])
        text = text if self._content else text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._content += shown
        return shown

    def _open_explicit(self, events: list[dict], field: Any, m: Any) -> None:
        self._opened_at = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict]) -> None:
        name = self._current
        if name is None or name == self._implicit_name or not self._opened:
            super()._close_current(events)
            return
        before = len(events)
        try:
            super()._close_current(events)
            if name == "tool_calls":
                value = events.pop()["value"]
                calls = value if isinstance(value, list) else [value]
                if not self._calls or not all(_is_call(call) for call in calls):
                    raise ValueError("no tool call")
                events += [{"type": "region_close", "field": "tool_calls", "value": call} for call in calls]
        except Exception:  # whatever the model has written
            del events[before:]
            text = self._buffer[self._opened_at : self._pos]
            events.append({"type": "region_chunk", "field": "content", "text": text, "dirty": False})
            self._reset_to_implicit()


def _is_call(value: Any) -> bool:
    call = _normalize_tool_call(value)  # raises for what has no name or no arguments
    return isinstance(call.name, str) and isinstance(call.arguments, str)


def parser_for(
    tokenizer: Any, model: Any, prompt: str, tools: list[Any] | None, calls: bool = True
) -> AnswerParser | None:
    """A parser of the answer to this prompt; `None` if the model has no response template, or if the prompt does not begin
    an answer as this template expects it.

    Raises:
        ValueError: the response template of the tokenizer is not valid.
    """
    if (spec := get_response_template(tokenizer, model)) is None:
        return None
    template: Any = load_response_template(spec)
    # transformers would take the whole prompt for a part of the answer
    return AnswerParser(template, prompt, tools, calls) if template.start_anchor_re.search(prompt) else None


def unshown_tokens(tokenizer: Any, ends: Any, parser: AnswerParser | None) -> frozenset[int]:
    """Special tokens that are no part of an answer. Others have a meaning, such as the beginning of a tool call.

    Args:
        ends: `eos_token_id` of the generation configuration.
        parser: its template may name the others.
    """
    names = () if parser is not None else ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    tokens = {*ends, *(getattr(tokenizer, name, None) for name in names)}
    return frozenset(tokens.intersection(tokenizer.all_special_ids))


def read_answer(
    tokenizer: Any,
    tokens: Sequence[int],
    ends: Any,
    parser: AnswerParser | None,
    content_of: Callable[[str], str],
    begun: str | None,
) -> tuple[str, dict[str, Any]]:
    """The text and the message of an answer. If it continues a message, the message is the whole one.

    Args:
        tokens: of the answer.
        ends: as for `unshown_tokens`.
        parser: a new one, or `None`.
        content_of, begun: see `ChatPrompt`.
    """
    unshown = unshown_tokens(tokenizer, ends, parser)
    tokens = [token for token in tokens if token not in unshown]
    content = text = tokenizer.decode(tokens)
    if parser is not None:
        text = parser.read(text)
        rest, message = parser.finish()
        return text + rest, message
    if text != tokenizer.decode(tokens, skip_special_tokens=True):
        content = content_of(text)
        if tokenizer not in _WARNED:
            _WARNED.add(tokenizer)
            warn(
                "this model has no response template, so the special tokens of its answers are shown and not parsed: set "
                "tokenizer.response_template to get reasoning and tool calls as fields of the message",
                stacklevel=4,
            )
    return text, {"role": "assistant", "content": (begun or "") + content}
