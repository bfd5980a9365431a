"""Functions in several processes at once, and programs in fresh ones."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SECONDS = 120


def free_port() -> int:
    """Of this machine. Another process may take it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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


#: arguments: what all programs find imported, and then a file for what each program prints, and its text
_FORKS = """
import os, sys
exec(sys.argv[1])
for name, code in zip(sys.argv[2::2], sys.argv[3::2]):
    if os.fork() == 0:
        with open(name, "w") as out:
            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        exec(code, {"__name__": "__main__"})
        print("done", flush=True)
        os._exit(0)
    os.wait()
"""


def printed_in_forks(imports: str, *programs: str) -> list[str]:
    """What these programs print, "done" in the last line, each in a fork of one new process that has done these imports: they
    take longer than most programs."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(number)) for number in range(len(programs))]
        arguments = [each for pair in zip(files, programs, strict=True) for each in pair]
        subprocess.run([sys.executable, "-c", _FORKS, imports, *arguments], timeout=300)
        return [Path(file).read_text() for file in files]
