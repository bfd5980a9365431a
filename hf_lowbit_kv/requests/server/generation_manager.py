"""The generation manager of transformers' server, on a request loop. Each request has its own sampling, `stop` and
`seed`."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    DirectStreamer,
    GenerationState,
    _StreamError,
)

from ..request_loop import LoopEndedError, RequestLoop, Ticket
from ..result import Result
from .stop_text import StopText, cut

#: attributes of a request's generation configuration for fields that transformers does not have
SEED, MAY_SHORTEN = "_lowbit_seed", "_lowbit_may_shorten"
#: what a client is told whose request was cancelled
CANCELLED = "the request was cancelled: the client left, or the server is stopping"


class PoolStreamer(DirectStreamer):
    """The text of one answer while it is written. It ends with the result, or with the first of `stops`."""

    def __init__(self, *args: Any, stops: list[str], **kwargs: Any):
        self._stop = StopText(stops)
        self._ticket: Ticket | None = None
        super().__init__(*args, **kwargs)

    def watch(self, ticket: Ticket) -> None:
        """The request that writes this text."""
        self._ticket = ticket
        if self._stop.reached:  # it was faster
            ticket.cancel()

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come. Tokens behind it are neither shown nor counted."""
        return self._stop.reached

    def put(self, value: Any) -> None:
        if not self._stop.reached:
            super().put(value)
            if self._stop.reached:
                self.cancel()

    def _enqueue(self, item: Any) -> None:
        if type(item) is str:
            item = self._stop.feed(item)
        if item != "":
            super()._enqueue(item)

    def end(self) -> None:
        """Called by the scheduler when the row has ended. The reason comes with `complete`."""

    def complete(self, result: Result) -> None:
        """The result has arrived."""
        error = result.error or (CANCELLED if result.finish_reason == "cancelled" and not self._stop.reached else None)
        if error is not None:
            super()._enqueue(_StreamError(error.replace('"', "'")))
        elif rest := self._stop.end():
            super()._enqueue(rest)
        super().end()

    def cancel(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()


class PoolGenerateManager(BaseGenerateManager):
    """The generation manager of one model.

    Args:
        requests: the loop that answers requests.
    """

    def __init__(self, requests: RequestLoop):
        self.requests = requests
        self._running: dict[str, list[Ticket]] = {}

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        texts: asyncio.Queue = asyncio.Queue()
        streamer = _streamer(processor, texts, gen_config, response_parser)
        streamer.watch(self._submit(inputs, gen_config, request_id, streamer.complete, streamer=streamer))
        return texts, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        def done(result: Result) -> None:
            loop.call_soon_threadsafe(settle, result)

        stops, streamer = _stops(gen_config), None
        if stops:  # the text is searched for stops while it is written
            streamer = _streamer(processor, asyncio.Queue(), gen_config)
            streamer.watch(self._submit(inputs, gen_config, request_id, done, streamer=streamer))
        else:
            self._submit(inputs, gen_config, request_id, done)
        result = await future
        if result.error is not None:
            if not self.requests.alive:
                raise CBWorkerDeadError(result.error)
            raise HTTPException(500, result.error)
        stopped = streamer is not None and streamer.stopped
        if result.finish_reason == "cancelled" and not stopped:
            raise HTTPException(503, CANCELLED)
        ids = (
            result.generated_tokens[: streamer.total_tokens]
            if streamer is not None and stopped
            else result.generated_tokens
        )
        return cut(processor.decode(ids, skip_special_tokens=True), stops), len(result.prompt_ids), ids

    def _submit(
        self, inputs: Any, config: GenerationConfig, request_id: str, done: Callable[[Result], None], **options: Any
    ) -> Ticket:
        ids = list(inputs["input_ids"])
        longest = self.requests.pool.longest
        if getattr(config, MAY_SHORTEN, False):  # nobody asked for so many tokens
            config.max_new_tokens = max(min(config.max_new_tokens or 1, longest - len(ids)), 1)
        if (seed := getattr(config, SEED, None)) is not None:
            options["seed"] = seed
        config = copy.deepcopy(config)
        config.stop_strings = None  # streamers look for them, at no cost for rows that have none

        def finished(result: Result) -> None:
            if request_id in self._running:
                self._running[request_id] = [each for each in self._running[request_id] if each is not ticket]
                if not self._running[request_id]:
                    del self._running[request_id]
            done(result)

        try:
            ticket = self.requests.submit({"input_ids": ids, "generation_config": config, **options}, finished)
        except (ValueError, TypeError) as error:
            raise HTTPException(400, re.sub(r"^request \d+: ", "", str(error))) from error
        except LoopEndedError as error:
            raise CBWorkerDeadError(str(error)) from error
        self._running.setdefault(request_id, []).append(ticket)
        return ticket

    def cancel(self, request_id: str) -> None:
        """The client has disconnected."""
        for ticket in self._running.get(request_id, []):
            ticket.cancel()

    def stop(self) -> None:
        self.requests.stop()


class PoolState(GenerationState):
    """Takes the place of transformers' choice among managers: there is only one."""

    def __init__(self, manager: PoolGenerateManager):
        super().__init__(continuous_batching=True)
        self._manager = manager

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self._manager

    def is_cb_alive(self) -> bool:
        return self._manager.requests.alive

    def shutdown(self) -> None:
        self._manager.stop()


def _streamer(processor: Any, texts: asyncio.Queue, config: Any, response_parser: Any = None) -> PoolStreamer:
    tokenizer = getattr(processor, "tokenizer", processor)
    loop = asyncio.get_running_loop()
    return PoolStreamer(tokenizer._tokenizer, loop, texts, response_parser=response_parser, stops=_stops(config))


def _stops(config: Any) -> list[str]:
    stops = config.stop_strings or []
    return [stops] if isinstance(stops, str) else list(stops)
