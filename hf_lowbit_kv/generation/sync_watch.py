"""Whether a step waits for the GPU: a CUDA graph cannot contain such waits."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .overriding import ProcessWide

#: PyTorch's warnings about a wait, and about the mode that reports waits
_PATTERN = "called a synchronizing CUDA operation|Synchronization debug mode is a prototype"
_thread = threading.local()


@contextlib.contextmanager
def _waits_noted() -> Iterator[None]:
    """PyTorch warns of waits, and Python calls `note` in the thread that waits. Threads that do not watch see no such warning
    meanwhile."""

    def note(message: Any, *more: Any, **options: Any) -> None:
        if str(message).startswith("called a synchronizing"):
            _thread.waited = True
        elif not str(message).startswith("Synchronization debug mode"):
            show(message, *more, **options)

    show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()
    warnings.showwarning = note
    warnings.filterwarnings("always", _PATTERN)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        filters: Any = warnings.filters
        filters[:] = [each for each in filters if getattr(each[1], "pattern", None) != _PATTERN]
        if warnings.showwarning is note:
            warnings.showwarning = show


_noting = ProcessWide(_waits_noted)


@contextlib.contextmanager
def watch(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether this thread has waited for the GPU since. Other threads may watch too."""
    _thread.waited = False
    with _noting() if device.type == "cuda" else contextlib.nullcontext():
        yield lambda: _thread.waited
