"""The command `hf-lowbit-kv`. Results go to standard output, progress and errors to standard error.

The files of this folder declare the options. They import torch, transformers and whatever brings them inside functions
only, so help, `--version` and `presets` come at once.
"""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> None:
    """Run the command and exit: 0 if it worked, 1 for an error that its message explains, 2 for wrong options, 130 after
    Ctrl-C."""
    try:
        from .application import run

        run(args)
    except KeyboardInterrupt:  # while the files of this folder are imported; later typer does the same
        sys.exit(130)
