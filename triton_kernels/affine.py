"""Device functions of `formats.affine`, layout `planar-1`. The interface is described in `registry`.

Codes are never converted. The bits of field `j`, masked but not shifted to the bottom, are read as float16: the
subnormal number `code * 2^position * 2^-24`. It is exact, and tensor cores multiply it at full speed. The power of two
is folded into q for keys, and into the accumulator's unit for values. A 16-bit word holds the fields of its low byte in
place. The fields of its high byte need one shift first. The largest field, 0x00ff, is still subnormal.

Scales and zero points are folded too, if a group spans the tile (`mode`):

- `"token"` (whole head): for keys, they are applied to the column of scores. For values, the scale is added to the
  weights' *exponent*, so float16 weights are normalised by a token's contribution, and no range of scales overflows or
  vanishes.
- `"channel"`: for values, scale and zero are applied to the tile's product. Keys are dequantized in registers, with
  three instructions for two codes. Scaling q would need fewer, but Triton moves the scaled q through shared memory for
  each plane. That costs far more (at 2 bits it doubles the time of the whole kernel).
- `"general"` (several groups of channels in a token): codes are dequantized to the model's dtype.

`encode` computes codes, scales and zero points of `int<2,4,5,6,8>` pages, rounded like the reference. `boosted` computes
its low codes with `quantize` and `store_codes`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .common import as_operand, load_plane, load_tokens, padded_width, query_dot, value_dot

#: number of elements of a tile in `encode`
ENCODE_TILE = 8192
FP16_MAX = tl.constexpr(65504.0)
#: adding and subtracting it rounds a small float32 to an integer, half to even
ROUND = tl.constexpr(12582912.0)
#: the value of a float16's lowest bit
TWO_24 = tl.constexpr(16777216.0)


class CodeField(NamedTuple):
    """Where a field is stored: `bits` bits of every code. A token's fields are in separate int16 words, in order."""

    bits: int
    #: bits of the code below this field
    shift: int
    #: words of a token
    words: int
    #: words of a token before these
    first_word: int
    #: words that `encode` takes at a time, if scales are per channel
    words_at_once: int
    #: `words`, rounded up to a power of two
    padded: int


class Params(NamedTuple):
    """Compile-time constants of the device functions (`P`). `registry` explains those that templates read."""

    bits: int
    head_dim: int
    page_size: int
    mode: str
    per_channel: bool
    #: tokens of a group (per channel), or channels of a group (per token)
    group: int
    #: groups along the grouped axis
    groups: int
    #: a plane has every channel whose codes are in the same field of the words: `width` channels, `padded` with the next power
    #: of two
    planes: int
    width: int
    padded: int
    #: offsets in bytes from the start of the format's part of a page
    scale_at: int
    zero_at: int
    #: for each plane: right shift of the word, mask after the shift, factor of the resulting code
    shifts: tuple[int, ...]
    masks: tuple[int, ...]
    factors: tuple[float, ...]
    #: for each plane, the factor that turns the accumulator into the true sum
    units: tuple[float, ...]
    #: largest tile of tokens
    max_block: int
    #: tokens that `encode` takes at a time
    encode_rows: int
    #: codes of 5 and 6 bits are stored as two fields, others as one
    fields: tuple[CodeField, ...]
    #: words of a token
    row_words: int
    #: whether `weigh` returns an offset
    offset: bool
    #: whether inline PTX may be used. For each plane, the PTX that unpacks two words, and the PTX that dequantizes them too
    ptx: bool
    extract: tuple[str, ...]
    dequantize: tuple[str, ...]
    #: whether plane `j` is every `planes`-th channel from `j` on
    interleaved: bool = False
    #: whether `scores` and `add` gather from shared memory
    gathers: bool = False


