"""Codes with static steps: calibration sets the step of each channel, so a page stores none.

Calibration measures each channel once, after a transform. For keys ("eigen") the transform decorrelates channels and sorts
them by importance; for values ("hadamard") it equalizes channels. A number is

    x = center + step * (mean + token_scale * gain * (code - (2**bits - 1) / 2))

A page has the codes, and one of two kinds of metadata. `static-54222100` (keys) has a mean per channel, and token scales
are 1. `static-2-tn` (values) has a scale per token, and means are 0.

- `center` and `step` are parameters: each channel's mean over the calibration texts, and the step of its codes.
- `mean` is the page's mean after the center is subtracted, in steps: one float16 for each channel. (8 bits do not cover
  the range of keys with biases: their means are large, and RoPE changes them with the position.)
- `bits` of a channel come from the pattern: `54222100` gives the first eighth of the channels 5 bits, the last two
  eighths none.
- `token_scale` is `2 ** (k / 4)`, k in -8..7, computed from the token's root mean square.
- `gain` compensates shrinkage: the quantizer with the smallest error decodes Gaussian numbers too small on average.

Codes are stored as *planes* of 4, 2 and 1 bits. Codes of 3 bits have a plane of 2 and a plane of 1; codes of 5 bits have
one of 4 and one of 1. For a kernel, a second plane is a few more channels, whose query is multiplied by `2 ** shift`.

The CUDA kernels store codes in the order of tensor-core fragments: layouts `fragment-1` (keys), `fragment-1t` (values).
Words, lanes and rows are those of `fragment`: a page is segments of 32 tokens, a segment is `[words / V][32 lanes][V
words]`, lane `4 g + t`, and a word's two halves are the elements e = 0, 1 of a register. Only the places of the planes
in the words differ.

Keys. Eight neighbouring channels of one plane are an *octet*. It fills half of an operand's 16 columns: lanes with index
`t` have its channels `2 t + e`. Octets are in the order of the planes (4 bits, 2, 1). A word has four bits per value: one
octet of 4 bits, two of 2, or four of 1. The field of an octet that begins at bit `at` (0 to 3) of these four is

    token 4 g + 2 h + j of the segment: bits 16 e + 8 j + 4 h + at and up

The part `8 j + 4 h` depends only on the token, so it is the same in every plane. The part `at` depends only on the octet,
so kernels multiply its queries by a power of two instead of shifting codes.

Values. The plane of 4 or 2 bits is as in `fragment`. Codes of 3 bits have a plane of 1 bit after it. There, two
neighbouring groups of 16 channels, `c` and `c + 1` with even `c`, share word `c / 2`. A field is at the bit where a field
of two bits is in `fragment`: `c` has the lower of the two bits, `c + 1` the higher one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import fragment
from .affine import pack_words, unpack_words
from .base import Format, Parameter, Tensors
from .boosted import fold_sum
from .fragment import LAYOUTS, SEGMENT, Plane

#: number of channels of an octet (see above)
OCTET = 8
#: bits per value that layout `fragment-1t` supports
VALUE_BITS = (2, 3, 4)


def validate(pattern: str, token_scale: bool, head_dim: int, layout: str) -> None:
    """Raise `ValueError` if the layout does not support this pattern."""
    if layout == LAYOUTS[0]:
        if token_scale:
            raise ValueError(f"layout={layout!r} is for keys, whose tokens have no scales ('-tn')")
        if head_dim // len(pattern) % OCTET:
            raise ValueError(
                f"pattern={pattern!r} has groups of {head_dim // len(pattern)} channels with head_dim={head_dim}; "
                f"layout={layout!r} takes multiples of {OCTET}"
            )
        return
    if not token_scale:
        raise ValueError(f"layout={layout!r} is for values, whose tokens have scales ('-tn')")
    bits = set(map(int, pattern))
    if len(bits) > 1 or not bits <= set(VALUE_BITS):
        raise ValueError(f"pattern={pattern!r} in layout={layout!r} must be one of {VALUE_BITS} bits for all channels")
    if 3 in bits and head_dim % 32:
        raise ValueError(f"layout={layout!r} takes 3 bits with multiples of 32 channels, not with head_dim={head_dim}")


def words(planes: Sequence[Plane], layout: str) -> int:
    """Number of 32-bit words that a lane has of a segment of 32 tokens."""
    if layout == LAYOUTS[0]:
        return -(-sum(len(plane.channels) * plane.width for plane in planes) // (4 * OCTET))
    return sum(len(plane.channels) * plane.width for plane in planes) // 32


@functools.cache
def _positions(pattern: str, layout: str, head_dim: int) -> fragment.Positions:
    """Where the planes of `pattern` are in the words of a segment."""
    planes = _planes(pattern, head_dim)
    token, positions, before = torch.arange(SEGMENT)[:, None], [], 0
    g, h, j = token >> 2, token >> 1 & 1, token & 1
    for width, channel, _ in planes:
        if layout == LAYOUTS[0]:
            column = torch.arange(len(channel))
            at = before + width * (column // OCTET)
            word, lane = at // 4, 4 * g + (column % OCTET >> 1)
            bit = 16 * (column & 1) + 8 * j + 4 * h + at % 4
            before += width * -(-len(channel) // OCTET)
        else:  # planes of all channels
            word, lane, bit = fragment.field_positions(max(width, 2), layout, head_dim)
            if width == 1:
                word, bit = head_dim // 16 + word // 2, bit + (word & 1)
        positions.append((fragment.word_index(word, lane, words(planes, layout)), bit))
    return tuple(positions)


#: mean squared error of the best uniform quantizer of unit Gaussian numbers, and its step, by bits
ERROR = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.00349, 6: 0.00104}
STEP = {0: 1.0, 1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.335, 5: 0.1881, 6: 0.1041}
#: by bits of a code: the widths of its planes, the highest bits first
PLANES = {0: (), 1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}
#: limit of a page's mean, in steps: the largest number of float16
MAX_MEAN = 65504.0
#: the smallest k of a token scale 2 ** (k / 4); the largest is 15 more
LOWEST_SCALE = -8


@dataclass(frozen=True, repr=False)
class Static(Format):
    """Integers with static steps.

    Args:
        pattern: bits of the channels. Each digit, 0 to 6, is for a group of `head_dim / len(pattern)` channels.
        token_scale: whether each token has a scale of 4 bits (values). If not, a page has a mean for each channel (keys).
        layout: order of the codes, see below. The backend chooses it; it changes no decoded number.

    Arrays of a page in layout `planar-1`:

    - `codes` int16 `[page_size, words]`: the planes of widths 4, 2 and 1 (`planes`), each packed as in `affine`.
    - Without `token_scale`: `mean` float16 `[head_dim]`.
    - With `token_scale`: `scale` uint8 `[page_size / 2]`. Byte `i` has k + 8 of token `2 i` in the low four bits, of token
      `2 i + 1` in the high ones.

    In layouts `fragment-1` (keys) and `fragment-1t` (values), `codes` is int32 `[segments, words / V, 32, V]`, in the order
    of tensor-core fragments (see the top of this file).
    """

    weighted: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("planar-1", *fragment.LAYOUTS)
    grammar: ClassVar[str] = "'static-<bits of each group of channels>[-tn]'"

    pattern: str
    token_scale: bool = False
    layout: str = "planar-1"

    def __post_init__(self):
        self.check_layout()
        if not isinstance(self.pattern, str) or not re.fullmatch("[0-6]+", self.pattern):
            raise ValueError(
                f"pattern={self.pattern!r} is not allowed; it must be digits from 0 to 6, one for each group"
            )
        if not self.pattern.strip("0"):
            raise ValueError(f"pattern={self.pattern!r} is not allowed: no channel would have a code")

    @property
    def name(self) -> str:
        return f"static-{self.pattern}{'-tn' if self.token_scale else ''}{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Static | None:
        match = re.fullmatch(r"static-(\d+)(-tn)?(?:@([\w-]+))?", name)
        return None if match is None else cls(match[1], match[2] is not None, match[3] or "planar-1")

    def validate(self, head_dim: int, page_size: int) -> None:
        super().validate(head_dim, page_size)
        if head_dim % len(self.pattern):
            raise ValueError(
                f"pattern={self.pattern!r} has {len(self.pattern)} groups, which do not divide head_dim={head_dim}"
            )
        if self.layout != "planar-1":
            validate(self.pattern, self.token_scale, head_dim, self.layout)
            return
        for plane in self.planes(head_dim):
            if len(plane.channels) * plane.width % 16:
                raise ValueError(
                    f"pattern={self.pattern!r} gives {len(plane.channels)} columns of {plane.width} bits with "
                    f"head_dim={head_dim}, which do not fill words of 16 bits"
                )

    def bits(self, head_dim: int) -> torch.Tensor:
        """Bits of each channel, int64 `[head_dim]`."""
        digits = torch.tensor([int(digit) for digit in self.pattern])
        return digits.repeat_interleave(head_dim // len(self.pattern))

    def parameters(self, head_dim: int, num_kv_heads: int) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, (num_kv_heads, head_dim), torch.float32) for name in ("center", "step"))

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The planes, widest first (4, 2, 1). The columns of a plane are in the order of their channels."""
        return _planes(self.pattern, head_dim)

    def gain(self, head_dim: int) -> torch.Tensor:
        """The factor of a code's distance from the middle, float32 `[head_dim]`; 0 for channels without a code."""
        gains = torch.tensor([_gain(int(digit), self.token_scale) for digit in self.pattern], dtype=torch.float32)
        return gains.repeat_interleave(head_dim // len(self.pattern))

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        scale, mean = ("scale", torch.uint8, (page_size // 2,)), ("mean", torch.float16, (head_dim,))
        return [("codes", *self._codes(head_dim, page_size)), scale if self.token_scale else mean]

    def _codes(self, head_dim: int, page_size: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the array `codes`."""
        if self.layout != "planar-1":
            return torch.int32, fragment.shape_of_words(words(self.planes(head_dim), self.layout), page_size)
        return torch.int16, (page_size, sum(len(plane.channels) * plane.width // 16 for plane in self.planes(head_dim)))

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        page_size, head_dim = x.shape[-2:]
        center, step = (parameter[:, None, :] for parameter in parameters)
        x = (x.float() - center) / step
        bits = self.bits(head_dim).to(x.device)
        arrays = {}
        if self.token_scale:
            k = self.scale_of(x)
            arrays["scale"] = k[..., 0::2] | k[..., 1::2] << 4
            x = x / token_scales(x.device)[k.long()][..., None]
        else:  # `fold_sum` has a fixed order, so that every backend rounds alike
            arrays["mean"] = (fold_sum(x) * (1 / page_size)).clamp(-MAX_MEAN, MAX_MEAN).half()
            x = x - arrays["mean"].float()[..., None, :]
        half = torch.where(bits > 0, 2.0 ** (bits - 1), 0.0)
        codes = (x.floor() + half).clamp(min=0).minimum(2.0**bits - 1).to(torch.int32)
        return arrays | {"codes": self._pack(codes)}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        device = arrays["codes"].device
        middle = (2.0 ** self.bits(head_dim) - 1).to(device) / 2
        x = (self._unpack(arrays["codes"], head_dim).float() - middle) * self.gain(head_dim).to(device)
        if self.token_scale:
            k = torch.stack([arrays["scale"] & 15, arrays["scale"] >> 4], -1).flatten(-2)
            x = x * token_scales(device)[k.long()][..., None]
        else:
            x = x + arrays["mean"].float()[..., None, :]
        center, step = (parameter[:, None, :] for parameter in parameters)
        return x * step + center

    def scale_of(self, x: torch.Tensor) -> torch.Tensor:
        """k + 8 of each token `[..., head_dim]`, uint8. The scale `2 ** (k / 4)` is the nearest to the token's root mean
        square, divided by the root mean square of Gaussian numbers for which a step of 1 is the best. Sums of squares are
        compared with thresholds, so that bytes do not depend on a logarithm."""
        head_dim = x.shape[-1]
        squares = fold_sum(
            torch.nn.functional.pad(x * x, (0, (1 << (head_dim - 1).bit_length()) - head_dim)).transpose(-1, -2)
        )
        return (squares[..., None] >= self.thresholds(head_dim).to(x.device)).sum(-1).to(torch.uint8)

    def thresholds(self, head_dim: int) -> torch.Tensor:
        """Sums of squares at which a token's scale goes up by one, float32 `[15]`."""
        typical = head_dim / STEP[max(map(int, self.pattern))] ** 2
        k = torch.arange(LOWEST_SCALE + 1, LOWEST_SCALE + 16, dtype=torch.float64)
        return (typical * 2 ** ((k - 0.5) / 2)).float()

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int32 `[..., page, head_dim]` -> the array `codes`."""
        planes_of_codes, planes = self.planes(codes.shape[-1]), []
        if self.layout != "planar-1":
            positions = _positions(self.pattern, self.layout, codes.shape[-1])
            return fragment.pack_planes(codes, planes_of_codes, positions, words(planes_of_codes, self.layout))
        for width, channels, shifts in planes_of_codes:
            fields = (codes[..., channels] >> shifts.to(codes.device)) & (2**width - 1)
            planes.append(pack_words(fields, width))
        return torch.cat(planes, -1)

    def _unpack(self, words: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The inverse of `_pack`: int32 `[..., page, head_dim]`."""
        if self.layout != "planar-1":
            positions = _positions(self.pattern, self.layout, head_dim)
            return fragment.unpack_planes(words, self.planes(head_dim), positions, head_dim)
        codes = torch.zeros(*words.shape[:-1], head_dim, dtype=torch.int32, device=words.device)
        first = 0
        for width, channels, shifts in self.planes(head_dim):
            count = len(channels) * width // 16
            fields = unpack_words(words.narrow(-1, first, count), width)
            codes.index_add_(-1, channels.to(words.device), fields << shifts.to(words.device))
            first += count
        return codes


def uniform_codes(x: torch.Tensor, step: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """`x`, quantized with `bits` and `step`, without gain. Calibration compares the errors of steps with it."""
    middle = (2.0**bits - 1) / 2
    return torch.where(bits > 0, ((x / step).floor() + 0.5).clamp(min=-middle, max=middle) * step, 0.0)


def _gain(bits: int, token_scale: bool) -> float:
    if bits == 0:
        return 0.0
    # with 1 or 2 bits the scale of a token already compensates half of the shrinkage
    return (1 / (1 - ERROR[bits])) ** (0.5 if token_scale and bits <= 2 else 1.0)


@functools.cache
def _planes(pattern: str, head_dim: int) -> tuple[Plane, ...]:
    group = head_dim // len(pattern)
    columns_of: dict[int, list[tuple[int, int]]] = {4: [], 2: [], 1: []}
    for i, digit in enumerate(pattern):
        shift = int(digit)
        for width in PLANES[int(digit)]:
            shift -= width
            columns_of[width] += [(channel, shift) for channel in range(i * group, (i + 1) * group)]
    return tuple(
        Plane(width, torch.tensor([c for c, _ in columns]), torch.tensor([s for _, s in columns], dtype=torch.int32))
        for width, columns in columns_of.items()
        if columns
    )


@functools.cache
def token_scales(device: torch.device) -> torch.Tensor:
    """The 16 scales, float32."""
    k = torch.arange(LOWEST_SCALE, LOWEST_SCALE + 16, dtype=torch.float64, device=device)
    return (2 ** (k / 4)).float()
