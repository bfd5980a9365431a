"""The tests of Triton kernels that run in its interpreter: processes of their own, in parts that run side by side.

The tests for the interpreter have "small" in their names.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence

#: processes that the slow tests for the interpreter are dealt out to; the fast ones run in one, which imports once
PARTS = 2


def run_part(files: Sequence[str], part: int, parts: int = PARTS, slow: bool = False) -> None:
    """Run every `parts`-th of the files' tests for the interpreter, those that are slow or the others. All must pass, and none
    may be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "small", *files]
    command += ["-m", "slow" if slow else "not slow"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TEST_PART": f"{part}/{parts}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = {
        what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])
    }
    assert counted.get("passed", 0) > 0
    assert "skipped" not in counted, done.stdout[-3000:]


def save_repetitions() -> None:
    """Triton's interpreter, without what it does again and again: a process of the interpreter calls this once.

    At each call of a function inside a kernel, the interpreter looks through all of Triton's language for operations to
    replace, although they have been replaced since the launch began. And for each value it builds the table of dtypes again.
    Both together are a third of its time.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtype_of, dtypes = interpreter._get_np_dtype, {}
    replaced: set[int] = set()  # during one launch: the modules whose names for the language were looked through

    def patch_once(fn):
        if id(fn.__globals__) in replaced:
            return None  # nothing uses it: a launch restores what it replaced itself
        replaced.add(id(fn.__globals__))
        return patch(fn)

    @functools.wraps(launch)
    def launch_anew(self, *args, **kwargs):
        replaced.clear()
        return launch(self, *args, **kwargs)

    def by_name(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return dtype_of(dtype)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = dtype_of(dtype)
        return dtypes[scalar.name]

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = by_name
