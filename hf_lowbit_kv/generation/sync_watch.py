"""Finds where the CPU waits for the GPU during a step. A CUDA graph cannot contain such waits.

PyTorch warns about waits in a process-wide debug mode, and Python's warning filters are process-wide too. So threads
share both, and a warning is assigned to the thread in which it occurs. If another thread exits a
`warnings.catch_warnings` meanwhile, Python restores the old filters. Then a warning about a wait may be printed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .overriding import ProcessWide

#: beginnings of PyTorch's warnings about a wait, and about the mode itself (once)
_WAITED, _PROTOTYPE = "synchronizing CUDA operation", "Synchronization debug mode is a prototype"
_OWN_PATTERN = f"(?:){_PROTOTYPE}"  # no other code uses this spelling
_WARN = 1  # of torch.cuda.set_sync_debug_mode, "warn"
_watches = threading.local()


class _Waits:
    """Replaces the message pattern in a warning filter. Python calls `match` in the thread that warns, and hides warnings
    that match."""

    def __init__(self, enabled_before: bool):
        self.enabled_before = enabled_before  # then threads that do not watch show these warnings
        self.in_force = True  # a copy of the filters may live longer

    def match(self, message: str) -> bool:
        if not self.in_force:
            return False
        if _WAITED not in message:
            return _PROTOTYPE in message
        if not (watches := getattr(_watches, "locations", [])):
            return not self.enabled_before
        frame: Any = sys._getframe(1)
        for locations in watches:
            locations.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}")
        return True


@contextlib.contextmanager
def _warnings_of_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    waits = _Waits(enabled_before=before == _WARN)
    filters: Any = warnings.filters
    filters.insert(0, ("ignore", waits, Warning, None, 0))
    # `filterwarnings` resets Python's registry of shown warnings; without that, Python drops repeated warnings
    warnings.filterwarnings("ignore", message=_OWN_PATTERN)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if torch.cuda.get_sync_debug_mode() == _WARN:  # otherwise other code has changed the mode
            torch.cuda.set_sync_debug_mode(before)
        waits.in_force = False
        # `warnings.catch_warnings` of any thread may have replaced the list by a copy
        current: Any = warnings.filters
        for each in (filters, current):
            each[:] = [
                item for item in each if item[1] is not waits and getattr(item[1], "pattern", None) != _OWN_PATTERN
            ]


_warned_of = ProcessWide(_warnings_of_waits)


@contextlib.contextmanager
def watch(device: torch.device) -> Iterator[list[str]]:
    """Yields a list to which each wait of this thread for the GPU is added, as `file:line`. Other threads may watch at the
    same time.

    On devices other than NVIDIA and AMD GPUs the list stays empty.
    """
    locations: list[str] = []
    if device.type != "cuda":
        yield locations
        return
    if not hasattr(_watches, "locations"):
        _watches.locations = []
    with _warned_of():
        _watches.locations.append(locations)
        try:
            yield locations
        finally:
            _watches.locations = [other for other in _watches.locations if other is not locations]


def _short(path: str) -> str:
    """A file's path relative to the folder of `sys.path` that contains it."""
    roots = [root for root in sys.path if root and path.startswith(root)]
    return path[len(max(roots, key=len)) :].lstrip("/") if roots else path
