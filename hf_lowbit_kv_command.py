"""The console script `hf-lowbit-kv`. It answers `--help` and wrong options without torch and transformers.

The command is a part of the package `hf_lowbit_kv`, which registers its attention with transformers when it is imported.
That takes seconds. So while this module says `only_options`, importing the package imports nothing. A command that runs calls
`import_package` first.
"""

from __future__ import annotations

import importlib
import sys

only_options = True


def main() -> None:
    """Run the command, and exit."""
    from hf_lowbit_kv.cli import main as run

    run()


def import_package() -> None:
    """Import what `import hf_lowbit_kv` imports in other programs."""
    global only_options
    if only_options:
        only_options = False
        importlib.reload(sys.modules["hf_lowbit_kv"])
