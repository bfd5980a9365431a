"""Several processes share an evaluation. Each process measures a part of the texts, and the first one writes all
results.

    accelerate launch --multi_gpu --num_processes 4 -m hf_lowbit_kv eval perplexity --preset kivi-2

`accelerate launch` and `torchrun` start the processes, and end all of them when one dies. accelerate's `PartialState`
joins them.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hf_lowbit_kv.installation import need

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
#: how long a process waits for the results of others. Parts differ in length, so the limit is far longer than any run.
#: If a process dies, the launcher ends the run
PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Processes:
    """The processes of a run, from the view of one process."""

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    """the device of this process; `None`: the run has only one process, which chooses its device"""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the results."""
        return self.rank == 0

    def part(self, items: Sequence[Item]) -> list[Item]:
        """The items for this process: every `count`-th one, so that each item belongs to one process."""
        return list(items[self.rank :: self.count])

    def gather(self, results: Sequence[Item]) -> list[Item]:
        """Collect the results of each process for its `part`. Every process gets all results in the order of the items.

        Raises:
            RuntimeError: a process died, or did not answer.
        """
        if self.count == 1:
            return list(results)
        import torch

        parts: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(parts, list(results))
        total = sum(map(len, parts))
        return [parts[index % self.count][index // self.count] for index in range(total)]


ONE_PROCESS = Processes()
#: variables in which launchers write how many processes they have started: torchrun, Open MPI, other MPIs, srun
COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
#: what accelerate sets in every process, and what it sets only where it was asked for several
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"}


def process_count() -> int:
    """Number of processes that a launcher has started for this run, including this one; 1 without a launcher.

    Raises:
        ValueError: a launcher announces more processes than there are ranks. Each of them would do all the work.
    """
    ranked = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    count = int(os.environ["WORLD_SIZE"]) if ranked else 1
    announced = [name for name in COUNTS if int(os.environ.get(name, 1)) > count]
    # accelerate writes no count. With --cpu, or where it finds fewer than two GPUs, it starts one process without a rank
    if not ranked and os.environ.keys() >= BY_ACCELERATE:
        announced.append("MASTER_ADDR")
    if announced:
        raise ValueError(
            f"{announced[0]}={os.environ[announced[0]]}: a launcher was asked for several processes, but did not start them as "
            "ranks of one run, so each would do all the work. Start them with `accelerate launch --multi_gpu "
            "--num_processes N -m hf_lowbit_kv ...`, also on CPUs"
        )
    return count


def join() -> Processes:
    """Join the processes that a launcher has started. Without a launcher, return `ONE_PROCESS`.

    Raises:
        ImportError: accelerate is missing.
    """
    if process_count() == 1:
        return ONE_PROCESS
    import torch

    need("sharing an evaluation", "eval", "accelerate")
    from accelerate import PartialState

    # without a GPU, ask accelerate for the CPU: otherwise it may find other devices that cannot communicate
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    return Processes(state.process_index, state.num_processes, state.device)


def leave() -> None:
    """Leave the group of processes, if there is one, without waiting for the others."""
    if process_count() == 1:
        return
    import torch

    if torch.distributed.is_initialized():
        from hf_lowbit_kv.generation.recording import forget_all

        forget_all()  # recorded steps hold the communicator
        torch.distributed.destroy_process_group()
