"""Where the CPU waits for the GPU during a step: what a CUDA graph cannot do.

PyTorch warns of such waits in one mode of the whole process, and Python's filters of warnings belong to the whole process too.
So threads share both, and a warning is told apart by the thread that it comes in.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .process_wide import ProcessWide

#: what PyTorch's warnings say of a wait, and of the mode itself, once
_WAITED, _PROTOTYPE = "synchronizing CUDA operation", "Synchronization debug mode is a prototype"
_OWN_PATTERN = f"(?:){_PROTOTYPE}"  # nobody else spells it so
_WARN = 1  # of torch.cuda.set_sync_debug_mode, "warn"
_watches = threading.local()


class _Waits:
    """Stands in a filter of warnings in place of the pattern of a message. Python asks it in the thread that warns, and does
    not show what it matches."""

    def __init__(self, shown: bool):
        self.shown = shown  # to threads that watch nothing: somebody had asked for these warnings before
        self.in_force = True  # a copy of the filters may live longer

    def match(self, message: str) -> bool:
        if not self.in_force:
            return False
        if _WAITED not in message:
            return _PROTOTYPE in message
        if not (watches := getattr(_watches, "places", [])):
            return not self.shown
        frame: Any = sys._getframe(1)
        for places in watches:
            places.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}")
        return True


@contextlib.contextmanager
def _warnings_of_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    waits = _Waits(shown=before == _WARN)
    filters: Any = warnings.filters
    filters.insert(0, ("ignore", waits, Warning, None, 0))
    # added by the front door: Python then also asks about warnings that it has shown once and would not repeat
    warnings.filterwarnings("ignore", message=_OWN_PATTERN)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if torch.cuda.get_sync_debug_mode() == _WARN:  # else somebody else has chosen meanwhile
            torch.cuda.set_sync_debug_mode(before)
        waits.in_force = False
        # `warnings.catch_warnings` of any thread may have put a copy in the place of the list
        current: Any = warnings.filters
        for each in (filters, current):
            each[:] = [
                item for item in each if item[1] is not waits and getattr(item[1], "pattern", None) != _OWN_PATTERN
            ]


_warned_of = ProcessWide(_warnings_of_waits)


@contextlib.contextmanager
def watch(device: torch.device) -> Iterator[list[str]]:
    """A list of the places (`file:line`) where this thread waits for the GPU inside. Other threads may watch at the same time.

    On other devices than NVIDIA's and AMD's the list stays empty.
    """
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    if not hasattr(_watches, "places"):
        _watches.places = []
    with _warned_of():
        _watches.places.append(places)
        try:
            yield places
        finally:
            _watches.places = [other for other in _watches.places if other is not places]


def _short(path: str) -> str:
    """A file's path below the folder that Python found it in."""
    roots = [root for root in sys.path if root and path.startswith(root)]
    return path[len(max(roots, key=len)) :].lstrip("/") if roots else path