def params(fmt, head_dim: int, page_size: int, dtype, ptx: bool) -> Params:
    split = len(fmt.widths) > 1  # codes of two fields are combined and used as one plane of numbers
    planes, width = (1, head_dim) if split else (fmt.planes, head_dim // fmt.planes)
    padded = padded_width(width)
    per_channel = fmt.axis == "channel"
    extent = page_size if per_channel else head_dim
    group = fmt.group_size or extent
    mode = "general" if split else "channel" if per_channel else "token" if group == head_dim else "general"
    fields = {field.name: field.offset for field in fmt.fields(head_dim, page_size, dtype)}
    of_words = _fields(fmt, head_dim, group if per_channel else 1)
    shifts = tuple(j * fmt.bits // 8 * 8 for j in range(planes))
    positions = tuple(j * fmt.bits % 8 for j in range(planes))
    masks = tuple(fmt.levels << position for position in positions)
    factors = tuple(2.0**position for position in positions)
    return Params(
        bits=fmt.bits,
        head_dim=head_dim,
        page_size=page_size,
        mode=mode,
        per_channel=per_channel,
        group=group,
        groups=extent // group,
        planes=planes,
        width=width,
        padded=padded,
        scale_at=fields["scale"],
        zero_at=fields["zero"],
        shifts=shifts,
        masks=masks,
        factors=factors,
        # the general mode adds true values, the other modes unscaled codes
        units=tuple(1.0 if mode != "token" else 2.0**24 / factor for factor in factors),
        max_block=group if per_channel else page_size,
        encode_rows=max(
            ENCODE_TILE // max(planes * padded, max(16 // field.bits * field.padded for field in of_words)), 1
        ),
        fields=of_words,
        row_words=sum(field.words for field in of_words),
        offset=mode == "token",
        ptx=ptx,
        extract=tuple(map(_extract_asm, shifts, masks)),
        dequantize=tuple(_dequantize_asm(j * fmt.bits, fmt.levels) for j in range(planes)),
    )


def _fields(fmt, head_dim: int, group: int) -> tuple[CodeField, ...]:
    """See `Params.fields`. group: tokens of a group, per channel."""
    fields, left, before = [], fmt.bits, 0
    for bits in fmt.widths:
        left -= bits
        count = head_dim * bits // 16
        padded = padded_width(count)
        at_once = max(min(ENCODE_TILE // (16 // bits * group), padded), 1)
        fields.append(CodeField(bits, left, count, before, at_once, padded))
        before += count
    return tuple(fields)


def _extract_asm(shift: int, mask: int) -> str:
    mask_pair = f"{mask << 16 | mask:#010x}"
    if shift == 0:
        return f"and.b32 $0, $1, {mask_pair};"
    return f"{{ .reg .b32 t; shr.b32 t, $1, {shift}; and.b32 $0, t, {mask_pair}; }}"


def _dequantize_asm(shift: int, mask: int) -> str:
    """code / 4 * $2 + $3, rounded once. 0x6400, read as float16, is 1024; a code in its lowest bits adds to that."""
    return f"""{{ .reg .b32 t, magic, quarter, less;
        mov.b32 magic, 0x64006400;
        mov.b32 quarter, 0x34003400;
        mov.b32 less, 0xdc00dc00;
        shr.b32 t, $1, {shift};
        lop3.b32 t, t, {mask << 16 | mask:#010x}, magic, 0xea;
        fma.rn.f16x2 t, t, quarter, less;
        fma.rn.f16x2 $0, t, $2, $3; }}"""


@triton.jit
def quantize(x, low, high, levels):
    """Scale and zero (float16, shape of `low`) and codes (int32, shape of `x`), rounded like the reference.

    levels: the largest code, a number or a tensor of the shape of `low`."""
    # div_rn, because `/` on float32 is approximate on a GPU
    scale = tl.minimum(tl.math.div_rn(high - low, tl.zeros_like(low) + levels), FP16_MAX).to(tl.float16)
    # adding 0 turns -0 into +0: which of the two zeros a minimum picks is not defined
    zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16) + 0.0
    step = scale.to(tl.float32)
    offset = x - zero.to(tl.float32)
    code = tl.math.div_rn(offset, tl.zeros_like(offset) + tl.where(step > 0, step, 1.0))
    code = tl.minimum(tl.maximum(code, 0.0), levels)
    code = (code + ROUND) - ROUND
    code = tl.where(step > 0, code, 0.0).to(tl.int32)
    return scale, zero, code


@triton.jit
def store_codes(page, code, token, word, keep, P: tl.constexpr):
    """Codes `[T, planes, W]` of tokens `[T, 1]` -> their words `[1, W]`."""
    shift = (tl.arange(0, P.planes) * P.bits)[None, :, None]
    words = tl.sum(code << shift, 1).to(tl.int16)  # fields do not overlap: the sum is the union
    tl.store(page.to(tl.pointer_type(tl.int16)) + token * P.width + word, words, mask=keep)


@triton.jit
def encode(
    page, record, source, start, stop, base,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store tokens `start` to `stop` of a page (per channel: the whole page). The page's token 0 has index `base`."""
    for i in tl.static_range(len(P.fields)):
        _encode_field(page, source, start, stop, base, i, ROWS, HAS_ORDER, TAIL, P)


@triton.jit
def _store_field(page, code, token, word, keep, i: tl.constexpr, P: tl.constexpr):
    """One field of codes `[T, fields of a word, W]` of tokens `[T, 1]` -> their words `[1, W]`."""
    BITS: tl.constexpr = P.fields[i].bits
    shift = (tl.arange(0, 16 // BITS) * BITS)[None, :, None]
    field = (code >> P.fields[i].shift) & ((1 << BITS) - 1)
    words = tl.sum(field << shift, 1).to(tl.int16)  # fields do not overlap: the sum is the union
    position = token * P.row_words + P.fields[i].first_word + word
    tl.store(page.to(tl.pointer_type(tl.int16)) + position, words, mask=keep)


@triton.jit
def _encode_field(
    page, source, start, stop, base, i: tl.constexpr,
    ROWS: tl.constexpr, HAS_ORDER: tl.constexpr, TAIL: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The words of one field of the codes, and the scales and zero points."""
    scales = (page + P.scale_at).to(tl.pointer_type(tl.float16))
    zeros = (page + P.zero_at).to(tl.pointer_type(tl.float16))
    PLANES: tl.constexpr = 16 // P.fields[i].bits
    WIDTH: tl.constexpr = P.fields[i].words
    plane = tl.arange(0, PLANES)
    if P.per_channel:
        WORDS: tl.constexpr = P.fields[i].words_at_once
        STEPS: tl.constexpr = (WIDTH + WORDS - 1) // WORDS
        for at in range(P.groups * STEPS):
            group = at // STEPS
            word = (at % STEPS) * WORDS + tl.arange(0, WORDS)
            keep = word < WIDTH
            token = group * P.group + tl.arange(0, P.group)
            channel = plane[:, None] * WIDTH + word[None, :]
            x = load_tokens(
                source, base + token[:, None, None], channel[None, :, :], keep[None, None, :], HAS_ORDER, TAIL
            )
            scale, zero, code = quantize(x, tl.min(x, 0)[None, :, :], tl.max(x, 0)[None, :, :], 2.0**P.bits - 1.0)
            position = (group * P.head_dim + channel)[None, :, :]
            tl.store(scales + position, scale, mask=keep[None, None, :])
            tl.store(zeros + position, zero, mask=keep[None, None, :])
            _store_field(page, code, token[:, None], word[None, :], keep[None, :], i, P)
    else:
        word = tl.arange(0, P.fields[i].padded)
        keep = word < WIDTH
        channel = (plane[:, None] * WIDTH + word[None, :])[None, :, :]
        for t0 in range(start, stop, ROWS):
            token = t0 + tl.arange(0, ROWS)
            mask = (token < stop)[:, None, None] & keep[None, None, :]
            x = load_tokens(source, base + token[:, None, None], channel, mask, HAS_ORDER, TAIL)
            low = tl.zeros_like(x)
            high = tl.zeros_like(x)
            for g in tl.static_range(P.groups):
                mine = (channel // P.group == g) & keep[None, None, :]
                low_g = tl.min(tl.min(tl.where(mine, x, float("inf")), 2), 1)
                high_g = tl.max(tl.max(tl.where(mine, x, float("-inf")), 2), 1)
                scale, zero, _ = quantize(low_g, low_g, high_g, 2.0**P.bits - 1.0)
                tl.store(scales + token * P.groups + g, scale, mask=token < stop)
                tl.store(zeros + token * P.groups + g, zero, mask=token < stop)
                low = tl.where(mine, low_g[:, None, None], low)
                high = tl.where(mine, high_g[:, None, None], high)
            scale, zero, code = quantize(x, low, high, 2.0**P.bits - 1.0)
            _store_field(page, code, token[:, None], word[None, :], (token < stop)[:, None] & keep[None, :], i, P)


@triton.jit
def _extract(words, j: tl.constexpr, P: tl.constexpr):
    """Plane `j` of words (int16) as float16: `code * factors[j] * 2^-24`."""
    if P.ptx:
        x = tl.inline_asm_elementwise(P.extract[j], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        x = ((words >> P.shifts[j]) & P.masks[j]).to(tl.int16).to(tl.float16, bitcast=True)
    return x


@triton.jit
def _dequantized(words, j: tl.constexpr, scale, zero, DTYPE: tl.constexpr, P: tl.constexpr):
    """`code / 4 * scale + zero` for the codes of plane `j` of words (int16), as `DTYPE` (float16 or float32). scale, zero:
    float16, broadcastable."""
    if P.ptx and DTYPE == tl.float16:
        x = tl.inline_asm_elementwise(
            P.dequantize[j], "=r,r,r,r", [words, scale, zero], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        x = _extract(words, j, P).to(tl.float32) * (0.25 * TWO_24 / P.factors[j])
        x = (x * scale.to(tl.float32) + zero.to(tl.float32)).to(DTYPE)
    return x


@triton.jit
def _field_of_codes(page, token, channel, i: tl.constexpr, P: tl.constexpr):
    """One field of the codes of these tokens and channels, shifted to its place in the code. It is a separate function
    because Triton binds a `constexpr` to a name only once."""
    BITS: tl.constexpr = P.fields[i].bits
    WIDTH: tl.constexpr = P.fields[i].words
    position = token * P.row_words + P.fields[i].first_word + channel % WIDTH
    word = tl.load(page.to(tl.pointer_type(tl.int16)) + position, mask=channel < P.head_dim, other=0).to(tl.int32)
    return ((word >> (channel // WIDTH * BITS)) & ((1 << BITS) - 1)) << P.fields[i].shift


@triton.jit
def _combined_codes(page, n0, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """Codes of two fields, float32 `[BLOCK_N, padded]` or transposed; 0 after the last channel."""
    token, channel = n0 + tl.arange(0, BLOCK_N), tl.arange(0, P.padded)
    if TRANSPOSED:
        token, channel = token[None, :], channel[:, None]
    else:
        token, channel = token[:, None], channel[None, :]
    code = token * 0 + channel * 0
    for i in tl.static_range(len(P.fields)):
        code = code | _field_of_codes(page, token, channel, i, P)
    return code.to(tl.float32)


@triton.jit
def _words(page, n0, valid, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """The words of a tile of tokens, int16 `[BLOCK_N, padded]` or transposed. If codes have two fields: the codes,
    float32. Codes of unused tokens are harmless."""
    if len(P.fields) > 1:
        return _combined_codes(page, n0, TRANSPOSED, BLOCK_N, P)
    else:  # Triton also compiles code after a return
        return _words_of_one_field(page, n0, valid, TRANSPOSED, BLOCK_N, P)


@triton.jit
def _words_of_one_field(page, n0, valid, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """The words of a tile of tokens whose codes have a single field."""
    codes = page.to(tl.pointer_type(tl.int16)) + n0 * P.width
    token = tl.arange(0, BLOCK_N)
    word = tl.arange(0, P.padded)
    if TRANSPOSED:
        position = word[:, None] + token[None, :] * P.width
    else:
        position = token[:, None] * P.width + word[None, :]
    if P.width == P.padded:
        return tl.load(codes + position)
    keep = (word < P.width)[:, None] if TRANSPOSED else (word < P.width)[None, :]
    return tl.load(codes + position, mask=keep, other=0)


@triton.jit
def _per_channel(page, at: tl.constexpr, n0, j: tl.constexpr, P: tl.constexpr):
    """Scale or zero of plane `j` for the tile at token `n0`, float16 `[padded]`."""
    word = tl.arange(0, P.padded)
    position = (n0 // P.group) * P.head_dim + j * P.width + word
    pointers = (page + at).to(tl.pointer_type(tl.float16)) + position
    if P.width == P.padded:
        return tl.load(pointers)
    return tl.load(pointers, mask=word < P.width, other=0.0)


@triton.jit
def fetch(page, n0, valid, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """`"token"`: scale and zero of each token, float16 `[BLOCK_N]`; 0 in unused slots, which may hold NaN."""
    if P.mode == "token":
        pointers = (page + P.scale_at).to(tl.pointer_type(tl.float16)) + n0 + tl.arange(0, BLOCK_N)
        scale = tl.load(pointers, mask=valid, other=0.0)
        pointers = (page + P.zero_at).to(tl.pointer_type(tl.float16)) + n0 + tl.arange(0, BLOCK_N)
        return scale, tl.load(pointers, mask=valid, other=0.0)
    else:
        return ()


@triton.jit
def _general(page, words, n0, valid, j: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """Plane `j` of a tile, dequantized to float32, in the shape of `words`; zero in unused slots."""
    token = n0 + tl.arange(0, BLOCK_N)
    channel = j * P.width + tl.arange(0, P.padded)
    keep = (channel < P.head_dim) & (tl.arange(0, P.padded) < P.width)
    if P.per_channel:
        rows = token // P.group * P.head_dim
        columns = channel
    else:
        rows = token * P.groups
        columns = channel // P.group
    if TRANSPOSED:
        position = rows[None, :] + columns[:, None]
        mask = valid[None, :] & keep[:, None]
    else:
        position = rows[:, None] + columns[None, :]
        mask = valid[:, None] & keep[None, :]
    scale = tl.load((page + P.scale_at).to(tl.pointer_type(tl.float16)) + position, mask=mask, other=0.0)
    zero = tl.load((page + P.zero_at).to(tl.pointer_type(tl.float16)) + position, mask=mask, other=0.0)
    code = words
    if len(P.fields) == 1:
        code = _extract(words, j, P).to(tl.float32) * (TWO_24 / P.factors[j])
    return code * scale.to(tl.float32) + zero.to(tl.float32)


@triton.jit
def prepare(q_rows, stride, rows_valid, DOT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """`"general"`: the planes of q in the model's dtype. Otherwise `(size, sum, *planes)` with q = size * planes.
    `size` `[M]` is a power of two that brings a row's magnitude below 1: float16 may not hold q (from bfloat16) or its
    products."""
    if P.mode == "general":
        out = ()
        for j in tl.static_range(P.planes):
            out = out + (as_operand(load_plane(q_rows, stride, rows_valid, j, P).to(DOT), T),)
    else:
        largest = tl.max(tl.abs(load_plane(q_rows, stride, rows_valid, 0, P).to(tl.float32)), 1)
        total = tl.sum(load_plane(q_rows, stride, rows_valid, 0, P).to(tl.float32), 1)
        for j in tl.static_range(1, P.planes):
            x = load_plane(q_rows, stride, rows_valid, j, P).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
            total += tl.sum(x, 1)
        # the power of two above the largest magnitude, and its exact inverse, from the exponent's bits
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        size = exponent.to(tl.float32, bitcast=True) * 2.0
        inverse = tl.where(exponent > 0, (0x7E800000 - exponent).to(tl.float32, bitcast=True), 0.0)
        out = (size, total)
        for j in tl.static_range(P.planes):
            x = load_plane(q_rows, stride, rows_valid, j, P).to(tl.float32) * inverse[:, None]
            if P.mode == "token":
                x = x * (1.0 / P.factors[j])
            out = out + (as_operand(x.to(tl.float32 if DOT == tl.float32 else tl.float16), T),)
    return out


@triton.jit
def scores(
    page, record, prepared, fetched, n0, valid, factor,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    words = _words(page, n0, valid, T == 1, BLOCK_N, P)
    if P.mode == "general":
        s = query_dot(prepared[0], _general(page, words, n0, valid, 0, T == 1, BLOCK_N, P).to(DOT), None, T)
        for j in tl.static_range(1, P.planes):
            k = _general(page, words, n0, valid, j, T == 1, BLOCK_N, P).to(DOT)
            s = query_dot(prepared[j], k, s, T)
        s = s * factor
    elif P.mode == "channel":
        TYPE: tl.constexpr = prepared[2].dtype
        s = query_dot(prepared[2], _key_plane(page, words, n0, 0, TYPE, T, P), None, T)
        for j in tl.static_range(1, P.planes):
            s = query_dot(prepared[2 + j], _key_plane(page, words, n0, j, TYPE, T, P), s, T)
        s = s * tl.expand_dims(prepared[0] * (4.0 * factor), T)
    else:
        TYPE: tl.constexpr = prepared[2].dtype
        s = query_dot(prepared[2], _extract(words, 0, P).to(TYPE), None, T)
        for j in tl.static_range(1, P.planes):
            s = query_dot(prepared[2 + j], _extract(words, j, P).to(TYPE), s, T)
        scale = tl.expand_dims(fetched[0].to(tl.float32), 1 - T)
        zero = tl.expand_dims(fetched[1].to(tl.float32), 1 - T)
        s = s * tl.expand_dims(prepared[0] * (factor * TWO_24), T) * scale
        s = s + tl.expand_dims(prepared[1] * factor, T) * zero
    return s


@triton.jit
def _key_plane(page, words, n0, j: tl.constexpr, TYPE: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """`"channel"`: plane `j` of the keys divided by 4, because a rounded scale may push the largest key beyond float16.
    The codes are divided, not the scales, which would become subnormal for small keys."""
    scale = tl.expand_dims(_per_channel(page, P.scale_at, n0, j, P), T)
    zero = tl.expand_dims(_per_channel(page, P.zero_at, n0, j, P) * 0.25, T)
    return _dequantized(words, j, scale, zero, TYPE, P)


@triton.jit
def weigh(page, fetched, s, n0, valid, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    if P.mode == "token":
        # if the scale is zero, so are the codes: any positive number is correct
        scale = tl.maximum(fetched[0].to(tl.float32), 1.0 / TWO_24)
        # divided twice, not multiplied by the inverse: Triton 3.6 fails on a value with two such uses
        offset = fetched[1].to(tl.float32) / scale
        s = s + tl.expand_dims(tl.log2(scale), 1 - T)
        return s, tl.expand_dims(1.0 / scale, 1 - T), tl.expand_dims(offset, 1 - T)
    else:
        return s, 1.0, 0.0


@triton.jit
def add(
    page, record, weights, decay, acc, n0, valid,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    words = _words(page, n0, valid, T == 0, BLOCK_N, P)
    out = ()
    if P.mode == "general":
        p = weights.to(DOT)
        for j in tl.static_range(P.planes):
            v = _general(page, words, n0, valid, j, T == 0, BLOCK_N, P).to(DOT)
            out = out + (value_dot(p, v, acc[j] * tl.expand_dims(decay, T), T),)
    else:
        p = weights.to(tl.float32 if DOT == tl.float32 else tl.float16)
        if P.mode == "channel":
            total = tl.expand_dims(tl.sum(p.to(tl.float32), T), T)
            for j in tl.static_range(P.planes):
                product = value_dot(p, _extract(words, j, P).to(p.dtype), None, T)
                scale = _per_channel(page, P.scale_at, n0, j, P).to(tl.float32) * (TWO_24 / P.factors[j])
                zero = _per_channel(page, P.zero_at, n0, j, P).to(tl.float32)
                product = product * tl.expand_dims(scale, 1 - T) + total * tl.expand_dims(zero, 1 - T)
                out = out + (acc[j] * tl.expand_dims(decay, T) + product,)
        else:
            for j in tl.static_range(P.planes):
                code = _extract(words, j, P).to(p.dtype)
                out = out + (value_dot(p, code, acc[j] * tl.expand_dims(decay, T), T),)
    return out


@triton.jit
def decode(page, record, n0, valid, j: tl.constexpr, BLOCK_N: tl.constexpr, P: tl.constexpr):
    words = _words(page, n0, valid, False, BLOCK_N, P)
    return _general(page, words, n0, valid, j, False, BLOCK_N, P)
