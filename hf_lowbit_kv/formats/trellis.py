"""Values of two bits that select one of 8 levels: trellis-coded quantization (Marcellin and Fischer, 1990), without a table.

Each channel has a center and a step, and each token has a scale, as in `static-2-tn`. Only the meaning of a code differs.
Codes form chains. The lower bit of a code is the path bit `u` of its step in the chain. The upper bit is `q`:

    level = 4 q + 2 (u_t ^ u_(t-1) ^ u_(t-3)) + u_(t-2)
    x     = center + step / 2 * token_scale * gain * (level - 7 / 2)

Path bits before a chain's first step are 0. So a number has one of four spaced levels, and its path selects the four.
There are eight states: the last three path bits. `encode` finds the path with the least squared error (Viterbi). Its
sums are float32, rounded after every operation. If both transitions into a state cost the same, it takes the one from
the state without the top bit. If several ends cost the same, it takes the lowest state.

A chain follows one field of a lane's words (`fragment`) through 128 tokens, segment after segment of 32 tokens. At head_dim 64
that would be 16 steps, so there a chain alternates between two neighbouring fields of each word. Earlier path bits are
therefore in earlier words of the same lane, and a kernel computes the levels of a word with a few operations on whole words.
With chains of 32 steps the mean squared error of unit Gaussian numbers is 0.098; without a trellis it is 0.119.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import static
from .base import Tensors
from .fragment import LANES, LAYOUTS, SEGMENT, vector
from .static import Static, token_scales

#: mean squared error of unit Gaussian numbers, with chains of 32 steps and half the step of a 2-bit quantizer
ERROR = 0.098
#: a new chain begins after this many tokens
CHAIN_TOKENS = 128
#: up to this head_dim a chain takes two fields of a word
TWO_FIELDS = 64
STATES, LEVELS = 8, 8
#: numbers are clamped to this many half steps, so that sums stay finite
FARTHEST = 1024.0
MIDDLE = (LEVELS - 1) / 2


@dataclass(frozen=True, repr=False)
class Trellis(Static):
    """Two bits for each number, on the path of a trellis; for values.

    Page: as `static-2-tn` in layout `fragment-1t`, the only layout.
    """

    layouts: ClassVar[tuple[str, ...]] = (LAYOUTS[1],)
    grammar: ClassVar[str] = "'trellis-2'"

    pattern: str = "2"
    token_scale: bool = True
    layout: str = LAYOUTS[1]

    def __post_init__(self):
        fields = self.pattern, self.token_scale, self.layout
        if fields != ("2", True, LAYOUTS[1]):
            raise ValueError(f"fields={fields!r} are not allowed; a trellis has 2 bits, token scales, one layout")

    @property
    def name(self) -> str:
        return "trellis-2"

    @classmethod
    def parse(cls, name: str) -> Trellis | None:
        return cls() if name == "trellis-2" else None

    @property
    def calibrated(self) -> Static:
        return Static("2", token_scale=True)

    def gain(self, head_dim: int) -> torch.Tensor:
        """Factors of a level's distance from the middle, in steps: float32 `[head_dim]`."""
        return torch.full((head_dim,), 0.5 * (1 / (1 - ERROR)) ** 0.5, dtype=torch.float32)

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        center, step = (parameter[:, None, :] for parameter in parameters)
        x = (x.float() - center) / step
        k = self.scale_of(x)
        x = x / token_scales(x.device)[k.long()][..., None]
        order = chains(*x.shape[-2:]).to(x.device)
        codes = torch.empty(*x.shape[:-2], x.shape[-2] * x.shape[-1], dtype=torch.int32, device=x.device)
        codes[..., order] = path_codes(2 * x.flatten(-2)[..., order])
        return {"codes": self._pack(codes.unflatten(-1, x.shape[-2:])), "scale": k[..., 0::2] | k[..., 1::2] << 4}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = self._unpack(arrays["codes"], head_dim)
        device, order = codes.device, chains(*codes.shape[-2:]).to(codes.device)
        level = torch.empty_like(codes.flatten(-2))
        level[..., order] = levels(codes.flatten(-2)[..., order])
        x = (level.unflatten(-1, codes.shape[-2:]).float() - MIDDLE) * self.gain(head_dim).to(device)
        k = torch.stack([arrays["scale"] & 15, arrays["scale"] >> 4], -1).flatten(-2)
        x = x * token_scales(device)[k.long()][..., None]
        center, step = (parameter[:, None, :] for parameter in parameters)
        return x * step + center


