"""The name of the argument with which transformers passes a cache: `past_key_values` before 5.24, `cache` since.

Users may write either name where transformers accepts it. This package's own calls use the current name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin

#: every name that transformers has had for it
NAMES = ("cache", "past_key_values")
#: the current one
NAME = NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]


def as_argument(cache: Any) -> dict[str, Any]:
    """`{name: cache}`, for `model(**as_argument(cache))`."""
    return {NAME: cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments or outputs of a model; `None` if there is none."""
    return arguments.get(NAME)
