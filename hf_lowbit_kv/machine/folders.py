"""Where this package keeps files: calibrations, compiled kernels, and the bundled model."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

#: environment variable: the folder of everything that is kept on disk, in place of the user's cache folder; empty is unset
VARIABLE = "HF_LOWBIT_KV_CACHE"


def cache_root() -> Path:
    """The folder that has a subfolder for each kind of file; it need not exist."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("hf-lowbit-kv"))
