"""Where this package keeps files: calibrations, compiled kernels, and the bundled model."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

#: environment variable for the folder of all kept files, instead of the user's cache folder; an empty value counts as
#: unset
VARIABLE = "HF_LOWBIT_KV_CACHE"


def cache_root() -> Path:
    """The folder that has a subfolder for each kind of file. It need not exist."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("hf-lowbit-kv"))
