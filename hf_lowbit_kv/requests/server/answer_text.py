"""The text of an answer, from its tokens: reasoning, tool calls, stop texts. Streamed and whole answers are made here."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, NamedTuple

from transformers.cli.serving.utils import response_events_to_chunks

from ...generation.answer_parser import AnswerParser
from ...generation.stop_strings import StopStrings
from ..request_loop import RequestLoop, Ticket
from ..result import Result

#: message for a client whose request was cancelled
CANCELLED = "the request was cancelled: the client left, or the server is stopping"


class Failure(NamedTuple):
    """The last part of an answer that failed."""

    status: int
    """of HTTP, for an answer that has not begun"""
    message: str


class AnswerStreamer:
    """Puts the parts of an answer into a queue: `str`, `ReasoningText`, `ToolCall`, perhaps a `Failure`, and `None`.

    Args:
        tokenizer: of transformers.
        loop, queue: where the parts go.
        parser: `None`: the model's answers have no parts.
        stops: the answer ends before the first of these texts, which may be special tokens.
        unshown: tokens that have no text.
        requests: what answers.
    """

    def __init__(
        self,
        tokenizer: Any,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue,
        parser: AnswerParser | None,
        stops: list[str],
        unshown: Collection[int],
        requests: RequestLoop,
    ):
        self._requests = requests
        self._loop, self._queue, self._parser = loop, queue, parser
        self._text = StopStrings(tokenizer, stops, unshown)
        self._ticket: Ticket | None = None
        self._unsent_space: dict[type, str | None] = {}
        self._prompt = True
        self.total_tokens = 0
        self.result: Result | None = None
        if parser is not None:  # what the prompt has begun, e.g. reasoning
            self._send_events(parser.initial_events)

    def watch(self, ticket: Ticket) -> None:
        """The request that writes this text."""
        self._ticket = ticket
        if self._text.reached:  # it was faster
            ticket.cancel()

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, after the end."""
        length = not self._text.reached and self.result is not None and self.result.finish_reason == "length"
        return "length" if length else "stop"

    def put(self, value: Any) -> None:
        """The prompt, then each token. Tokens after a stop text are neither shown nor counted."""
        if not self._prompt:
            self._take(value.tolist())
        self._prompt = False

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            if self._text.reached:
                break
            self.total_tokens += 1
            self._feed(self._text.add(token))
            if self._text.reached and self._ticket is not None:
                self._ticket.cancel()

    def read(self, result: Result) -> None:
        """All tokens of an answer that is not streamed, and its end. Called in another thread than the model's."""
        try:
            self._take(result.generated_tokens)
        except Exception as error:
            result.error = result.error or f"{type(error).__name__}: {error}"
        self.complete(result)

    def end(self) -> None:
        """Called by the scheduler when the row has ended. The reason comes with `complete`."""

    def complete(self, result: Result) -> None:
        """The result of an answer whose tokens have come."""
        self.result = result
        try:
            if result.error is not None:
                self.enqueue(Failure(500 if self._requests.alive else 503, result.error))
            elif result.finish_reason == "cancelled" and not self._text.reached:
                self.enqueue(Failure(503, CANCELLED))
            else:
                self._finish()
        except Exception as error:
            self.enqueue(Failure(500, f"{type(error).__name__}: {error}"))
        finally:
            self.enqueue(None)

    def _finish(self) -> None:
        self._feed(self._text.end())
        if self._parser is not None:
            events: list[dict] = []
            self._parser._process(events, eos=True)  # `finalize` would want parts that an answer has not reached
            self._send_events(events)

    def _feed(self, text: str) -> None:
        if self._parser is not None:
            self._send_events(self._parser.feed(text))
        elif text:
            self.enqueue(text)

    def _send_events(self, events: list[dict]) -> None:
        for item in response_events_to_chunks(events):
            if (shown := self._without_edges(item) if isinstance(item, str) else item) != "":
                self.enqueue(shown)

    def enqueue(self, item: Any) -> None:
        """Put a part, or a result for `read`, into the queue. Called in any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def _without_edges(self, text: str) -> str:
        """The part of the text that can be sent now. The whole answer gets no white space at its ends, as whole answers that
        transformers parses."""
        kind = type(text)
        unsent = self._unsent_space.get(kind)
        text = text.lstrip() if unsent is None else unsent + text
        shown = text.rstrip()
        if shown:
            self._unsent_space[kind] = text[len(shown) :]
        elif unsent is not None:
            self._unsent_space[kind] = text
        return kind(shown)
