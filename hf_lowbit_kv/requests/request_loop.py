"""A thread that answers requests on a pool of rows as they arrive, until it is stopped. The server is built on it.

An error in a step of the model ends the requests of that step. An error of a result's callback ends nothing. Only an error
after which no step can run ends the thread.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..cache.prefix_store import PrefixStore
from ..cache.served_models import unwrap_generating
from .kept_prompts import KeptPrompts
from .pool_models import empty_caches
from .pool_steps import exclusive_use, new_pool
from .request import Request, RequestReader
from .result import Result, described
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
#: number of waiting requests among which the first one that fits gets the next row
LOOK_AHEAD = 64


class LoopEndedError(RuntimeError):
    """The thread has ended and answers no more requests."""


class Ticket:
    """A request that was submitted."""

    def __init__(self, request: Request, done: Callable[[Result], None], cancelled: queue.SimpleQueue[Ticket]):
        self.request, self.done, self._cancelled = request, done, cancelled

    def cancel(self) -> None:
        """End the request at its next token, or before it begins. No effect after its end."""
        self._cancelled.put(self)


class RequestLoop:
    """Requests on one model, each with its own options.

    Args:
        model: as for `generate_many`, which also explains the other arguments. Our attention implementation is selected
            until `stop`.
        prefixes: a `PrefixStore` with whose texts rows may begin. The texts of its folder are loaded first, as many as fit;
            no text is added to it.

    Raises:
        ValueError: a pool cannot serve the model, there is too little memory, or the store has no text of this model and
            these pages.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        preset: str | None = None,
        *,
        memory: int | None = None,
        max_rows: int | None = None,
        chunk_size: int = 2048,
        share_prefixes: bool = True,
        prefixes: PrefixStore | None = None,
        cache_options: Mapping[str, Any] | None = None,
    ):
        self.model = unwrap_generating(model)
        make_cache = empty_caches(self.model, preset, cache_options)
        self._reader = RequestReader(self.model, tokenizer, {})
        with exclusive_use(self.model):
            if prefixes is not None and not prefixes.load(make_cache(1)):
                raise ValueError(
                    f"{prefixes!r} has no text that was read by this model with preset {preset!r} and its calibration"
                )
            steps, shared = new_pool(
                self.model, make_cache, chunk_size, memory=memory, max_rows=max_rows, share_prefixes=share_prefixes
            )
            kept = KeptPrompts(steps, prefixes, adding=False)
        self.pool = steps.pool
        self._scheduler = Scheduler(steps, self._source(), chunk_size, shared, tokenizer, kept, LOOK_AHEAD)
        self._submitted: deque[Ticket] = deque()
        self._news = threading.Event()
        self._cancelled: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        """what ended the thread, if it was not `stop`"""
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._thread.start()

    # ---- from any thread ------------------------------------------------------------------------------------------

    def submit(self, options: Mapping[str, Any], done: Callable[[Result], None]) -> Ticket:
        """Take a request.

        Args:
            options: a request as `generate_many` takes them, of one sequence.
            done: called with its result, in the loop's thread.

        Raises:
            ValueError: it cannot be served, or can never fit. LoopEndedError: the thread has ended.
        """
        number = next(self._numbers)
        request = self._reader.read({**options, "id": str(number)}, number)
        if request.sequences != 1:
            raise ValueError(f"num_return_sequences={request.sequences} is not allowed here; it must be 1")
        self._scheduler.steps.check_fits(len(request.prompt_ids), request.new_tokens)
        ticket = Ticket(request, done, self._cancelled)
        with self._guard:
            if self._stopping.is_set() or self.error is not None:
                raise LoopEndedError(f"requests are not taken any more: {self.error or 'the server is stopping'}")
            self._tickets[request.id] = ticket
            self._submitted.append(ticket)
        self._news.set()
        return ticket

    @property
    def alive(self) -> bool:
        return self.error is None and self._thread.is_alive()

    def cancel_all(self) -> None:
        """Cancel all requests that have no result yet."""
        with self._guard:
            tickets = list(self._tickets.values())
        for ticket in tickets:
            ticket.cancel()

    def stop(self) -> None:
        """Take no more requests, and cancel those that have not ended. Frees the pool."""
        with self._guard:
            self._stopping.set()
        self._thread.join()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _source(self) -> Iterator[Request | None]:
        """The next request. The scheduler asks for it whenever a row is free, and waits here while there is nothing
        else to do."""
        while True:
            if not self._submitted and not self._scheduler.running and self._cancelled.empty():
                self._news.wait(0.02)
            self._news.clear()
            yield self._submitted.popleft().request if self._submitted else None

    def _end_cancelled(self) -> None:
        while not self._cancelled.empty():
            ticket = self._cancelled.get()
            if ticket.request.id in self._tickets and not self._scheduler.cancel(ticket.request):
                self._submitted.remove(ticket)  # not scheduled yet
                self._deliver(ticket.request.result("cancelled"))

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            with exclusive_use(self.model):
                if self.model.device.type == "cuda":
                    torch.cuda.set_device(self.model.device)
                scheduler.refresh_model()
                while not self._stopping.is_set():
                    self._end_cancelled()
                    try:
                        scheduler.advance()
                    except Exception as error:
                        scheduler.fail(error)
                        logger.exception("a step of the model failed; its requests have ended")
                    while scheduler.finished:
                        self._deliver(scheduler.finished.popleft())
                for result in scheduler.abandon():
                    self._deliver(result)
        except BaseException as error:
            logger.critical("no request can be answered any more: the thread of the model has ended", exc_info=error)
            with self._guard:
                self.error = error
        finally:
            self._fail_the_rest()
            scheduler.free()

    def _deliver(self, result: Result) -> None:
        ticket = self._tickets.pop(result.id)
        try:
            ticket.done(result)
        except Exception:
            logger.exception("the result of a request was not taken")

    def _fail_the_rest(self) -> None:
        """Give a result to each request that has none yet."""
        for ticket in list(self._tickets.values()):
            result = ticket.request.result("cancelled")
            if self.error is not None:
                result.finish_reason, result.error = "error", described(self.error)
            self._deliver(result)
