"""Ends a rank when another one has died while recorded steps run.

NCCL's watchdog does not follow collectives inside a CUDA graph. If a rank dies, the others wait in the graph's next
collective for ever, and no Python code of theirs runs. So a thread of each rank counts up in the store of the process
group, and watches the counts of the other ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing import util
from typing import Any

import torch.distributed as dist

#: seconds between two beats, and until a rank without a beat counts as dead. A thread that compiles may hold Python's
#: lock for some seconds
INTERVAL, PATIENCE = 2.0, 30.0
#: exit status of a process that ends because another rank has died
EXIT_STATUS = 70
_LEFT = b"left"
_started: set[str] = set()
_lock = threading.Lock()


def watch_ranks(group: Any) -> None:
    """Watch the other ranks of this process group from now on, in a daemon thread; once for each group.

    A rank that ends normally says so, and is not watched any more. If one dies, this process ends with `EXIT_STATUS`
    and a message: its main thread waits in the driver, so no exception could reach it.
    """
    with _lock:
        if group.group_name in _started:
            return
        _started.add(group.group_name)
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()  # a connection of its own: others may block on theirs
    own = dist.get_rank()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    heart = Heartbeat(store, f"hf-lowbit-kv/{group.group_name}", own, others)
    util.Finalize(None, heart.leave, exitpriority=0)  # at the end of processes of multiprocessing, too
    threading.Thread(target=heart.run, name="hf-lowbit-kv-heartbeat", daemon=True).start()


class Heartbeat:
    """Counts up for one rank, and watches the counts of others.

    Args:
        store: of the process group. prefix: of its keys. own, others: ranks.
    """

    def __init__(self, store: Any, prefix: str, own: int, others: list[int]):
        self.store, self.prefix, self.own, self.others = store, prefix, own, others
        self.left = threading.Event()

    def run(self) -> None:
        seen = {rank: (b"", time.monotonic()) for rank in self.others}
        beat = 0
        while not self.left.wait(INTERVAL):
            beat += 1
            now = time.monotonic()
            try:
                self.store.set(self._key(self.own), str(beat))
                for rank, (last, _) in list(seen.items()):
                    value = self.store.get(self._key(rank)) if self.store.check([self._key(rank)]) else b""
                    if value == _LEFT:
                        del seen[rank]
                    elif value != last:
                        seen[rank] = value, now
            except Exception as error:  # the process that has the store is gone
                if not self.left.is_set():
                    _end(f"the store of the process group does not answer ({type(error).__name__}: {error})")
                return
            for rank, (_, since) in seen.items():
                if now - since > PATIENCE:
                    _end(f"rank {rank} has given no sign of life for {now - since:.0f} s")

    def leave(self) -> None:
        """Say that this rank ends normally."""
        self.left.set()
        try:
            self.store.set(self._key(self.own), _LEFT.decode())
        except Exception:  # the others are gone already
            return

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"


def _end(reason: str) -> None:
    print(f"hf_lowbit_kv: {reason}. Recorded steps would wait for it for ever, so this process ends.", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
