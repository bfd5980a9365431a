"""Process-wide settings that several threads need at the same time: the first thread sets them, the last restores them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class ProcessWide:
    """A process-wide change that calls in several threads share. The first call makes it, and the last one undoes it.

    If each thread saved and restored the setting, the last thread would restore the setting of another one.

    Args:
        change: factory of a context manager that makes the change and undoes it. The first call enters it. It may be
            entered in one thread and exited in another.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._entered: contextlib.AbstractContextManager | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the change is in force for all threads."""
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
