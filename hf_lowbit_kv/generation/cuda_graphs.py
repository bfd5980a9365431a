"""Graphs: they capture the device work of a call, and replay it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Captures the device work of a call, and replays it."""

    def capture(self, call: Callable[[], Any]) -> Any:
        """Capture what `call` launches, without running it on the device. Returns the result of `call`."""
        ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes CUDA graphs that share a memory pool for intermediate results."""

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
        # cuBLAS keeps a workspace per stream: the graph's workspace must come from its pool, and must not stay with cuBLAS
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
            torch.cuda.set_stream(stream)  # a failed capture does not restore the stream
            self._family.pool = None  # torch would treat the pool as still capturing
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def graphs_for(device: torch.device) -> Callable[[], Graph] | None:
    """A factory of graphs for this device; `None` if the device has no graphs."""
    return CudaGraphs(device) if device.type == "cuda" else None
