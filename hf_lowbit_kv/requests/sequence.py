"""One text that is to be written, and what happens to it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from ..generation.stop_strings import StopStrings
from .request import Request
from .result import Result
from .row_pool import Row
from .sampling import Sampler


class State(enum.Enum):
    """The states of a sequence, in order; the first sequence of a request skips `FORKING`."""

    FORKING = "waits for the prefill of another sequence of its request, then forks it"
    WAITING = "has no row yet"
    PREFILLING = "its prompt is being prefilled"
    DECODING = "tokens are being written"
    ENDED = "its result is complete"


@dataclass(eq=False)
class Sequence:
    """One sequence of a request."""

    request: Request
    number: int
    """its index in the request"""
    seed: int
    result: Result
    state: State
    overtaken: int = 0
    """later requests that got a row while this one waited"""
    tried_at: int = -1
    """`Scheduler._rows_freed` when it last did not fit"""
    text: torch.Tensor | None = None
    """int64 `[1, limit]` on the device, for processors that read it"""
    tokens_drawn: int = 0
    """number of tokens drawn; the last one may not have arrived on the CPU yet"""
    looked_at: int | None = 0
    """`Scheduler._prefixes_added` at the last search for a prefix of its prompt; `None`: its prompt is being prefilled"""
    # `Scheduler._assign_row` sets these
    row: Row = None  # type: ignore[assignment]
    sampler: Sampler = None  # type: ignore[assignment]
    criteria: list[Any] = field(default_factory=list)
    """stopping criteria, without those that the scheduler checks itself"""
    stop_strings: StopStrings | None = None

    @property
    def has_row(self) -> bool:
        return self.state in (State.PREFILLING, State.DECODING)

    @property
    def ids(self) -> list[int]:
        """All tokens that the CPU knows."""
        return self.request.prompt_ids + self.result.generated_tokens
