"""Tokens without room in a full cache.

Operations count tokens without room on the device (`LayerState.lost`). A decode step must not wait for the device. So
the CPU queues a copy of the count, and looks at the copy when it has arrived, usually a step later.
"""

from __future__ import annotations

import torch


class OverrunError(RuntimeError):
    """A preallocated cache had no room for some tokens, and they are lost."""


def _message(capacity: int, lost: int) -> str:
    return (
        f"max_cache_len={capacity} was too small: {lost} tokens of a row came when it was full and are lost, so what was "
        "generated since is wrong. Make the cache for as many tokens as prompt and answer have together, or reset() it"
    )


class OverrunWatch:
    """The lost tokens of one layer, as far as the CPU knows them. A copy starts empty, because the copied layer has its own
    count."""

    def __init__(self) -> None:
        self._arrived: torch.cuda.Event | None = None  # event after the copy in flight
        self._copy: torch.Tensor | None = None

    def __reduce__(self):
        return OverrunWatch, ()

    def forget(self) -> None:
        """The layer was reset."""
        self._arrived = None

    @torch.inference_mode(False)
    def check(self, lost: torch.Tensor, capacity: int, wait: bool) -> None:
        """Raise `OverrunError` if the device has counted lost tokens.

        Args:
            lost: `LayerState.lost` of a layer, int32 `[B, H]`.
            wait: wait for all queued work. Otherwise the newest known count is used, and a new copy is queued.
        """
        if lost.device.type != "cuda":
            self._raise(int(lost.max()), capacity)
            return
        if torch.cuda.is_current_stream_capturing():  # no copy may be queued while a graph is recorded
            return
        at_once = wait or torch.cuda.current_stream(lost.device).query()  # an idle device has the copy at once
        if self._arrived is not None and (at_once or self._arrived.query()):
            self._look(capacity)
        if self._arrived is None:
            self._ask(lost)
            if at_once:
                self._look(capacity)

    def _ask(self, lost: torch.Tensor) -> None:
        if self._copy is None or self._copy.shape != lost.shape:
            self._copy = torch.zeros(lost.shape, dtype=lost.dtype, pin_memory=True)
        with torch.cuda.device(lost.device):
            self._copy.copy_(lost, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def _look(self, capacity: int) -> None:
        assert self._arrived is not None
        assert self._copy is not None
        self._arrived.synchronize()
        self._arrived = None
        self._raise(int(self._copy.max()), capacity)

    def _raise(self, lost: int, capacity: int) -> None:
        if lost:
            raise OverrunError(_message(capacity, lost))
