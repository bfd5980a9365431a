"""The modules with the device functions of page formats. `docs/add-a-format.md` describes how to add one.

Such a module has `params`, `encode` and `decode`. With these only, a step unpacks the history in stretches (`prompt`).
With the other functions below, decode steps attend directly to packed pages.

All functions but `params` are `@triton.jit` functions. `page` points to the first byte of the format's part of a page
of one KV head. `record` points to the head's parameters (`records.Parametrized.record_fields` has their offsets). `n0`
is the tile's first token, counted inside the page. `valid` `[BLOCK_N]` marks tokens in use; the others may be
NaN. `P` is the result of `params`. `T` is the tile's orientation (`common`).

- `params(fmt, head_dim, page_size, dtype, ptx)`: a NamedTuple of numbers and strings, a compile-time constant.
  Templates read: `planes`; `width` (channels of a plane); `padded` (the next power of two, at least 16); `units` (the
  factor that turns a plane of the accumulator into the true sum); `interleaved` (see `common.plane_channels`); `offset`
  (whether `weigh` returns one); `max_block` (largest tile of tokens); `encode_rows` (tokens that `encode` takes at a
  time); `gathers` (whether `scores` and `add` gather from shared memory, which needs two warps: `config`).
- `prepare(q_rows, stride, rows_valid, DOT, T, P)`: the queries in the form that `scores` needs, a tuple of tensors.
- `fetch(page, n0, valid, BLOCK_N, P)`: a tuple of a tile's per-token numbers, loaded one tile ahead.
- `scores(page, record, prepared, fetched, n0, valid, factor, DOT, BLOCK_N, T, P)`: float32 scores, `factor * q.k`.
- `weigh(page, fetched, s, n0, valid, BLOCK_N, T, P)`: `(s', inverse, offset)`. Weights are computed from s'. It is s
  plus the binary logarithm of the factor by which the format multiplies a token's values. A weight times `inverse` is
  its contribution to the sum of weights; a weight times `offset` is its contribution to the offset of all channels. Both
  are numbers, or have one number per token.
- `add(page, record, weights, decay, acc, n0, valid, DOT, BLOCK_N, T, P)`: `acc * decay` plus the weighted values, per
  plane.
- `encode(page, record, source, start, stop, base, ROWS, HAS_ORDER, TAIL, P)`: store tokens `start` to `stop` of the
  page, whose first token has index `base`. `common.load_tokens` describes `source`.
- `decode(page, record, n0, valid, j, BLOCK_N, P)`: plane `j` of a tile of tokens, float32 `[BLOCK_N, padded]`.
"""

import importlib
from collections.abc import Iterable
from types import ModuleType

from ..formats import Format, registered
from ..formats.affine import Affine
from ..formats.boosted import Boosted
from ..formats.codebook import Codebook
from ..formats.dense import Dense
from ..formats.fp8 import Fp8
from ..formats.fp8_centered import Fp8Centered
from ..formats.fragment import LAYOUTS
from ..formats.static import Static
from ..storage.layer_spec import LayerSpec

#: names of modules, here and below. Only the modules of a cache's formats are imported, because Triton reads the source of
#: each function at import: all of them take 0.15 s
KERNELS: dict[type[Format], str] = {
    Affine: ".affine",
    Boosted: ".boosted",
    Codebook: ".codebook",
    Dense: ".dense",
    Fp8: ".fp8",
    Fp8Centered: ".fp8_centered",
    Static: ".static",
}

#: for pages that other kernels attend to (layouts of `formats.fragment`): modules with `params` and `decode` only
READERS: dict[type[Format], str] = {
    Affine: ".fragment",
    Boosted: ".boosted_fragment",
    Codebook: ".codebook",
    Fp8: ".fp8_fragment",
    Fp8Centered: ".fp8_fragment",
    Static: ".static_fragment",
}


def reader(fmt: Format) -> ModuleType:
    """The module with `decode` for pages of `fmt`, in any layout."""
    return _imported(READERS[type(fmt)]) if fmt.layout in LAYOUTS else kernels(fmt)


def attends_packed(spec: LayerSpec) -> bool:
    """Whether the attend kernel can read the layer's pages: the formats of keys and values have the functions for it."""
    if spec.attention_kind.shares_values:
        return False
    keys, values = (kernels(fmt) for fmt in spec.formats)
    return all(hasattr(keys, name) for name in registered.ATTEND_KEYS) and all(
        hasattr(values, name) for name in registered.ATTEND_VALUES
    )


def why_not(formats: Iterable[Format]) -> str | None:
    """Why the kernels cannot serve these formats, or `None`."""
    for fmt in formats:
        module = _module(fmt)
        if module is None or not getattr(module, "covers", lambda fmt: True)(fmt):
            return f"cannot serve: {_no_kernels(fmt)}"
    return None


def _no_kernels(fmt: Format) -> str:
    names = sorted(cls.__name__ for cls in KERNELS)
    return f"format {fmt.name!r} has no Triton kernels; formats with kernels: {names}. Use backend='torch'."


def kernels(fmt: Format) -> ModuleType:
    """The module for `fmt`."""
    if (module := _module(fmt)) is None:
        raise ValueError(_no_kernels(fmt))
    return module


def _module(fmt: Format) -> ModuleType | None:
    """The module of a format, of this package or from outside (`register_format`)."""
    if (name := KERNELS.get(type(fmt))) is not None:
        return _imported(name)
    return registered.TRITON_MODULES.get(type(fmt))


def _imported(name: str) -> ModuleType:
    return importlib.import_module(name, __package__)
