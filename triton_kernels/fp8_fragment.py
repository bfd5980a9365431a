"""Reads pages of `formats.fp8` and `formats.fp8_centered` in the layouts of `formats.fragment`. `fragment` does this for
other formats."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import fragment
from .common import padded_width
from .fp8 import from_e4m3
from .fragment import load_codes


class Params(NamedTuple):
    head_dim: int
    #: whether rows of an operand are channels (values), or tokens (keys)
    transposed: bool
    #: loads of `vector` words that a lane's part of a segment consists of
    loads: int
    vector: int
    scale_at: int
    #: byte at which a page's centers begin; -1: it has none
    center_at: int
    width: int
    padded: int
    max_block: int
    planes: int = 1
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    _, loads, _, vector = fragment.shape(8, head_dim, page_size)
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    return Params(
        head_dim=head_dim,
        transposed=fmt.layout == fragment.LAYOUTS[1],
        loads=loads,
        vector=vector,
        scale_at=at["scale"],
        center_at=at.get("center", -1),
        width=head_dim,
        padded=padded_width(head_dim),
        max_block=page_size,
    )


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    token = n0 + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, P.padded)
    keep = channel < P.head_dim
    code = load_codes(page, token, channel, keep, P.head_dim, 8, P.loads, P.vector, P.transposed, True)
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float32)) + token)
    x = from_e4m3(code.to(tl.int16)) * scale[:, None]
    if P.center_at >= 0:
        center = tl.load((page + P.center_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
        x += center.to(tl.float32)[None, :]
    return x
