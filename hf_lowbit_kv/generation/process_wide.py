"""What a whole process has once and several threads need at the same time: the first of them sets it, the last restores it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class ProcessWide:
    """A change of the process that calls of several threads share: made by the first that comes, undone by the last that goes.

    Each thread for itself would save and restore it, and the one that leaves last would restore what another has set.

    Args:
        change: makes the change and undoes it; called and entered anew by each first user. It may be entered in one thread and
            left in another.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._entered: contextlib.AbstractContextManager | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the change is in force, for every thread."""
        with self._lock:
            if self._entered is None:
                entered = self._change()
                entered.__enter__()
                self._entered = entered
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    entered, self._entered = self._entered, None
                    entered.__exit__(None, None, None)
