"""Settings of the whole process that several threads need at the same time: the first thread sets them, the last
restores them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class ProcessWide:
    """A change of the process that calls in several threads share. The first one makes it, and the last one undoes it.

    If each thread saved and restored the setting by itself, the last one would restore what another thread had set.

    Args:
        change: a context manager factory that makes the change and undoes it. Each first user calls and enters it. It
            may be entered in one thread and left in another.
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
