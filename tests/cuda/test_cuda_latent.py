"""The latent kernels (MLA): on a GPU where there is one, else compiled for the CPU (`cuda_emulator`)."""

from __future__ import annotations

from types import SimpleNamespace

import cuda_emulator
import pytest
import torch
from latent_cases import (
    Filled,
    LatentCase,
    check_append,
    check_attend,
    check_sizes_of_queries,
    check_steps,
    compare,
    exact,
)
from marked import slow_case

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import Chunk
from hf_lowbit_kv.triton_kernels.cuda import latent

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SEED = 0

pytestmark = pytest.mark.skipif(
    not GPU and not cuda_emulator.available(), reason="needs a GPU, or g++ on an x86 processor"
)


@pytest.fixture(autouse=True, params=["convert", slow_case("move")])
def kernels(request, monkeypatch):
    convert = request.param == "convert"
    monkeypatch.setattr(latent, "CONVERT", convert)
    if not GPU:
        monkeypatch.setattr(latent, "converts", lambda device: convert)
        # a row is shared by several blocks
        monkeypatch.setattr(
            latent, "load", lambda name, defines, device, arch_specific=False: cuda_emulator.Module(name, defines)
        )
        monkeypatch.setattr(latent, "properties", lambda device: SimpleNamespace(multi_processor_count=3))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(latent, "WIDE_ROWS", 10**6)
    latent._module.cache_clear()
    yield latent
    latent._module.cache_clear()


CASES = [
    LatentCase(),
    LatentCase(lengths=(0, 63, 64, 65), heads=4, tokens=2, dtype=torch.float16),
    LatentCase(lengths=(300,), heads=5, tokens=3, padded=True, rank=192, rope=64),
    LatentCase(lengths=(200, 90), rank=64, rope=16, heads=20, page_size=128),
    LatentCase(lengths=(300,), heads=5, tokens=3, padded=True, rank=64, rope=16, page_size=128),
    LatentCase(lengths=(257,), spread=1000.0, jump=1e4),
    LatentCase(lengths=(257,), jump=1e-4, dtype=torch.float16),
    LatentCase(lengths=(150,), zeros=True, dtype=torch.float16),
]


def both(cases: list[LatentCase]) -> list:
    """With both kernels. Each is a compilation of its own: moving bits is fast for the first case, other sizes for one."""
    return [
        *(("convert", case) if case.rank != 192 else slow_case("convert", case) for case in cases),
        *(("move", case) if case == CASES[0] else slow_case("move", case) for case in cases),
    ]


@pytest.mark.parametrize(("kernels", "case"), both(CASES), indirect=["kernels"], ids=str)
def test_attend(case, kernels):
    check_attend(kernels, case, DEVICE, SEED)


@pytest.mark.parametrize(
    ("kernels", "case"),
    both([CASES[0], LatentCase(lengths=(257,), heads=40, spread=1000.0, dtype=torch.float16)]),
    indirect=["kernels"],
    ids=str,
)
def test_queries_of_all_sizes(case, kernels):
    check_sizes_of_queries(kernels, case, DEVICE, SEED)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_attend_at_deepseek_sizes(heads, tokens, kernels):
    sizes = {"heads": heads, "tokens": tokens, "rank": 512, "rope": 64, "page_size": 128}
    check_attend(kernels, LatentCase(lengths=(1, 63, 64, 65, 1000, 8192), **sizes), DEVICE, SEED)
    check_attend(kernels, LatentCase(lengths=(1000, 64), spread=1000.0, jump=1e4, **sizes), DEVICE, SEED)


def test_latents_of_zeros_are_exact(kernels):
    case = LatentCase(lengths=(150,), zeros=True)
    filled = Filled(case, DEVICE, SEED)
    found = kernels.OPERATIONS.attend(Chunk(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    assert torch.equal(found, torch.zeros_like(found))


def test_one_long_row_beside_zeros(kernels):
    """Tokens of zeros have a tiny scale: they take weight and give nothing."""
    case = LatentCase(lengths=(64,), heads=8)
    filled = Filled(case, DEVICE, SEED)
    zeros = torch.zeros(1, 1, 64, case.rank, dtype=case.dtype, device=DEVICE)
    reference.OPERATIONS.append(Chunk(None, zeros, filled.random(1, 1, 64, case.rope)), filled.store)
    found = kernels.OPERATIONS.attend(Chunk(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    torch.testing.assert_close(found.float(), exact(filled), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (LatentCase(lengths=(62, 0), heads=2), 4),
        (LatentCase(lengths=(60, 5), heads=2, tokens=3, padded=True), 3),
    ],
    ids=str,
)
def test_steps(case, steps, kernels):
    check_steps(kernels, case, steps, DEVICE, SEED)


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (LatentCase(lengths=(0, 0)), [1, 70, 5]),
        slow_case(LatentCase(lengths=(30, 3), padded=True, rank=192, rope=64), [20, 70]),
        (LatentCase(lengths=(64,), jump=1e4, spread=1000.0, rank=64, rope=16, page_size=128), [64, 70]),
    ],
    ids=str,
)
def test_append(case, chunks, kernels):
    check_append(kernels, case, chunks, DEVICE, SEED)


def test_tokens_of_nan_and_inf(kernels):
    """The reference's bytes."""
    case = LatentCase(lengths=(3,), tokens=5)
    filled, twin = Filled(case, DEVICE, SEED), Filled(case, DEVICE, SEED)
    for each in (filled, twin):
        for token, bad in enumerate((float("nan"), -float("nan"), float("inf"), -float("inf"))):
            each.k[:, :, token, 7 * token] = bad
    kernels.OPERATIONS.append(Chunk(None, filled.k, filled.v), filled.store)
    reference.OPERATIONS.append(Chunk(None, twin.k, twin.v), twin.store)
    compare(filled.store, twin.store)


def test_no_room_left(kernels):
    case = LatentCase(lengths=(60,), heads=2, tokens=4)
    filled = Filled(case, DEVICE, SEED, room=0)
    room = filled.store.state.page_address.shape[1] * case.page_size
    for _ in range(2):
        kernels.OPERATIONS.step(filled.step, filled.store)
    assert int(filled.store.state.length[0, 0]) == room
    assert int(filled.store.state.lost[0, 0]) == 60 + 8 - room


@pytest.mark.skipif(GPU, reason="races are seen in the emulator")
@pytest.mark.parametrize(
    "barrier",
    [
        "kv_tile_ready",  # and the other stage is free
        "weights_ready",
    ],
)
def test_a_missing_barrier_is_seen(barrier, kernels, monkeypatch):
    monkeypatch.setattr(latent, "load", lambda name, defines, device: cuda_emulator.Module(name, defines, barrier))
    with pytest.raises(AssertionError, match="races in shared memory"):
        check_attend(kernels, LatentCase(lengths=(300,)), DEVICE, SEED)
