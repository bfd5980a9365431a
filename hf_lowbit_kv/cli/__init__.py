"""The command `hf-lowbit-kv`. Results go to standard output, progress and errors to standard error.

The files of this folder declare the options. They import torch, transformers and modules that need them only inside
functions, so help and `--version` are fast.
"""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with status 0 for success, 1 for an error with a message, 2 for wrong options, or 130 after
    Ctrl-C."""
    try:
        from .application import run

        run(args)
    except KeyboardInterrupt:  # while the files of this folder are imported; later typer does the same
        sys.exit(130)