@functools.cache
def chains(page_size: int, head_dim: int) -> torch.Tensor:
    """The number of a page, `token * head_dim + channel`, for each step of each chain: int64 `[chains, steps]`."""
    ((position, bit),) = static._positions("2", LAYOUTS[1], head_dim)
    words = head_dim // 16
    wide = vector(words)
    word, lane = position // (LANES * wide) * wide + position % wide, position // wide % LANES
    fields, tokens = 16, min(page_size, CHAIN_TOKENS)
    segments = tokens // SEGMENT
    order = torch.empty(page_size // tokens, LANES, fields, segments, words, dtype=torch.int64)
    number = torch.arange(SEGMENT)[:, None] * head_dim + torch.arange(head_dim)
    for at in range(page_size // SEGMENT):
        order[at // segments, lane, bit // 2, at % segments, word] = number + at * SEGMENT * head_dim
    order = order.flatten(-2)
    if head_dim <= TWO_FIELDS:
        order = order.unflatten(2, (-1, 2)).transpose(-1, -2).flatten(-2)
    return order.flatten(0, 2)


def levels(codes: torch.Tensor) -> torch.Tensor:
    """Levels, 0 to 7, of codes along chains: both int `[..., steps]`."""
    path = codes & 1

    def before(k: int) -> torch.Tensor:
        return torch.nn.functional.pad(path, (k, 0))[..., : path.shape[-1]]

    return 2 * (codes ^ before(1) ^ before(3)) + before(2)


@functools.cache
def _ways() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The transitions into each state. Bit 0 of a state is its own path bit, bit 1 the previous one, and so on.

    Returns:
        The previous state, and the lower of the two levels, for each state and both transitions: int64 `[8, 2]`.
        Then each state's own path bit: int64 `[8]`.
    """
    state = torch.arange(STATES)[:, None]
    before = (state >> 1) | torch.tensor([0, STATES // 2])
    own = state & 1
    return before, 2 * (own ^ (before & 1) ^ (before >> 2 & 1)) + (before >> 1 & 1), own[:, 0]


def path_codes(x: torch.Tensor) -> torch.Tensor:
    """Codes of the path with the least squared error, int32 `[..., steps]`. x: in half steps, float32, same shape."""
    x = x.clamp(-FARTHEST, FARTHEST)
    before, lowest, own = (each.to(x.device) for each in _ways())
    cost = x.new_full((STATES, *x.shape[:-1]), torch.inf)
    cost[0] = 0
    ways, uppers = [], []
    for t in range(x.shape[-1]):
        # the nearer of the levels d and d + 4; the lower one if both are equally near
        at = torch.stack([x[..., t] - (d - MIDDLE) for d in range(4)])
        upper = at > 2
        at = torch.where(upper, at - 4, at)
        square = at * at
        first, second = (cost[before[:, way]] + square[lowest[:, way]] for way in range(2))
        way = second < first
        cost = torch.where(way, second, first)
        ways.append(way)
        uppers.append(upper)
    state = cost.argmin(0)  # the first of equal ones
    codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    for t in reversed(range(x.shape[-1])):
        way = ways[t].gather(0, state[None])[0].long()
        upper = uppers[t].gather(0, lowest[state, way][None])[0]
        codes[..., t] = 2 * upper.int() + own[state].int()
        state = before[state, way]
    return codes
