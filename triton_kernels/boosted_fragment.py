"""Reads pages of `formats.boosted` in layout `fragment-1`: `fragment` reads both of their planes of codes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import fragment
from .boosted import mapped
from .common import padded_width
from .fragment import load_codes


class Params(NamedTuple):
    bits: int
    head_dim: int
    #: parameters of the plane of all channels
    loads: int
    vector: int
    #: boosted channels; columns of their plane, that number padded, and the plane's loads
    count: int
    columns: int
    rows: int
    high_loads: int
    high_vector: int
    #: bytes from the start of the part
    high_at: int
    map_at: int
    scale_at: int
    zero_at: int
    width: int
    padded: int
    max_block: int
    planes: int = 1
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    at = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    columns = fmt.columns(head_dim)
    _, loads, _, vector = fragment.shape(fmt.bits, head_dim, page_size)
    _, high_loads, _, high_vector = fragment.shape(fmt.bits, columns, page_size)
    return Params(
        bits=fmt.bits,
        head_dim=head_dim,
        loads=loads,
        vector=vector,
        count=fmt.boosted(head_dim),
        columns=columns,
        rows=padded_width(max(columns, 1)),
        high_loads=high_loads,
        high_vector=high_vector,
        high_at=at["high"],
        map_at=at["map"],
        scale_at=at["scale"],
        zero_at=at["zero"],
        width=head_dim,
        padded=padded_width(head_dim),
        max_block=page_size,
    )


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    token = n0 + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, P.padded)
    keep = channel < P.head_dim
    code = load_codes(page, token, channel, keep, P.head_dim, P.bits, P.loads, P.vector, False)
    if P.count > 0:
        # the channel's column in the second plane, if it has one
        row = tl.arange(0, P.rows)[None, :]
        same = ((mapped(page, row, P) == channel[:, None]) & (row < P.count)).to(tl.int32)
        boosted = tl.sum(same, 1) > 0
        # the map of a page without tokens may name a channel twice
        column = tl.minimum(tl.sum(same * row, 1), P.count - 1)
        high = load_codes(
            page + P.high_at, token, column, boosted, P.columns, P.bits, P.high_loads, P.high_vector, False
        )
        code += high << P.bits
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
    zero = tl.load((page + P.zero_at).to(tl.pointer_type(tl.float16)) + channel, mask=keep, other=0.0)
    return code.to(tl.float32) * scale.to(tl.float32)[None, :] + zero.to(tl.float32)[None, :]
