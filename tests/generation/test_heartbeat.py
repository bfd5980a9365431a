"""A rank that dies ends the others: the thread that watches them, without a GPU."""

from __future__ import annotations

import os
import time

import pytest
from ranks import run_ranks
from torch.distributed import HashStore

from hf_lowbit_kv.generation import tensor_parallel


def _rank(rank: int, way: str) -> None:
    import torch.distributed as dist

    tensor_parallel.INTERVAL, tensor_parallel.PATIENCE = 0.1, 1.5
    dist.init_process_group("gloo")
    tensor_parallel.watch_ranks(dist.group.WORLD)
    tensor_parallel.watch_ranks(dist.group.WORLD)  # once for each group
    time.sleep(0.5)
    if rank == 1:
        if way == "killed":
            os.kill(os.getpid(), 9)
        return
    end = time.monotonic() + (60 if way == "killed" else 3)
    while time.monotonic() < end:  # as a main thread that waits for a collective of a graph
        time.sleep(0.1)


@pytest.mark.parametrize(("way", "codes"), [("killed", [tensor_parallel.EXIT_STATUS, -9]), ("leaves", [0, 0])])
def test_a_killed_rank_ends_the_other_and_one_that_leaves_does_not(way, codes):
    assert run_ranks(_rank, 2, way) == codes


def test_a_store_that_is_gone_ends_the_process(monkeypatch):
    """The store is in the process of one rank, so its end may be the first sign."""
    ended = []
    monkeypatch.setattr(tensor_parallel, "INTERVAL", 0.01)
    monkeypatch.setattr(tensor_parallel, "_end", ended.append)
    store = HashStore()
    heart = tensor_parallel.Heartbeat(store, "test", 0, [1])
    monkeypatch.setattr(heart, "store", None)
    heart.run()
    assert len(ended) == 1
    assert "the store of the process group does not answer" in ended[0]
