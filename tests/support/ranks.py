"""Several processes that talk through gloo on this machine, as `torchrun` starts them."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from processes import free_port
from torch import multiprocessing

#: seconds after which processes that do not end count as hanging
PATIENCE = 60
#: what ranks find imported
IMPORTED = ["torch", "torch.distributed", "transformers.modeling_utils", "hf_lowbit_kv", "cases"]


def run_ranks(function: Callable[..., None], count: int, *args: Any, patience: float = PATIENCE) -> list[int]:
    """Run `function(rank, *args)` in `count` new processes, with the environment that `torchrun` gives them.

    Returns:
        The exit code of each.

    Raises:
        TimeoutError: they have not ended in time. They are killed then.
    """
    port = free_port()
    # forks of one process that has imported everything: an import takes a rank longer than most of what it is started for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_as_rank, args=(function, rank, count, port, dict(os.environ), args))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + patience
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    if hanging := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        for process in processes:
            process.kill()
        raise TimeoutError(f"ranks {hanging} had not ended after {patience} s")
    return [process.exitcode or 0 for process in processes]


def _as_rank(function: Callable[..., None], rank: int, count: int, port: int, environment: dict, args: tuple) -> None:
    os.environ.clear()  # it is that of the process that was forked
    os.environ |= environment | launcher_environment(rank, count, port)
    torch.set_num_threads(1)
    function(rank, *args)


def launcher_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What `torchrun` passes to a process, on one machine without a GPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def raised() -> Iterator[list[str]]:
    """Collects the message of an error that is raised inside."""
    messages: list[str] = []
    try:
        yield messages
    except (RuntimeError, ValueError) as error:
        messages.append(f"{type(error).__name__}: {error}")
