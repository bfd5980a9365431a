"""Kinds of values that settings may have."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """Values that pass a test. text: which these are, for messages."""

    test: Callable[[Any], bool]
    text: str

    def __contains__(self, value: Any) -> bool:
        return self.test(value)

    def __str__(self) -> str:
        return self.text

    def or_(self, other: int | str) -> Allowed:
        """These values and another one."""
        return Allowed(
            lambda value: (type(value) in (type(other), float) and value == other) or value in self,
            f"{other!r}, or {self}",
        )


SWITCH = Allowed(lambda value: isinstance(value, bool), "True or False")


def number(low: float = 0, high: float = math.inf, whole: bool = False) -> Allowed:
    kind = "an integer" if whole else "a number"
    most = min(high, sys.float_info.max)  # neither NaN nor beyond the range of floats
    return Allowed(
        lambda value: (
            isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and low <= value <= most
        ),
        f"{kind} of {low} or more" if math.isinf(high) else f"{kind} from {low} to {high}",
    )


def list_of(kind: Allowed, most: float = math.inf) -> Allowed:
    """Lists of up to `most` values of a kind, at least one."""
    many = "" if math.isinf(most) else f" of at most {most}"
    return Allowed(
        lambda value: (
            isinstance(value, (list, tuple)) and 0 < len(value) <= most and all(each in kind for each in value)
        ),
        f"a list{many}, each {kind}",
    )


def one_or_list_of(kind: Allowed, most: float = math.inf) -> Allowed:
    several = list_of(kind, most)
    return Allowed(lambda value: value in kind or value in several, f"{kind}, or {several}")


def text(longest: float = math.inf) -> Allowed:
    """Texts that are not empty. longest: in characters."""
    return Allowed(
        lambda value: isinstance(value, str) and 0 < len(value) <= longest,
        "a non-empty text" if math.isinf(longest) else f"a text of 1 to {longest} characters",
    )
