"""Progress of long work on standard error: a line at the beginning, and a bar per stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: called with the name of a stage, the number of its steps done, and the number of all its steps
Report = Callable[[str, int, int], None]


def say(text: str, progress: bool | Report | None) -> None:
    """Print a line on standard error, unless `progress` is `False` or `None`."""
    if progress not in (False, None):
        print(text, file=sys.stderr, flush=True)


class LogLines:
    """A `Report` for standard error that is not a terminal. Prints a line when a stage begins, for every 16th and the last
    step, and for other steps if nothing was printed for `SECONDS`."""

    #: longest silence while steps end, seconds
    SECONDS = 10.0

    def __init__(self) -> None:
        self._printed = float("-inf")

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or done % 16 == 0 or now - self._printed >= self.SECONDS:
            self._printed = now
            print(f"{stage} {done}/{total}", file=sys.stderr, flush=True)


@contextmanager
def reporting(progress: bool | Report | None) -> Iterator[Report]:
    """Yields a function to call when a stage begins, with 0 steps done, and after each step.

    Args:
        progress: `True` shows bars if standard error is a terminal. `False` and `None` show nothing. A function is
            yielded itself.
    """
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        yield report
