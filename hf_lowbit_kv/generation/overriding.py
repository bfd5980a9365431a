"""Methods of one object replaced for a while: its class, and every other object of it, stay as they are.

What replaces a method is a function at the top of a module, named like the method. It is bound to the object, so a deep copy of
the object has it bound to the copy, and a pickled object has its class's own method once it is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

#: attribute of an object with overrides: what it had of its own, and how many need them
STATE = "_lowbit_overrides"
_lock = threading.Lock()


@dataclass
class _Override:
    before: Any
    """what the object itself had under this name; `None`: the method of its class"""
    users: int = 0


class _Overrides(dict[str, _Override]):
    """By name. A deep copy has its own, a pickled object none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Overrides:
        return _Overrides({name: copy.deepcopy(override, memo) for name, override in self.items()})

    def __reduce__(self):
        return _Overrides, ()


def put_on(thing: Any, *functions: Callable) -> None:
    """Let `thing` have these functions as methods, under their names, until `take_off` was called as often.

    Args:
        functions: at the top of a module; `original` gives them the method that they stand for.
    """
    with _lock:
        attributes = vars(thing)
        overrides = attributes.setdefault(STATE, _Overrides())
        for function in functions:
            name = function.__name__
            if name not in overrides:
                overrides[name] = _Override(attributes.get(name))
                attributes[name] = MethodType(function, thing)
            overrides[name].users += 1


def take_off(thing: Any, *functions: Callable) -> None:
    """Undo one `put_on`. What somebody else has put in the place of a function meanwhile stays."""
    with _lock:
        attributes = vars(thing)
        overrides = attributes.get(STATE, {})
        for function in functions:
            name = function.__name__
            if name not in overrides:  # a pickled object has none
                continue
            overrides[name].users -= 1
            if overrides[name].users:
                continue
            before = overrides.pop(name).before
            if getattr(attributes.get(name), "__func__", None) is function:
                del attributes[name]
                if before is not None:
                    attributes[name] = before
        if not overrides:
            attributes.pop(STATE, None)


@contextlib.contextmanager
def overridden(thing: Any, *functions: Callable) -> Iterator[None]:
    """Inside, `thing` has these functions as methods; see `put_on`. Threads may be inside at the same time."""
    put_on(thing, *functions)
    try:
        yield
    finally:
        take_off(thing, *functions)


def original(thing: Any, name: str) -> Callable:
    """The method of `thing` that an override stands for: what the object had of its own, else that of its class."""
    override = vars(thing).get(STATE, {}).get(name)
    if override is not None and override.before is not None:
        return override.before
    return getattr(type(thing), name).__get__(thing)
