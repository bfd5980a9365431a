"""Differences between the supported releases of transformers.

The argument with which transformers passes a cache is `past_key_values` before 5.24, and `cache` since. Users may write either
name where transformers accepts it. This package's own calls use the current name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import GenerationMixin

#: the installed release, e.g. (5, 24)
RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])
#: whether `generate` hands a mask to its decoding steps even if no prompt has padding. From 5.18 on it drops a mask of
#: ones. It cannot be detected before kernels are chosen, so check the version. A wrong value costs time, not correctness:
#: kernels are compiled at the first step
GENERATE_KEEPS_MASKS = RELEASE < (5, 18)
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
