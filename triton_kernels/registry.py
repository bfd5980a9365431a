"""Which module holds the device functions of a page format: a new format is one file and one line here.

Such a module offers (all but `params` are `@triton.jit` functions; `page` points to the first byte of the format's part of a
page of one KV head, `P` is what `params` returned, `n0` the first token of the tile inside the page):

- `params(fmt, head_dim, page_size, dtype, ptx)`: a NamedTuple of numbers and strings, a constant of the compilation. The
  attend kernel itself reads `planes`, `width` (channels a plane), `padded` (the next power of two, 16 at least), `units`
  (factor that brings a plane of the accumulator to true size) and `max_block` (largest tile of tokens).
- `prepare(q_rows, stride, rows_valid, DOT, P)`: the queries as `scores` wants them, a tuple of tensors.
- `scores(page, prepared, n0, valid, factor, DOT, BLOCK_N, P)`: float32 `[M, BLOCK_N]`, `factor * q.k`.
- `weigh(page, s, n0, valid, BLOCK_N, P)`: `(s', inverse, zero)`. Weights are taken of s', scores plus the binary logarithm of
  what the format multiplies a token's values with; `inverse` and `zero`, `[BLOCK_N]` or numbers, are what those weights count
  for in the sum of weights and in the offset common to all channels.
- `add(page, weights, decay, acc, n0, valid, DOT, BLOCK_N, P)`: `acc * decay` plus the weighted values, plane by plane.
- `encode(part, source, start, stop, ROWS, P, ...)`: store the page's tokens `start` to `stop`.
- `decode(page, n0, valid, j, BLOCK_N, P)`: plane `j` of a tile of tokens, float32 `[BLOCK_N, padded]`.
"""

from types import ModuleType

from ..formats import Format
from ..formats.affine import Affine
from ..formats.dense import Dense
from . import affine, dense

KERNELS: dict[type[Format], ModuleType] = {
    Affine: affine,
    Dense: dense,
}


def kernels(fmt: Format) -> ModuleType:
    """The module for `fmt`."""
    try:
        return KERNELS[type(fmt)]
    except KeyError:
        names = sorted(cls.__name__ for cls in KERNELS)
        raise NotImplementedError(
            f"format {fmt.name!r} has no Triton kernels; formats with kernels: {names}. Use backend='torch'."
        ) from None
