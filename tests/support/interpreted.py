"""The tests of Triton kernels that run in its interpreter: processes of their own, in parts that run side by side.

The tests for the interpreter have "small" in their names.
"""

from __future__ import annotations

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
