"""Functions in several processes at once."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

SECONDS = 120


def at_once(*functions: Callable[[], None]) -> None:
    """Run each in a process of its own, and wait for all. Raises `AssertionError` with the tracebacks of those that failed."""
    context = multiprocessing.get_context("fork")
    errors: Any = context.SimpleQueue()

    def run(function: Callable[[], None]) -> None:
        torch.set_num_threads(1)  # a forked process does not have its parent's threads
        try:
            function()
        except BaseException:
            errors.put(traceback.format_exc())
            raise SystemExit(1) from None

    children = [context.Process(target=run, args=(function,)) for function in functions]
    for child in children:
        child.start()
    end = time.monotonic() + SECONDS
    for child in children:
        child.join(max(end - time.monotonic(), 0))
        child.kill()
        child.join()
    if not errors.empty():
        raise AssertionError(errors.get())
    assert [child.exitcode for child in children] == [0] * len(children)
