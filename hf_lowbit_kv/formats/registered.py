"""Formats from outside the package: `register_format`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import overload

from .. import formats
from .base import Format
from .trial_page import check_page

#: functions that Triton's kernels need from a format's module, see `triton_kernels/registry.py`
NEEDED = ("params", "encode", "decode")
#: functions with which decode steps attend directly to packed keys, and to packed values
ATTEND_KEYS = ("prepare", "fetch", "scores")
ATTEND_VALUES = ("fetch", "weigh", "add")
#: number of formats that belong to the package: they come first
BUILT_IN = len(formats.FORMATS)
#: names that a format from outside must not parse
FOREIGN_NAMES = (
    "dense",
    "int4-channel",
    "int2-token-g32",
    "boosted2-r0.25",
    "vq-d4b8",
    "fp8",
    "static-44422000",
    "trellis-2",
    "no such format",
)
#: Triton's device functions of formats from outside
TRITON_MODULES: dict[type[Format], ModuleType] = {}


@overload
def register_format(cls: type[Format], triton: ModuleType | None = None) -> type[Format]: ...
@overload
def register_format(cls: None = None, triton: ModuleType | None = None) -> Callable[[type[Format]], type[Format]]: ...
def register_format(
    cls: type[Format] | None = None, triton: ModuleType | None = None
) -> type[Format] | Callable[[type[Format]], type[Format]]:
    """Register a page format under the names that its `parse` accepts.

    It is also a decorator: `@register_format`, or `@register_format(triton=module)`. `docs/add-a-format.md` has an example. A
    format without kernels runs on a GPU in plain PyTorch, which is slow; the cache warns once.

    Args:
        cls: a frozen dataclass derived from `Format`. Its class method `parse(name)` returns an instance, or `None` for
            names of other formats. All fields must have defaults.
        triton: a module with the format's functions for Triton: `params`, `encode` and `decode`, and more to attend to
            packed pages (see `triton_kernels/registry.py`); `None`: there are none.

    Returns:
        `cls`; without `cls`, a decorator.

    Raises:
        TypeError: not a class derived from `Format`, not a frozen dataclass, or a field without a default.
        ValueError: another format has the name, `parse` does not return the format of the name or accepts names of other
            formats, a trial page is not stored and read back as `arrays` declares, or the module lacks a function. The
            format is then not registered.

    Example:
        >>> from dataclasses import dataclass
        >>> @lb.register_format
        ... @dataclass(frozen=True, repr=False)
        ... class Half(lb.Format):
        ...     name = "half"
        ...     @classmethod
        ...     def parse(cls, name):
        ...         return cls() if name == "half" else None
        ...     def arrays(self, head_dim, page_size, dtype):
        ...         return [("codes", torch.float16, (page_size, head_dim))]
        ...     def encode_arrays(self, x, parameters=()):
        ...         return {"codes": x.half()}
        ...     def decode_arrays(self, arrays, head_dim, parameters=()):
        ...         return arrays["codes"].float()
        >>> cache = lb.LowBitCache(model, "half", "int4-token")
    """
    if cls is None:
        return functools.partial(register_format, triton=triton)
    if not (isinstance(cls, type) and issubclass(cls, Format)):
        raise TypeError(f"cls={cls!r} is not allowed; it must be a class derived from hf_lowbit_kv.Format")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise TypeError(f"cls={cls.__name__} cannot be registered; it does not define {missing}")
    # the class's own settings: those of a base class do not make the fields of this class comparable
    settings = cls.__dict__.get("__dataclass_params__")
    if not dataclasses.is_dataclass(cls) or settings is None or not (settings.frozen and settings.eq):
        raise TypeError(
            f"cls={cls.__name__} must be a frozen dataclass; write @dataclass(frozen=True, repr=False) above the class, below "
            "@register_format"
        )
    if not callable(parse := getattr(cls, "parse", None)):
        raise ValueError(f"cls={cls.__name__} has no class method parse(name)")
    try:
        example = cls()
    except TypeError as error:
        raise TypeError(f"cls={cls.__name__} must have a default for each of its fields: {error}") from None
    _check_name(cls, example, parse)
    check_page(example)
    if triton is not None and (lacking := [name for name in NEEDED if not hasattr(triton, name)]):
        raise ValueError(f"triton={triton.__name__!r} has no {lacking[0]!r}; it must have {', '.join(NEEDED)}")
    for last, together in (("scores", ATTEND_KEYS), ("add", ATTEND_VALUES)):
        lacking = [name for name in together if not hasattr(triton, name)]
        if triton is not None and hasattr(triton, last) and lacking:
            raise ValueError(
                f"triton={triton.__name__!r} has {last!r} and no {lacking[0]!r}; to attend to packed pages it must have "
                f"{', '.join(together)}"
            )
    formats.FORMATS.append(cls)
    if triton is not None:
        TRITON_MODULES[cls] = triton
    formats.forget_names()
    return cls


def _check_name(cls: type[Format], example: Format, parse: Callable[[str], Format | None]) -> None:
    """Raise `ValueError` if names do not distinguish this format from the others."""
    name = example.name
    for other in formats.FORMATS:
        if other is cls or other.parse(name) is not None:  # type: ignore[attr-defined]
            raise ValueError(f"format name {name!r} is taken by the registered class {other.__name__}")
    for separator in "|/":
        if separator in name:
            raise ValueError(f"format name {name!r} is not allowed; it may not hold {separator!r}")
    if (parsed := parse(name)) != example or type(parsed) is not cls:
        raise ValueError(f"{cls.__name__}.parse({name!r}) returned {parsed!r}; it must return the format of that name")
    for taken in FOREIGN_NAMES:
        try:
            parsed = parse(taken)
        except Exception as error:
            raise ValueError(
                f"{cls.__name__}.parse({taken!r}) raised {type(error).__name__}: {error}; it must return None for names of "
                "other formats"
            ) from error
        if parsed is not None:
            raise ValueError(
                f"{cls.__name__}.parse({taken!r}) returned {parsed!r}; it must return None: not its own name"
            )


def without_kernels(chosen: tuple[Format, ...]) -> Format | None:
    """The first of these formats that is from outside the package and has no functions for Triton, or `None`."""
    outside = set(formats.FORMATS[BUILT_IN:]) - TRITON_MODULES.keys()
    return next((fmt for fmt in chosen if type(fmt) in outside), None)
