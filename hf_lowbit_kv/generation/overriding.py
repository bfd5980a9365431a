"""Temporary changes: overridden methods of one object, and settings of the process that several threads need.

An override is a module-level function with the name of the method, bound to the object. The object's class and other objects
of the class do not change. A deep copy of the object has the override, bound to the copy. A pickled object has the method of
its class.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from ..storage.process_stamps import ignore_attributes

#: attribute of an object with overrides; it holds the replaced attributes, and the number of users of each override
STATE = "_lowbit_overrides"
ignore_attributes(STATE)
_lock = threading.Lock()


@dataclass
class _Override:
    before: Any
    """the attribute of the object itself that is replaced; `None`: the method of its class is"""
    users: int = 0


class _Overrides(dict[str, _Override]):
    """Overrides by name. A deep copy has its own, and a pickled object has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Overrides:
        return _Overrides({name: copy.deepcopy(override, memo) for name, override in self.items()})

    def __reduce__(self):
        return _Overrides, ()


def put_on(thing: Any, *functions: Callable) -> None:
    """Override the methods of these names on `thing`, until `take_off` is called equally often.

    Args:
        functions: module-level functions; `original` returns the method that a function replaces.
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
    """Undo one `put_on`. If other code has replaced the override since, its replacement stays."""
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
    """Within the context, these functions override methods of `thing`; see `put_on`. Several threads may enter."""
    put_on(thing, *functions)
    try:
        yield
    finally:
        take_off(thing, *functions)


def original(thing: Any, name: str) -> Callable:
    """The method of `thing` that an override replaces: its own earlier attribute, or else the method of its class."""
    override = vars(thing).get(STATE, {}).get(name)
    if override is not None and override.before is not None:
        return override.before
    return getattr(type(thing), name).__get__(thing)


class ProcessWide:
    """A process-wide change that calls in several threads share. The first call makes it, and the last one undoes it.

    If each thread saved and restored the setting, the last thread would restore the setting of another one.

    Args:
        change: factory of a context manager that makes the change and undoes it. The first call enters it. It may be
            entered in one thread and exited in another.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._entered: contextlib.AbstractContextManager | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the context, the change is in force for all threads."""
        with self._lock:
            if self._entered is None:
                entered = self._change()
                entered.__enter__()
                self._entered = entered
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    entered, self._entered = self._entered, None
                    entered.__exit__(None, None, None)
