"""A trial page that a new format stores and reads back before it is registered, so that mistakes raise an error instead of
garbling text."""

from __future__ import annotations

from typing import Any

import torch

from .base import HEAD_DIMS, Format

#: tokens of the trial page: the default page size
PAGE_SIZE = 128
#: the largest float16, which pages of supported models may contain
LARGEST = 65504.0


def check_page(fmt: Format) -> None:
    """Raise `ValueError` if the format cannot store a page and read it back.

    The page has ordinary numbers, a token of zeros, a token of huge numbers, and one huge number among ordinary ones. For a
    format with calibrated parameters only the list of arrays is checked, because it cannot encode without them.
    """
    head_dim = _head_dim(fmt)
    check_arrays(fmt, head_dim)
    if fmt.has_parameters:
        return
    x = torch.randn(2, PAGE_SIZE, head_dim, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 0
    x[0, 7], x[1, 9, 3] = LARGEST, LARGEST
    pages = _call(fmt, "encode", x, torch.float16)
    decoded = _call(fmt, "decode", pages, head_dim, PAGE_SIZE, torch.float16)
    if decoded.shape != x.shape:
        raise ValueError(
            f"format {fmt.name!r}: decode_arrays returned the shape {tuple(decoded.shape)}; it must be {tuple(x.shape)}"
        )
    if not decoded.isfinite().all():
        raise ValueError(
            f"format {fmt.name!r}: decode_arrays returned NaN or infinity for a page with a number of {LARGEST:g}; decoded "
            "numbers must be finite"
        )
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


def check_arrays(fmt: Format, head_dim: int) -> None:
    """Raise `ValueError` if `arrays` is not a list of names, dtypes and shapes that includes codes."""
    listed: Any = _call(fmt, "arrays", head_dim, PAGE_SIZE, torch.float16)
    for entry in listed:
        name, dtype, shape = entry if isinstance(entry, (tuple, list)) and len(entry) == 3 else (None, None, None)
        sizes = isinstance(shape, tuple) and all(isinstance(n, int) and n > 0 for n in shape)
        if not (isinstance(name, str) and isinstance(dtype, torch.dtype) and sizes):
            raise ValueError(
                f"format {fmt.name!r}: arrays lists {entry!r}; each entry must be (name, torch.dtype, tuple of sizes)"
            )
    names = [name for name, _, _ in listed]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"format {fmt.name!r}: arrays lists {name!r} twice; names must differ")
    if not set(names) & set(fmt.code_arrays):
        raise ValueError(
            f"format {fmt.name!r}: none of its arrays ({', '.join(names)}) holds codes; name one 'codes', or list the names "
            "in the class attribute code_arrays"
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
    raise ValueError(f"format {fmt.name!r} takes no head_dim of {HEAD_DIMS}: {last_error}")


def _call(fmt: Format, method: str, *arguments: Any) -> Any:
    """The result of a method of the format. Any error becomes a `ValueError` that names the format and the method."""
    try:
        return getattr(fmt, method)(*arguments)
    except Exception as error:
        if str(error).startswith(f"format {fmt.name!r}"):  # the message of `Format` names the cause
            raise
        raise ValueError(
            f"format {fmt.name!r}: {method} failed on a trial page: {type(error).__name__}: {error}"
        ) from error
