"""`AnswerParser`: the parts of an answer, such as reasoning and tool calls, as the model's response template names them."""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import _normalize_tool_call
from transformers.utils.chat_parsing import ResponseParser


class AnswerParser(ResponseParser):
    """transformers' parser of answers, but an invalid tool call becomes text.

    Args:
        template: the response template of the model.
        prefix: the prompt.
        tools: the tools of the request.
        calls: whether the server supports tool calls; otherwise all of them become text.
    """

    def __init__(self, template: Any, prefix: str, tools: list[Any] | None, calls: bool = True):
        self._calls, self._opened_at = calls, 0
        super().__init__(template, prefix=prefix, tools=tools)

    def _open_explicit(self, events: list[dict], field: Any, m: Any) -> None:
        self._opened_at = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict]) -> None:
        if self._current != "tool_calls" or not self._opened:
            super()._close_current(events)
            return
        before = len(events)
        try:
            super()._close_current(events)
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
