"""The modules that describe page formats to the CUDA kernels. A new format is one file and one line here.

Such a module has:

- `SIDES`: whether the format is supported for keys, and for values;
- `needs(fmt, head_dim, page_size, dtype, transposed)`, see `needs.Needs` (transposed: values);
- `covers(fmt)`, if it does not support every format of the class;
- `divides(fmt, head_dim, transposed)`, if not every head of more than `needs.WIDEST` channels can be divided among warps.

`Needs` also names the format's C++ files. Kernels include them by macros, so no other source depends on a format.
Importing this needs neither a GPU nor a compiler.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ...formats import Format
from ...formats.affine import Affine
from ...formats.boosted import Boosted
from ...formats.codebook import Codebook
from ...formats.dense import Dense
from ...formats.fp8 import Fp8
from ...formats.fp8_centered import Fp8Centered
from ...formats.static import Static
from ...formats.trellis import Trellis
from . import affine, boosted, codebook, dense, fp8, fp8_centered, static, trellis
from .needs import WIDEST, Needs, slices

KERNELS: dict[type[Format], ModuleType] = {
    Affine: affine,
    Boosted: boosted,
    Codebook: codebook,
    Dense: dense,
    Fp8: fp8,
    Fp8Centered: fp8_centered,
    Static: static,
    Trellis: trellis,
}


def covered(fmt: Format, transposed: bool) -> bool:
    """Whether there are kernels for keys, or for values (transposed), in this format."""
    module = KERNELS.get(type(fmt))
    return module is not None and module.SIDES[transposed] and getattr(module, "covers", lambda fmt: True)(fmt)


def why_not(keys: Format, values: Format, widths: tuple[int, int] | None = None) -> str | None:
    """Why the kernels do not support these formats, or `None`. widths: head_dim of keys and of values; `None`: any."""
    for fmt, transposed, side in ((keys, False, "keys"), (values, True, "values")):
        if not covered(fmt, transposed):
            return f"has no kernels for {side} in format {fmt.name!r} yet"
        if widths is not None and slices(head_dim := widths[transposed]) > 1:
            if not getattr(KERNELS[type(fmt)], "divides", lambda *args: True)(fmt, head_dim, transposed):
                return f"has no kernels for {side} in format {fmt.name!r} with head_dim={head_dim}; allowed: up to {WIDEST}"
    if widths is not None and slices(widths[0]) != slices(widths[1]):
        return f"takes no heads of {widths[0]} and {widths[1]} channels: both or neither may have more than {WIDEST}"
    return None


def needs(fmt: Format, head_dim: int, page_size: int, dtype: torch.dtype, transposed: bool) -> Needs:
    """The needs of the format on one side."""
    if not covered(fmt, transposed):
        raise ValueError(f"format {fmt.name!r} has no CUDA kernels for {'values' if transposed else 'keys'}")
    return KERNELS[type(fmt)].needs(fmt, head_dim, page_size, dtype, transposed)
