"""Cases for kernels where scales differ by orders of magnitude or are 0, and checks of these with values known beforehand.

attend: `Operations.attend` of the kernels that are checked.
"""

import math

import torch
from kernel_cases import Case, copy_state, generator, store_for

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import StepInputs

_WHOLE = {"head_dim": 128, "page_size": 128, "residual": 0, "sink": 0, "heads": 1, "lengths": (768,)}
#: formats in which a constant row of values has a scale of 0; all tokens are in pages
CONSTANT_ROWS = [
    Case(keys=keys, values=values, **_WHOLE)
    for keys, values in (
        ("int2-channel", "int2-token"),
        ("int4-token", "int4-token"),
        ("int8-token", "int4-token"),
        ("int4-channel", "int2-token-g32"),
    )
]
HEAVY_TOKEN = Case(keys="int8-token", values="int2-token", **_WHOLE | {"lengths": (64 * 128,)})


def spread_cases(**options) -> list[Case]:
    """Scales over twelve orders of magnitude within a page, and keys that are tiny altogether."""
    keys = (
        *("int2-channel", "int4-channel", "int8-channel-g32", "int2-channel-g32", "int8-token"),
        *("int4-token-g32", "boosted2-r0.125", "fp8", "fp8-centered"),
    )
    values = ("int2-token", "int4-token", "int8-token", "int2-token-g32", "int4-token-g64", "int4-channel", "fp8")
    half, bf16 = torch.float16, torch.bfloat16
    return [
        *(Case(keys="int8-token", values=name, spread="values", **options) for name in values),
        *(Case(keys=name, values="int8-token", spread="keys", **options) for name in keys),
        *(Case(keys=name, values="int8-token", key_size=2.0**-power, dtype=dtype, **options)
          for name in keys[:4] + keys[6:] for power, dtype in ((12, half), (14, bf16), (16, bf16))),
    ]  # fmt: skip


GPU_SPREAD = spread_cases(head_dim=128, page_size=128, residual=128, sink=32, lengths=(1000, 1, 417))
#: few enough for the interpreter
SMALL_SPREAD = [
    case
    for case in spread_cases(heads=2, groups=2, head_dim=64, lengths=(150,), page_size=64, residual=64)
    if (case.spread == "values" and case.values in ("int2-token", "int4-token-g64"))
    or (case.spread == "keys" and case.keys in ("int2-channel", "int4-channel"))
    or (case.key_size == 2.0**-12 and case.keys in ("int2-channel", "boosted2-r0.125"))
]


def attend_once(attend, case: Case, k: torch.Tensor, v: torch.Tensor, query: torch.Tensor, device: str):
    """What one query `[D]` gets of stored keys and values `[n, D]`, and what the reference gives: `[Dv]`, float32.

    The step's own token, all zeros, counts too.
    """
    store, dev = store_for(case, "cpu"), store_for(case, device)
    k, v = (x.to(case.dtype)[None, None] for x in (k, v))
    reference.OPERATIONS.append(StepInputs(None, k, v), store)
    copy_state(store.state, dev.state)
    new, q = torch.zeros(1, 1, 1, case.head_dim), query.to(case.dtype).float().expand(1, case.groups, 1, case.head_dim)
    exact = reference.OPERATIONS.attend(StepInputs(q, new, new, scaling=1.0), store)
    q, new = (x.to(device, case.dtype) for x in (q, new))
    out = attend(StepInputs(q, new, new), dev)
    return out[0, 0, 0].float().cpu(), exact[0, 0, 0]


def check_constant_rows(attend, case: Case, device: str, seed: int) -> None:
    """Equal weights. Every other token's value is 1 in all channels, the others' mean is 0: the output's is 0.5."""
    tokens = case.lengths[0]
    v = torch.linspace(-0.15, 0.15, case.head_dim)[torch.randperm(case.head_dim, generator=generator(case, seed))]
    v = torch.where(torch.arange(tokens)[:, None] % 2 == 0, 1.0, v)
    out, _ = attend_once(attend, case, torch.zeros_like(v), v, torch.zeros(case.head_dim), device)
    assert abs(out.mean() * (tokens + 1) / tokens - 0.5) < 2e-3


def check_heavy_token(attend, case: Case, device: str) -> None:
    """One of n tokens has the weight of 5 n others. Every other channel is -1 there and 1 elsewhere; the rest are 0."""
    tokens = case.lengths[0]
    k = torch.zeros(tokens, case.head_dim)
    k[tokens - 256, 0] = 1.0
    v = torch.arange(case.head_dim).remainder(2).float().expand(tokens, -1).clone()
    v[tokens - 256] *= -1.0
    query = torch.zeros(case.head_dim)
    query[0] = math.log(5 * tokens)
    out, exact = attend_once(attend, case, k, v, query, device)
    assert out[::2].abs().max() < 1e-3
    assert (out[1::2] - (1 - 5) / 6).abs().max() < 5e-3
    assert (out - exact).abs().max() < 1e-3
