"""Several processes that share an evaluation: each measures a part of the texts, and the first one has all results.

    accelerate launch --num_processes 4 -m hf_lowbit_kv eval perplexity --preset kivi-2

`accelerate launch` and `torchrun` start the processes, and end all of them when one dies. accelerate's `PartialState` joins
them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
#: how long a process waits for the results of others. Parts are of unequal length, so nobody should meet this limit; the
#: launcher ends a run in which a process has died
PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    """the device of this process; `None`: the run has one process, which chooses"""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the results."""
        return self.rank == 0

    def part(self, items: Sequence[Item]) -> list[Item]:
        """What this process works on: every `count`-th item, so that each item is worked on once."""
        return list(items[self.rank :: self.count])

    def gather(self, results: Sequence[Item]) -> list[Item]:
        """All results in the order of the items, from what each process found for its `part`. Every process gets them.

        Raises:
            RuntimeError: a process has died, or did not answer.
        """
        if self.count == 1:
            return list(results)
        parts: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(parts, list(results))
        total = sum(map(len, parts))
        return [parts[index % self.count][index // self.count] for index in range(total)]


ALONE = Processes()


def process_count() -> int:
    """Processes that a launcher has started for this run, this one included; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1


def join() -> Processes:
    """Join the processes that a launcher has started. Without a launcher: `ALONE`.

    Raises:
        ImportError: accelerate is missing.
    """
    if process_count() == 1:
        return ALONE
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError("sharing an evaluation needs accelerate: pip install 'hf-lowbit-kv[eval]'") from error
    # without a GPU, accelerate must be told so: it may find other devices that cannot talk to each other
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    return Processes(state.process_index, state.num_processes, state.device)


def leave() -> None:
    """Part from the other processes, if there are any. Waits for none of them."""
    if process_count() > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
