"""The requests of clients on a request loop. Each has its own sampling, `stop` and `seed`, and ends when its client leaves."""

from __future__ import annotations

import copy
import re
import threading
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import CBWorkerDeadError, GenerationState

from ..request_loop import LoopEndedError, RequestLoop, Ticket
from .answer_text import CANCELLED, AnswerStreamer
from .openai_errors import Refused

#: attributes of a request's generation configuration for fields that transformers does not have
SEED, MAY_SHORTEN = "_lowbit_seed", "_lowbit_may_shorten"


class PoolGenerateManager:
    """The requests of clients that have not left.

    Args:
        requests: the loop that answers requests.
    """

    def __init__(self, requests: RequestLoop):
        self.requests = requests
        self._guard = threading.Lock()
        self._open: dict[str, Ticket | None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, name: str) -> None:
        """Note a request that is not submitted yet."""
        with self._guard:
            self._open[name] = None

    def leave(self, name: str) -> None:
        """The client has disconnected, or has its whole answer: cancel its request, and reject a later `submit`."""
        with self._guard:
            ticket = self._open.pop(name, None)
        if ticket is not None:
            ticket.cancel()

    def submit(
        self, name: str, ids: list[int], config: GenerationConfig, streamer: AnswerStreamer, streamed: bool
    ) -> None:
        """Begin an answer. Called in any thread.

        Args:
            ids: the prompt.
            streamer: receives the answer.
            streamed: whether the streamer gets each token when it is drawn; otherwise it gets only the result.

        Raises:
            Refused: the request cannot be served, or its client has left. CBWorkerDeadError: nothing is served any more.
        """
        if getattr(config, MAY_SHORTEN, False):  # the default length, not a request of the client
            longest = self.requests.pool.longest
            config.max_new_tokens = max(min(config.max_new_tokens or 1, longest - len(ids)), 1)
        options: dict[str, Any] = {"streamer": streamer} if streamed else {}
        if (seed := getattr(config, SEED, None)) is not None:
            options["seed"] = seed
        config = copy.deepcopy(config)
        config.stop_strings = None  # the streamer detects them, so that rows without stop strings cost nothing

        done = streamer.complete if streamed else streamer.enqueue
        try:
            ticket = self.requests.submit({"input_ids": ids, "generation_config": config, **options}, done)
        except (ValueError, TypeError) as error:
            raise Refused(400, re.sub(r"^request \d+: ", "", str(error))) from error
        except LoopEndedError as error:
            raise CBWorkerDeadError(str(error)) from error
        streamer.watch(ticket)
        with self._guard:
            present = name in self._open
            if present:
                self._open[name] = ticket
        if not present:
            ticket.cancel()
            raise Refused(499, CANCELLED)


class PoolState(GenerationState):
    """transformers' state of a server: whether it can answer."""

    def __init__(self, requests: RequestLoop):
        super().__init__(continuous_batching=True)
        self._requests = requests

    def is_cb_alive(self) -> bool:
        return self._requests.alive
