"""Formats from outside the package: `register_format`, and the entry-point group `hf_lowbit_kv.formats`.

Before a format is registered it stores a trial page and reads it back, so that mistakes raise an error instead of garbling
text.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import overload

import torch

from .. import formats
from .base import HEAD_DIMS, Format

#: entry points: a module that registers what it has, or a format's class
GROUP = "hf_lowbit_kv.formats"
#: tokens of the trial page: the default page size
PAGE_SIZE = 128
#: the largest float16, which pages of supported models may contain
LARGEST = 65504.0
#: functions with which decode steps attend directly to packed keys, and to packed values
ATTEND_KEYS = ("prepare", "fetch", "scores")
ATTEND_VALUES = ("fetch", "weigh", "add")
#: number of formats that belong to the package: they come first
BUILT_IN = len(formats.FORMATS)
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
        TypeError: not a frozen dataclass.
        ValueError: another format has the name, `parse` does not return the format of the name or accepts any name, or a trial
            page is not stored and read back. The format is then not registered.

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
    # the class's own settings: those of a base class do not make the fields of this class comparable
    settings = cls.__dict__.get("__dataclass_params__")
    if not dataclasses.is_dataclass(cls) or settings is None or not (settings.frozen and settings.eq):
        raise TypeError(
            f"cls={cls.__name__} must be a frozen dataclass; write @dataclass(frozen=True, repr=False) above the class, below "
            "@register_format"
        )
    example = cls()
    _check_name(cls, example, cls.parse)
    _check_page(example)
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
    if "|" in name or "/" in name:  # they separate names in files
        raise ValueError(f"format name {name!r} is not allowed; it may not hold '|' or '/'")
    if (parsed := parse(name)) != example:
        raise ValueError(f"{cls.__name__}.parse({name!r}) returned {parsed!r}; it must return the format of that name")
    if (parsed := parse("no such format")) is not None:  # a misspelled name would be this format
        raise ValueError(f"{cls.__name__}.parse('no such format') returned {parsed!r}; it must return None")


def without_kernels(chosen: tuple[Format, ...]) -> Format | None:
    """The first of these formats that is from outside the package and has no functions for Triton, or `None`."""
    outside = set(formats.FORMATS[BUILT_IN:]) - TRITON_MODULES.keys()
    return next((fmt for fmt in chosen if type(fmt) in outside), None)


def _check_page(fmt: Format) -> None:
    """Raise `ValueError` if the format cannot store a page and read it back.

    The page has ordinary numbers, a token of zeros, a token of huge numbers, and one huge number among ordinary ones. A
    format with calibrated parameters is not checked, because it cannot encode without them.
    """
    if fmt.has_parameters:
        return
    head_dim = _head_dim(fmt)
    x = torch.randn(2, PAGE_SIZE, head_dim, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 0
    x[0, 7], x[1, 9, 3] = LARGEST, LARGEST
    pages = fmt.encode(x, torch.float16)
    decoded = fmt.decode(pages, head_dim, PAGE_SIZE, torch.float16)
    if decoded.shape != x.shape:
        raise ValueError(
            f"format {fmt.name!r}: decode_arrays returned the shape {tuple(decoded.shape)}; it must be {tuple(x.shape)}"
        )
    if not decoded.isfinite().all():
        raise ValueError(f"format {fmt.name!r}: decode_arrays returned NaN or infinity for a page with {LARGEST:g}")
    if not torch.equal(fmt.encode(x[1:], torch.float16), pages[1:]):
        raise ValueError(
            f"format {fmt.name!r}: encode_arrays gives a page other bytes when another page is encoded with it; bytes must "
            "depend only on the page"
        )
    if fmt.tokenwise:
        changed = x.clone()
        changed[:, 64:] = 1.0
        before, after = (
            fmt.split(fmt.encode(each, torch.float16), head_dim, PAGE_SIZE, torch.float16) for each in (x, changed)
        )
        for name, array in before.items():
            if array.shape[-2] != PAGE_SIZE or not torch.equal(array[..., :64, :], after[name][..., :64, :]):
                raise ValueError(
                    f"format {fmt.name!r} is tokenwise, but its array {name!r} does not have one row for each token that "
                    "depends only on that token"
                )


def _head_dim(fmt: Format) -> int:
    """The first head size that the format supports."""
    for head_dim in HEAD_DIMS:
        try:
            fmt.validate(head_dim, PAGE_SIZE)
        except ValueError as error:
            last_error = error
        else:
            return head_dim
    raise last_error


def load_installed() -> list[str]:
    """Load the formats and presets of installed packages, each once.

    A package announces them in its `pyproject.toml`; the value is a module, or a class after a colon:

        [project.entry-points."hf_lowbit_kv.formats"]
        mine = "my_package.formats"

    A package whose entry point fails is left out with a warning, so that it does not stop commands that do not need it.

    Returns:
        The names of the entry points that work.
    """
    names = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            target = entry.load()
            if isinstance(target, type) and issubclass(target, Format):
                if target not in formats.FORMATS:
                    register_format(target)
            elif not inspect.ismodule(target):
                raise TypeError(f"{entry.value!r} must be a module, or a class derived from hf_lowbit_kv.Format")
        except Exception as error:
            source = f" of {entry.dist.name}" if entry.dist is not None else ""
            warnings.warn(
                f"entry point {entry.name!r}{source} in {GROUP!r} does not load and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            names.append(entry.name)
    return names
