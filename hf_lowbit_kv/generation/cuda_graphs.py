"""Graphs: they record the device's work of a call, and repeat it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Records the device's work of a call, and repeats it."""

    def capture(self, call: Callable[[], Any]) -> Any:
        """Record what `call` launches, without running it on the device. Returns the result of `call`."""
        ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes CUDA graphs that share the memory of their intermediate results."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = None

    def __call__(self) -> CudaGraph:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self)


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, family: CudaGraphs):
        self._graph, self._family = torch.cuda.CUDAGraph(), family
        self._stream = torch.cuda.Stream(family.device)
        self.replay = self._graph.replay

    def capture(self, call: Callable[[], Any]) -> Any:
        stream = torch.cuda.current_stream(self._stream.device)
        # cuBLAS keeps a workspace for each stream: the graph's own must come from its pool, and must not stay with cuBLAS
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with (
                torch.cuda.device(self._stream.device),
                torch.cuda.graph(
                    self._graph, pool=self._family.pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                return call()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails does not leave its own
            self._family.pool = None  # and torch takes it for one that is still recording
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def graphs_for(device: torch.device) -> Callable[[], Graph] | None:
    """The maker of graphs on this device; `None` if it has none."""
    return CudaGraphs(device) if device.type == "cuda" else None
