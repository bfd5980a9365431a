"""Keys and values whose scales are drawn over twelve orders of magnitude: the meaning of `kernel_cases.Case.spread`."""

import dataclasses

import torch

#: what fp16 has of scales: from its smallest number to a third of its largest
SMALLEST, LARGEST = 2.0**-24, 2.0**14
#: queries of cases with `spread` ask for so much of a channel, at most
MOST_ASKED = 2.0**8


def spread_scales(case) -> torch.Tensor:
    """`[D]`: each key channel's scale where keys are spread by channel; the same for every chunk."""
    gen = torch.Generator().manual_seed(case.head_dim)
    return SMALLEST * (LARGEST / SMALLEST) ** torch.rand(case.head_dim, generator=gen)


def put_spread(case, k: torch.Tensor, v: torch.Tensor, gen: torch.Generator) -> None:
    """Overwrite `spread` keys or values `[B, H, S, D]`; of two tokens' values one has a mean of 1."""
    size = SMALLEST * (LARGEST / SMALLEST) ** torch.rand(*v.shape[:3], 1, generator=gen)
    side = v if case.spread == "values" else k
    noise = 2 * torch.rand(side.shape, generator=gen) - 1
    key_format, value_format = case.spec.formats
    if case.spread == "keys":
        k.copy_(noise * (size if key_format.tokenwise else spread_scales(case)))
        return
    if not value_format.tokenwise:
        size = spread_scales(dataclasses.replace(case, head_dim=v.shape[-1])).expand_as(v)
    mean = torch.rand(*v.shape[:3], 1, generator=gen).round()
    v.copy_(mean + noise * size)
    if value_format.tokenwise:
        k.mul_(2.0**-4)
        k[..., 0] = size[..., 0].log() / 8


def spread_queries(case, q: torch.Tensor) -> None:
    """What of queries `[B, S, Hq, D]` goes with `put_spread`."""
    key_format, value_format = case.spec.formats
    if case.spread == "keys":
        q.mul_(LARGEST**-1 if key_format.tokenwise else (1 / spread_scales(case)).clamp(max=MOST_ASKED))
    elif value_format.tokenwise:  # weights are scales to the power of 0, -1/4, -1/2, ...
        powers = torch.arange(q.shape[2]) % case.groups / 4
        q[..., 0] = -8 * case.head_dim**0.5 * powers
