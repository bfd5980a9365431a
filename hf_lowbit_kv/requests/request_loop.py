"""A thread that answers requests on a pool of rows as they come, until it is stopped. The server is built on it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..cache.implementation import selected
from ..cache.served_models import unwrap_generating
from ..generation.kept_caches import kept_caches
from .new_pool import new_pool
from .pool_models import empty_caches
from .request import Request, RequestReader
from .result import Result, described
from .scheduler import Scheduler


class LoopEndedError(RuntimeError):
    """The thread has ended and answers no more requests."""


class Ticket:
    """A request that was submitted."""

    def __init__(self, request: Request, done: Callable[[Result], None]):
        self.request, self.done, self.cancelled = request, done, False

    def cancel(self) -> None:
        """End the request at its next token, or before it begins."""
        self.cancelled = True


class RequestLoop:
    """Requests on one model, each with its own options.

    Args:
        model: as for `generate_many`, which explains the other arguments too. Our attention implementation is selected
            until `stop`.

    Raises:
        ValueError: a pool cannot serve the model, or there is too little memory.
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
        cache_options: Mapping[str, Any] | None = None,
    ):
        self.model = unwrap_generating(model)
        make_cache = empty_caches(self.model, preset, cache_options)
        self._reader = RequestReader(self.model, tokenizer, {})
        with self._alone():
            steps, prefixes = new_pool(
                self.model, make_cache, chunk_size, memory=memory, max_rows=max_rows, share_prefixes=share_prefixes
            )
        self.pool = steps.pool
        self._scheduler = Scheduler(steps, self._source(), chunk_size, prefixes, tokenizer)
        self._submitted: queue.Queue[Ticket] = queue.Queue()
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count()
        self._closing, self._abandoning = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        """what ended the thread, if it was not `stop`"""
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._thread.start()

    # ---- from any thread ------------------------------------------------------------------------------------------

    def submit(self, options: Mapping[str, Any], done: Callable[[Result], None]) -> Ticket:
        """Take a request.

        Args:
            options: a request as `generate_many` takes them, of one sequence. done: called with its result, in the loop's
                thread.

        Raises:
            ValueError: it cannot be served, or can never fit. LoopEndedError: the thread has ended.
        """
        number = next(self._numbers)
        request = self._reader.read({**options, "id": str(number)}, number)
        if request.sequences != 1:
            raise ValueError(f"num_return_sequences={request.sequences} is not allowed here; it must be 1")
        if not self.pool.could_ever_fit(request.limit):
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens and {request.new_tokens} may be written: that does not fit, "
                f"a row may hold {self.pool.longest} tokens"
            )
        ticket = Ticket(request, done)
        with self._guard:
            if self._closing.is_set() or self.error is not None:
                raise LoopEndedError(f"requests are not taken any more: {self.error or 'the server is stopping'}")
            self._tickets[request.id] = ticket
        self._submitted.put(ticket)
        return ticket

    @property
    def alive(self) -> bool:
        return self.error is None and self._thread.is_alive()

    def cancel_all(self) -> None:
        """Cancel all requests that have no result yet."""
        for ticket in list(self._tickets.values()):
            ticket.cancel()

    def stop(self, patience: float = 0.0) -> None:
        """Take no more requests, let running ones continue for `patience` seconds, and cancel the rest. Frees the
        pool."""
        with self._guard:
            self._closing.set()
        self._thread.join(patience)
        self._abandoning.set()
        self._thread.join()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _alone(self) -> Any:
        import contextlib

        stack = contextlib.ExitStack()
        stack.enter_context(kept_caches(self.model).lock)
        stack.enter_context(selected(self.model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack

    def _source(self) -> Iterator[Request | Result | None]:
        """The next request. The scheduler asks for it whenever a row is free, and waits here while there is nothing
        else to do."""
        while True:
            idle = not self._scheduler.sequences
            try:
                ticket = self._submitted.get(timeout=0.02) if idle else self._submitted.get_nowait()
            except queue.Empty:
                if self._closing.is_set():
                    return
                yield None
                continue
            request = ticket.request
            if ticket.cancelled:
                yield Result(request.id, request.index, list(request.prompt_ids), finish_reason="cancelled")
            else:
                yield request

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            with self._alone():
                if self.model.device.type == "cuda":
                    torch.cuda.set_device(self.model.device)
                scheduler.steps.begin()
                more = True
                while more and not self._abandoning.is_set():
                    for sequence in scheduler.sequences:
                        if self._tickets[sequence.request.id].cancelled:
                            scheduler.end(sequence, "cancelled")
                    more = scheduler.advance()
                    while scheduler.finished:
                        self._deliver(scheduler.finished.popleft())
                for result in scheduler.abandon():
                    self._deliver(result)
        except BaseException as error:
            with self._guard:
                self.error = error
        finally:
            self._fail_the_rest()
            scheduler.free()

    def _deliver(self, result: Result) -> None:
        self._tickets.pop(result.id).done(result)

    def _fail_the_rest(self) -> None:
        """Give a result to each request that has none yet."""
        for ticket in list(self._tickets.values()):
            request = ticket.request
            result = Result(request.id, request.index, list(request.prompt_ids), finish_reason="cancelled")
            if self.error is not None:
                result.finish_reason, result.error = "error", described(self.error)
            self._deliver(result)
