"""Tokens for `formats.fp8` that a kernel may encode wrongly: ties, subnormals, saturation, zeros, NaN, Inf, huge and tiny."""

import math

import torch
from kernel_cases import Case, assert_same_state, store_for

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import StepInputs

#: where `check_special_rows` is run: straight into pages and through the ring
SPECIAL = [
    Case(keys=keys, values="fp8", **sizes, heads=1, lengths=(0,), capacity=300, dtype=dtype)
    for keys, sizes in (
        ("fp8", {"residual": 0, "sink": 0}),
        ("fp8", {"head_dim": 80, "head_dim_v": 96}),
        ("fp8-centered", {"head_dim": 80, "head_dim_v": 96}),
    )
    for dtype in (torch.float16, torch.bfloat16)
]


def special_rows(head_dim: int, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """`[n, head_dim]`, them all at the beginning and again at the end. Where the largest magnitude is 448 the scale is 1, and
    numbers are encoded as they are."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat([torch.nextafter(ties.to(dtype), torch.tensor(to, dtype=dtype)) for to in (0.0, math.inf)])
    as_they_are = torch.cat([numbers, ties, beside.float(), torch.arange(64) * 2.0**-12])
    as_they_are = torch.nn.functional.pad(as_they_are, (0, -len(as_they_are) % (head_dim - 1))).view(-1, head_dim - 1)
    signs = 1 - 2 * torch.randint(2, as_they_are.shape, generator=gen)
    exact = torch.cat([torch.full((len(as_they_are), 1), 448.0), as_they_are * signs], 1)
    # constant rows: rounded, the quotient by the scale may be above 448
    constant = ((1 + torch.rand(12, 1, generator=gen)) * 2.0 ** torch.arange(-6, 6)[:, None]).expand(-1, head_dim)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    ends = torch.randn(4, head_dim, generator=gen)
    ends[0, 0], ends[1], ends[2] = largest, largest * ends[1].sign(), smallest * ends[2].sign()
    zeros = torch.zeros(2, head_dim)
    zeros[1] = -0.0
    bad = torch.randn(7, head_dim, generator=gen)
    for row, x in zip(bad, (math.nan, -math.nan, math.inf, -math.inf), strict=False):
        row[row.numel() // 3] = x
    bad[4], bad[5], bad[6, ::2] = math.nan, -math.inf, math.inf
    special = torch.cat([exact, constant, ends, zeros, bad])
    orders = (torch.randperm(len(special), generator=gen) for _ in range(2))
    between = torch.randn(60, head_dim, generator=gen)
    first, last = (special[order] for order in orders)
    return torch.cat([first, between, last]).to(dtype)


def check_special_rows(append, case: Case, device: str, gen: torch.Generator) -> None:
    """Stored in a chunk, and the last of them one at a time: every byte. append: `Operations.append` of the kernels. case:
    one row of one KV head, with capacity."""
    keys, values = (special_rows(dim, case.dtype, gen)[None, None] for dim in case.dims)
    count = min(keys.shape[2], values.shape[2])
    ref, dev = store_for(case, "cpu"), store_for(case, device)
    start = 0
    for stop in (count - 20, *range(count - 19, count + 1)):
        k, v = keys[:, :, start:stop], values[:, :, start:stop]
        reference.OPERATIONS.append(StepInputs(None, k, v), ref)
        append(StepInputs(None, k.to(device), v.to(device)), dev)
        start = stop
    assert int(ref.state.paged.min()) >= 64
    assert_same_state(ref.state, dev.state)
