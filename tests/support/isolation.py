"""NaN and Inf in one KV head of one row: what every other row and head stores and answers is bit for bit what it is without."""

import dataclasses
from typing import Any

import torch
from kernel_cases import Case, generator, random_mask, random_step, random_tokens, store_for
from sequence_operations import KINDS, SLOW_KINDS

from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore, read_pages
from hf_lowbit_kv.storage.step import StepInputs

LENGTHS = (100, 75)
#: places of the first chunk (sink, page, tail), and their contents
PLACES, POISONS = (1, 20, 45, 98), (float("nan"), float("inf"), float("-inf"))


def cases() -> list[Case]:
    """One of each kind of keys and values, one that stores straight into pages, and long chunks."""
    found = []
    for kind, options in KINDS.items():
        if not kind.startswith("latent"):
            named = {"keys": options["key_format"], "values": options["value_format"]}
            named |= {name: x for name, x in options.items() if name.endswith("transform")}
            found.append(Case(**named, lengths=LENGTHS, groups=2))
    found += [
        dataclasses.replace(case, residual=0, sink=0, lengths=LENGTHS, groups=2)
        for case in (Case(keys="int8-token", values="int8-token"), Case(keys="dense", values="dense"))
    ]
    return found + [dataclasses.replace(case, tokens=40) for case in (found[0], found[2])]


def in_every_run(case: Case) -> bool:
    """Whether `make gpu-test` has a case: not those whose kernels have the paths of another's."""
    others = [KINDS[name] for name in (*SLOW_KINDS, "int2-channel/int2-token", "kitty-random")]
    return all(
        (case.keys, case.values, case.transform) != (each["key_format"], each["value_format"], each.get("transform"))
        for each in others
    )


def poisoned(x: torch.Tensor, row: int, head: int, values: tuple[float, ...], places: tuple[int, ...]) -> torch.Tensor:
    """`x` `[B, H, n, D]` with these values, one after the other, in some channels of these tokens of one row's KV head."""
    x = x.clone()
    for number, place in enumerate(places):
        x[row, head, place, [0, 3, 17]] = values[number % len(values)]
    return x


def others(x: torch.Tensor) -> torch.Tensor:
    """All but the poisoned heads, of `[B, H, ...]`, as bytes."""
    rest = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    rest[0, 0] = rest[1, 1] = False
    return x[rest].contiguous().view(torch.uint8)


def held(module: Any, case: Case, store: PagedStore) -> list[torch.Tensor]:
    """Everything that a store's rows and heads have, `[B, H, ...]` each."""
    state, spec = store.state, case.spec
    pages = read_pages(state.pool, state.page_table[:, : int(state.paged.min()) // spec.page_size]).transpose(1, 2)
    counters = [state.length[..., None], state.paged[..., None], state.lost[..., None]]
    return [pages, *module.OPERATIONS.read(store, max(case.lengths)), *counters]


def check(module: Any, case: Case, device: str, seed: int, values: tuple[float, ...] = POISONS) -> None:
    """Keys of the first row's first KV head are poisoned, and values of the second row's second. module: with the entry points
    of a backend."""
    gen = generator(case, seed)
    first = random_tokens(case, max(case.lengths), gen)
    mask = random_mask(torch.tensor(case.lengths), max(case.lengths), gen)
    mask[:, PLACES] = True
    step = random_step(case, gen)
    results = []
    for dirty in (False, True):
        (k, v), (new_k, new_v) = first, (step.k, step.v)
        if dirty:
            k, v = poisoned(k, 0, 0, values, PLACES), poisoned(v, 1, 1, values, PLACES)
            new_k, new_v = poisoned(new_k, 0, 0, values, (0,)), poisoned(new_v, 1, 1, values, (0,))
        k, v, new_k, new_v, query = (x.to(device) for x in (k, v, new_k, new_v, step.q))
        store = store_for(case, device, poison=False)
        module.OPERATIONS.append(StepInputs(None, k, v, mask.to(device)), store)
        out = module.OPERATIONS.attend(StepInputs(query, new_k, new_v, scaling=step.scaling), store)
        module.OPERATIONS.append(StepInputs(None, new_k, new_v), store)
        by_head = out.unflatten(2, (case.heads, -1)).transpose(1, 2)
        results.append([by_head, *held(module, case, store)])
    clean, dirty = results
    assert clean[0].isfinite().all()
    for row in (0, 1):
        assert not torch.equal(clean[0][row, row], dirty[0][row, row]), "the poison was not read"
    for number, (wanted, found) in enumerate(zip(clean, dirty, strict=True)):
        assert torch.equal(others(wanted), others(found)), f"others are not what they are without: result {number}"


def check_latents(module: Any, spec: LayerSpec, device: str, seed: int, value: float) -> None:
    """The first row of three is poisoned, in the content and in the RoPE part. A latent has one KV head."""
    gen = torch.Generator().manual_seed(seed)
    rank, rope, heads, count, dtype = 128, 32, 16, 140, torch.bfloat16
    query = torch.randn(3, heads, 1, rank + rope, generator=gen).to(dtype)
    streams = [torch.randn(3, 1, count + 1, width, generator=gen).to(dtype) for width in (rank, rope)]
    mask = random_mask(torch.tensor([count, 90, count]), count, gen)
    results = []
    for dirty in (False, True):
        chunks = [poisoned(x, 0, 0, (value,), (1, 70, count - 1, count)) if dirty else x for x in streams]
        c, r = (x.to(device) for x in chunks)
        store = PagedStore(spec, 3, 1, rank, rope, dtype, device, 300)
        old, new = (c[:, :, :count], r[:, :, :count]), (c[:, :, count:], r[:, :, count:])
        module.OPERATIONS.append(StepInputs(None, *old, mask.to(device)), store)
        out = module.OPERATIONS.attend(StepInputs(query.to(device), *new, scaling=(rank + rope) ** -0.5), store)
        module.OPERATIONS.append(StepInputs(None, *new), store)
        pages = read_pages(store.state.pool, store.state.page_table)
        results.append([out, *module.OPERATIONS.read(store, count + 1), pages, store.state.length])
    clean, dirty = results
    assert clean[0].isfinite().all()
    assert not torch.equal(clean[0][0], dirty[0][0]), "the poison was not read"
    for number, (wanted, found) in enumerate(zip(clean, dirty, strict=True)):
        same = torch.equal(wanted[1:].contiguous().view(torch.uint8), found[1:].contiguous().view(torch.uint8))
        assert same, f"other rows are not what they are without: result {number}"
