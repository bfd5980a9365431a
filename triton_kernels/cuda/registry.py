"""Which formats the CUDA kernels attend to, and on which side: a new format adds a line here and its structs to `geometry`.

Importing this needs neither a GPU nor a compiler.
"""

from ...formats import Format
from ...formats.affine import Affine
from ...formats.boosted import Boosted
from ...formats.codebook import Codebook
from ...formats.dense import Dense

#: as keys, as values
COVERED: tuple[frozenset[type[Format]], frozenset[type[Format]]] = (
    frozenset({Affine, Boosted, Codebook, Dense}),
    frozenset({Affine, Codebook, Dense}),
)


def why_not(keys: Format, values: Format) -> str | None:
    """What keeps the kernels from these formats, or `None`."""
    for fmt, covered, side in zip((keys, values), COVERED, ("keys", "values"), strict=True):
        if type(fmt) not in covered:
            return f"has no kernels for {side} in format {fmt.name!r} yet"
    return None
