"""The text of an answer, from its tokens: reasoning, tool calls, stop texts. Streamed and whole answers are made here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cli.serving.utils import DirectStreamer, response_events_to_chunks

from ...generation.answer_parser import AnswerParser
from ..request_loop import Ticket
from ..result import Result

#: message for a client whose request was cancelled
CANCELLED = "the request was cancelled: the client left, or the server is stopping"


class Failure:
    """The last part of an answer that failed.

    Args:
        status: of HTTP, for an answer that has not begun.
    """

    def __init__(self, status: int, message: str):
        self.status, self.message = status, message


class AnswerStreamer(DirectStreamer):
    """Puts the parts of an answer into a queue: `str`, `ReasoningText`, `ToolCall`, perhaps a `Failure`, and `None`.

    Args:
        tokenizer: of transformers.
        loop, queue: where the parts go.
        parser: `None`: the model's answers have no parts.
        stops: the answer ends before the first of these texts.
    """

    def __init__(
        self,
        tokenizer: Any,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue,
        parser: AnswerParser | None,
        stops: list[str],
    ):
        self._stop = StopText(stops)
        self._ticket: Ticket | None = None
        self._unsent_space: dict[type, str | None] = {}
        self.result: Result | None = None
        beginning: list[dict] = []
        if parser is not None:  # what the prompt has begun, e.g. reasoning
            beginning, parser.initial_events = parser.initial_events, []
        super().__init__(tokenizer._tokenizer, loop, queue, response_parser=parser)
        for item in response_events_to_chunks(beginning):
            self._enqueue(item)

    def watch(self, ticket: Ticket) -> None:
        """The request that writes this text."""
        self._ticket = ticket
        if self._stop.reached:  # it was faster
            ticket.cancel()

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, after the end."""
        length = not self._stop.reached and self.result is not None and self.result.finish_reason == "length"
        return "length" if length else "stop"

    def put(self, value: Any) -> None:
        """The next token, or the prompt. Tokens after a stop text are neither shown nor counted."""
        if not self._stop.reached:
            super().put(value)
            if self._stop.reached:
                self.cancel()

    def hand_over(self, result: Result) -> None:
        """Put the result of an answer that is not streamed into the queue. `read` makes parts of it, in another thread
        than the one of the model."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, result)

    def read(self, result: Result, alive: bool = True) -> None:
        """All tokens of an answer at once, and its end. Arguments as for `complete`."""
        self._first = False
        try:
            self.put(torch.tensor(result.generated_tokens, dtype=torch.long))
        except Exception as error:
            result.error = result.error or f"{type(error).__name__}: {error}"
        self.complete(result, alive)

    def end(self) -> None:
        """Called by the scheduler when the row has ended. The reason comes with `complete`."""

    def complete(self, result: Result, alive: bool = True) -> None:
        """The result has arrived.

        Args:
            alive: whether the loop answers further requests.
        """
        self.result = result
        try:
            if result.error is not None:
                super()._enqueue(Failure(500 if alive else 503, result.error))
            elif result.finish_reason == "cancelled" and not self._stop.reached:
                super()._enqueue(Failure(503, CANCELLED))
            else:
                if not self._stop.reached:
                    self._finish()
        except Exception as error:
            super()._enqueue(Failure(500, f"{type(error).__name__}: {error}"))
        finally:
            super()._enqueue(None)

    def _finish(self) -> None:
        if self._parser is not None:
            super().end()
        self._send(self._stop.end())

    def _enqueue(self, item: Any) -> None:
        if item is None:  # of transformers; `complete` ends the answer
            return
        if self._stop.reached:
            return
        self._send(self._stop.feed(item) if type(item) is str else item)

    def _send(self, item: Any) -> None:
        if self._parser is not None and isinstance(item, str):
            item = self._without_edges(item)
        if item != "":
            super()._enqueue(item)

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

    def cancel(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()


class StopText:
    """Passes on a text piece by piece, up to the first stop text. A piece that may begin a stop text is delayed.

    Args:
        stops: the stop texts; none is empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = list(stops)
        self._unsent = ""
        self.reached = False

    def feed(self, text: str) -> str:
        """The new part of the text that can be passed on."""
        if self.reached:
            return ""
        self._unsent += text
        places = [place for stop in self._stops if (place := self._unsent.find(stop)) >= 0]
        if places:
            self.reached = True
            out, self._unsent = self._unsent[: min(places)], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._unsent = self._unsent[: len(self._unsent) - keep], self._unsent[len(self._unsent) - keep :]
        return out

    def end(self) -> str:
        """The rest of the text, after its end."""
        out, self._unsent = self._unsent, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Number of characters at the end of the held text that may begin this stop text."""
        most = min(len(stop) - 1, len(self._unsent))
        return next((count for count in range(most, 0, -1) if stop.startswith(self._unsent[-count:])), 0)
