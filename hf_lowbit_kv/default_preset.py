"""The default preset."""

from typing import Final

#: default of `generate` and `enable`
DEFAULT_PRESET: Final = "kivi-4-sink"
