"""Recorded steps of a model that tensor parallelism spreads over several processes (ranks).

A recorded step contains collectives, so all ranks must capture, reject, drop and replay the same steps. They agree once
per `generate` call, and before each step that is not replayed. A replay runs no other collectives than its own.

NCCL's watchdog does not follow collectives inside a CUDA graph. If a rank dies, the others wait in the next collective
of the graph forever, and none of their Python code runs. So a thread of each rank increments a counter in the store of the
process group, and watches the counters of the other ranks (`watch_ranks`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: the module of transformers whose wrappers of `forward` split a layer's input and output
_WRAPPERS = "transformers.distributed."
#: seconds between two increments, and without an increment until a rank counts as dead. A thread that compiles may hold
#: Python's lock for several seconds
INTERVAL, PATIENCE = 2.0, 30.0
#: exit status of a process that ends because another rank has died
EXIT_STATUS = 70
_LEFT = b"left"
_started: set[str] = set()
_lock = threading.Lock()


class Ranks:
    """The processes that share a model.

    Args:
        group: their process group; `None`: the model is in one process.
        device: device on which collectives of this group run.
    """

    def __init__(self, group: Any = None, device: torch.device | None = None):
        self.group, self.device = group, device

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """The ranks of a transformers model."""
        mesh = getattr(model, "_device_mesh", None)
        if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
            return cls()
        tensor_parallel = mesh["tp"] if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh
        return cls(tensor_parallel.get_group(), model.device)

    @property
    def several(self) -> bool:
        return self.group is not None

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank. Waits for all ranks if there are several."""
        if self.group is None:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags)


def local(tensor: Any) -> Any:
    """This rank's part of a parameter; a plain tensor, or `None`, is returned unchanged. Kernels read addresses, and a
    wrapper (`DTensor`) has none."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def splits(module: nn.Module) -> bool:
    """Whether transformers' tensor parallelism has replaced this module's `forward`."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "original", forward)
    return str(getattr(forward, "__module__", "")).startswith(_WRAPPERS)


# ---- a rank that dies -------------------------------------------------------------------------------------------------


def watch_ranks(group: Any) -> None:
    """Watch the other ranks of this process group in a daemon thread, which is started once per group.

    A rank that ends normally announces it, and is no longer watched. If a rank dies, this process exits with
    `EXIT_STATUS` and a message: its main thread waits in the driver, where no exception reaches it.
    """
    with _lock:
        if group.group_name in _started:
            return
        _started.add(group.group_name)
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()  # a separate connection: other calls may block on the first one
    own = dist.get_rank()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != own]
    heart = Heartbeat(store, f"hf-lowbit-kv/{group.group_name}", own, others)
    util.Finalize(None, heart.leave, exitpriority=0)  # also runs at the end of multiprocessing processes
    threading.Thread(target=heart.run, name="hf-lowbit-kv-heartbeat", daemon=True).start()


class Heartbeat:
    """Increments the counter of one rank, and watches those of the other ranks.

    Args:
        store: the store of the process group.
        prefix: prefix of the counters' keys.
        own, others: ranks.
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
            except Exception as error:  # the process with the store has ended
                if not self.left.is_set():
                    _end(f"the store of the process group does not answer ({type(error).__name__}: {error})")
                return
            for rank, (_, since) in seen.items():
                if now - since > PATIENCE:
                    _end(f"rank {rank} has given no sign of life for {now - since:.0f} s")

    def leave(self) -> None:
        """Announce that this rank ends normally."""
        self.left.set()
        try:
            self.store.set(self._key(self.own), _LEFT.decode())
        except Exception:  # the other ranks have ended already
            return

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"


def _end(reason: str) -> None:
    print(f"hf_lowbit_kv: {reason}. Recorded steps would wait forever, so this process ends.", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
