"""Vector quantization: consecutive channels of a token are stored as the index of the nearest entry of a codebook.

    codebook: 2^bits centroids of `dim` channels      code = argmin_j |x - c_j|^2; the lower j wins a tie

A head of D channels is divided into D / dim sub-vectors, which all share one codebook. The codebook (float16) is a
parameter of the layer, or of each of its KV heads. Keys and values have separate codebooks. There is no metadata: a
page consists of indices.

Sources: VecInfer, arXiv 2510.06175, section 2.2. MILLION and CQ use the same quantization without a transform of keys.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import fragment
from .affine import Affine
from .base import Format, Parameter, Tensors

#: channels of a sub-vector, and bits of an index
DIMS = (2, 4, 8)
BITS = (*range(3, 13), 16)
#: tokens whose indices of one sub-vector are packed together
SEGMENT = 32
#: largest number of distances computed at a time
_MAX_DISTANCES = 1 << 22


@dataclass(frozen=True, repr=False)
class Codebook(Format):
    """An index of `bits` bits encodes `dim` channels, so a number takes `bits / dim` bits.

    Args:
        dim: channels of a sub-vector: 2, 4 or 8.
        bits: bits of an index, 3 to 12 or 16.
        layout: order of the indices, see below. The backend chooses it; it changes no decoded number.

    Parameter `codebook`: float16 `[num_kv_heads, 2^bits, dim]`, or with a leading 1 if a layer's heads share it.

    A page is streams of indices. A stream begins at the lowest bit of its first 32-bit word, and indices follow without
    gaps.

    - Layout `planar-1`: `codes` int32 `[page_size / 32, head_dim / dim, bits]`. A stream holds one sub-vector's indices
      of 32 tokens.
    - Layouts `fragment-1` (keys) and `fragment-1t` (values): `codes` int32 `[page_size / 32, words / V, 32, V]`. A
      stream holds the head_dim / dim indices of one lane of a warp for 32 tokens, in the order in which the lane uses
      them (see `_positions`). `V` consecutive words of a lane are one load.

    Example:
        >>> fmt = lb.Codebook(dim=4, bits=8)
        >>> fmt.name
        'vq-d4b8'
        >>> [(each.name, each.shape) for each in fmt.parameters(128, 8)]
        [('codebook', (8, 256, 4))]
    """

    layouts: ClassVar[tuple[str, ...]] = ("planar-1", *fragment.LAYOUTS)
    grammar: ClassVar[str] = "'vq-d<2|4|8>b<3 to 12|16>'"

    dim: int
    bits: int
    layout: str = "planar-1"

    def __post_init__(self):
        self.check_layout()
        if self.dim not in DIMS:
            raise ValueError(f"dim={self.dim!r} (channels of a sub-vector) is not offered; allowed: {DIMS}")
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r} of an index are not offered; allowed: {BITS}")

    @property
    def name(self) -> str:
        return f"vq-d{self.dim}b{self.bits}{self.at_layout}"

    @classmethod
    def parse(cls, name: str) -> Codebook | None:
        match = re.fullmatch(r"vq-d(\d+)b(\d+)(?:@([\w-]+))?", name)
        if match is None:
            return None
        dim, bits, layout = match.groups()
        return cls(int(dim), int(bits), layout or "planar-1")

    @property
    def for_biased_keys(self) -> Format:
        """Entries are fitted to keys of the first positions. At later positions RoPE rotates a bias out of their range."""
        return Affine(4 if self.bits > 2 * self.dim else 2, "channel")

    @property
    def size(self) -> int:
        """Number of entries of the codebook."""
        return 2**self.bits

    def parameters(self, head_dim: int, num_kv_heads: int) -> tuple[Parameter, ...]:
        return (Parameter("codebook", (num_kv_heads, self.size, self.dim), torch.float16),)

    def in_lanes(self, head_dim: int) -> bool:
        """Whether the fragment layouts are possible. The indices of 32 tokens must divide evenly among the lanes of a warp, in
        whole words, for keys and for values. And two codebooks must fit into a multiprocessor's shared memory, which the
        kernels of these layouts use."""
        if self.bits > 12:
            return False
        return head_dim % max(32, 8 * self.dim) == 0 and head_dim // self.dim * self.bits % 32 == 0

    def validate(self, head_dim: int, page_size: int) -> None:
        super().validate(head_dim, page_size)
        if self.layout != "planar-1" and not self.in_lanes(head_dim):
            raise ValueError(f"layout={self.layout!r} of format {self.name!r} is not possible with head_dim={head_dim}")

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        count = head_dim // self.dim
        if self.layout == "planar-1":
            return [("codes", torch.int32, (page_size // SEGMENT, count, self.bits))]
        return [("codes", torch.int32, fragment.shape_of_words(count * self.bits // 32, page_size))]

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        (codebook,) = parameters
        vectors = x.float().unflatten(-1, (-1, self.dim))
        return {"codes": self._pack(nearest(vectors, codebook))}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        (codebook,) = parameters
        return entries(codebook.float(), self._unpack(arrays["codes"], head_dim)).flatten(-2)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 `[..., page, D / dim]` -> the array `codes`."""
        segments = codes.unflatten(-2, (-1, SEGMENT))
        if self.layout == "planar-1":
            return pack_stream(segments.transpose(-1, -2), self.bits)
        position, _ = self._positions(codes.shape[-1], codes.device)
        words = pack_stream(segments.flatten(-2)[..., position], self.bits)  # [..., segments, lanes, words]
        return words.unflatten(-1, (-1, fragment.vector(words.shape[-1]))).transpose(-2, -3)

    def _unpack(self, words: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The array `codes` -> int64 `[..., page, D / dim]`."""
        count = head_dim // self.dim
        if self.layout == "planar-1":
            return unpack_stream(words, self.bits).transpose(-1, -2).flatten(-3, -2)
        _, order = self._positions(count, words.device)
        streams = unpack_stream(words.transpose(-2, -3).flatten(-2), self.bits)
        return streams.flatten(-2)[..., order].unflatten(-1, (SEGMENT, count)).flatten(-3, -2)

    def _positions(self, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        position, order = _lane_positions(self.dim, count, self.layout)
        return position.to(device), order.to(device)


@functools.cache
def _lane_positions(dim: int, count: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of a segment (32 tokens, `count` sub-vectors) that belong to each lane, in order: int64 `[32, count]`,
    as positions `token * count + sub-vector`. And the inverse, `[32 * count]`.

    Lane `4 g + t` (`g` 0..7, `t` 0..3) has for keys: tokens `4 g` to `4 g + 3` of each of its sub-vectors; its channels
    are `8 t` to `8 t + 7` of every 32. For values: for each `u`, sub-vector `8 u + g` of tokens `8 t + 4 e + 2 h + j`,
    in the order `4 h + 2 j + e`.
    """
    lane, n = torch.arange(fragment.LANES)[:, None], torch.arange(count)
    g, t = lane // 4, lane % 4
    if layout == fragment.LAYOUTS[0]:
        channel = n // 4 * dim
        token = 4 * g + n % 4
        vector = (channel // 8 * 32 + 8 * t + channel % 8) // dim
    else:
        h, j, e = n % 8 // 4, n % 4 // 2, n % 2
        token, vector = 8 * t + 4 * e + 2 * h + j, n // 8 * 8 + g
    position = token * count + vector
    return position, position.flatten().argsort()


def entries(codebook: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Entries of codebooks `[1 or H, 2^bits, dim]` for codes int64 `[..., H, page, n]`: `[..., H, page, n, dim]`."""
    if codebook.shape[0] == 1:
        return codebook[0][codes]
    head = torch.arange(codebook.shape[0], device=codes.device)[:, None, None]
    return codebook[head, codes]


def nearest(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Indices of the nearest entries, int64 `[..., H, page, n]`.

    Args:
        x: sub-vectors `[..., H, page, n, dim]`, float32.
        codebook: `[1 or H, 2^bits, dim]`.

    The result is defined to the last bit, because packed bytes depend on it. The distance is the float32 sum of (x_i -
    c_i)^2 from i = 0 on, with every operation rounded. NaN counts as infinity. The lower of two indices with equal
    distances wins. If x is not finite, this is the first entry.
    """
    if codebook.shape[0] == 1:
        return _nearest(x.reshape(-1, x.shape[-1]), codebook[0].float()).view(x.shape[:-1])
    heads = x.movedim(-4, 0)
    codes = [_nearest(of.reshape(-1, x.shape[-1]), book.float()) for of, book in zip(heads, codebook, strict=True)]
    return torch.stack(codes).view(heads.shape[:-1]).movedim(0, -3)


def _nearest(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The nearest of the centroids `[m, dim]` for each `x` `[n, dim]`: int64 `[n]`.

    A matrix product finds it up to rounding. If rounding may hide another, equally near centroid, distances are computed
    by their definition.
    """
    wide = x.is_cuda or torch.get_float32_matmul_precision() != "highest"  # products may be rounded to fewer bits
    kind = torch.float64 if wide else torch.float32
    squares = (centroids * centroids).sum(-1).to(kind)
    largest, codes = squares.max(), []
    for part in x.split(max(_MAX_DISTANCES // len(centroids), 1)):
        distance = torch.addmm(squares, part.to(kind), centroids.to(kind).T, alpha=-2)  # less |x|^2
        low, code = distance.min(-1)
        slack = 2.0**-18 * ((part * part).sum(-1) + largest)
        unclear = torch.nonzero(~((distance <= (low + slack)[:, None]).sum(-1) == 1))[:, 0]
        for rows in unclear.split(max(_MAX_DISTANCES // (len(centroids) * 4), 1)):
            code[rows] = squared_distance(part[rows, None], centroids).nan_to_num(torch.inf, torch.inf).argmin(-1)
        codes.append(code)
    return torch.cat(codes) if codes else x.new_zeros(0, dtype=torch.int64)


def squared_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Float32 sum of (x_i - y_i)^2 over the last axis, from i = 0 on, every operation rounded."""
    total = (x[..., 0] - y[..., 0]).square()
    for i in range(1, x.shape[-1]):
        total = total + (x[..., i] - y[..., i]).square()
    return total


@functools.cache
def _stream(count: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `count` indices in a stream: the word in which it begins, and the bit there."""
    at = torch.arange(count) * bits
    return at // 32, at % 32


def pack_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 `[..., n]` -> int32 words `[..., n * bits / 32]`: index `i` begins at bit `i * bits` of the stream."""
    word, bit = (x.to(codes.device) for x in _stream(codes.shape[-1], bits))
    shifted = codes << bit
    words = codes.new_zeros(*codes.shape[:-1], codes.shape[-1] * bits // 32 + 1)
    words.index_add_(-1, word, shifted & 0xFFFFFFFF)  # fields do not overlap: the sum is the union
    words.index_add_(-1, word + 1, shifted >> 32)
    words = words[..., :-1]
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_stream`: int64 `[..., words * 32 / bits]`."""
    word, bit = (x.to(words.device) for x in _stream(words.shape[-1] * 32 // bits, bits))
    wide = words.long() & 0xFFFFFFFF
    above = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)]
    return ((wide[..., word] | above << 32) >> bit) & (2**bits - 1)
