"""The wide latent kernel (`wgmma`): on a Hopper GPU where there is one, else compiled for the CPU (`cuda_emulator`)."""

import math
from types import SimpleNamespace

import cuda_emulator
import pytest
import torch
from latent_cases import Filled, LatentCase, check_attend, check_sizes_of_queries, check_steps, exact

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels.cuda import latent
from hf_lowbit_kv.triton_kernels.cuda.cuda_entry_points import launches

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == latent.WIDE_CAPABILITY
DEVICE = "cuda" if GPU else "cpu"
SEED = 0

pytestmark = pytest.mark.skipif(
    GPU != HOPPER or (not GPU and not cuda_emulator.available()),
    reason="needs a Hopper GPU, or g++ on an x86 processor",
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(latent, "WIDE_ROWS", 1)
    if not GPU:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: latent.WIDE_CAPABILITY)
        monkeypatch.setattr(
            latent, "load", lambda name, defines, device, arch_specific=False: cuda_emulator.Module(name, defines)
        )
        monkeypatch.setattr(latent, "properties", lambda device: SimpleNamespace(multi_processor_count=3))
        latent._module.cache_clear(), latent._wide_plan.cache_clear()
    yield latent
    latent._module.cache_clear(), latent._wide_plan.cache_clear()


SMALL = {"rank": 128, "rope": 32}
CASES = [
    LatentCase(lengths=(130, 1), heads=16),
    LatentCase(lengths=(0, 63, 64, 65), heads=10, tokens=2, dtype=torch.float16, **SMALL),
    LatentCase(lengths=(300,), heads=13, tokens=3, padded=True, rank=256, rope=64),
    pytest.param(LatentCase(lengths=(700,), heads=64, page_size=128, rope=16), marks=pytest.mark.slow),
    LatentCase(lengths=(257,), heads=40, spread=1000.0, jump=1e4),
    pytest.param(LatentCase(lengths=(257,), heads=40, jump=1e-4, dtype=torch.float16), marks=pytest.mark.slow),
    LatentCase(lengths=(150,), heads=32, zeros=True, dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend(case, kernels):
    check_attend(kernels, case, DEVICE, SEED, wide=True)


@pytest.mark.parametrize(
    "case",
    [CASES[2], LatentCase(lengths=(500, 3), heads=20, tokens=2), LatentCase(lengths=(9000,), heads=16, rope=16)],
    ids=str,
)
def test_merging_row_by_row(case, kernels, monkeypatch):
    monkeypatch.setattr(latent, "MERGE_ROWS", 1)
    if case.lengths == (9000,):  # more splits than lanes
        if not GPU:
            pytest.skip("takes long in the emulator")
        monkeypatch.setattr(latent, "split_count", lambda *_: 70)
    before = launches.get("latent_merge_rows", 0)
    check_attend(kernels, case, DEVICE, SEED, wide=True)
    if case.lengths != (9000,):
        check_steps(kernels, case, 2, DEVICE, SEED)
    assert launches["latent_merge_rows"] > before


@pytest.mark.parametrize(
    "case", [CASES[0], LatentCase(lengths=(257,), heads=32, spread=1000.0, dtype=torch.float16)], ids=str
)
def test_queries_of_all_sizes(case, kernels):
    check_sizes_of_queries(kernels, case, DEVICE, SEED, wide=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_attend_at_deepseek_sizes(heads, tokens, kernels):
    sizes = {"heads": heads, "tokens": tokens, "rank": 512, "rope": 64, "page_size": 128}
    check_attend(kernels, LatentCase(lengths=(1, 63, 64, 65, 1000, 8192), **sizes), DEVICE, SEED, wide=True)
    check_attend(kernels, LatentCase(lengths=(1000, 64), spread=1000.0, jump=1e4, **sizes), DEVICE, SEED, wide=True)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fewer_stages(stages, kernels, monkeypatch):
    monkeypatch.setattr(latent, "WIDE_SHAPES", {16: (stages, 1)})
    check_attend(kernels, LatentCase(lengths=(900, 70), heads=16), DEVICE, SEED, wide=True)


def test_shared_memory_has_room_for_every_width(kernels):
    for rank in range(128, 513, 128):
        for rope in latent.ROPES:
            for columns, (wanted, _) in latent.WIDE_SHAPES.items():
                assert 2 <= latent.wide_stages(rank, rope, columns, wanted) <= wanted
    spec = LatentCase(page_size=128).spec
    how = latent._wide_plan(
        spec, 512, 128, torch.bfloat16, 64, latent.wide_stages(512, 128, 64, 4), 1, torch.device(DEVICE)
    )
    assert latent.WIDE_SHARED - 50_000 < how.shared <= latent.WIDE_SHARED


def test_latents_of_zeros_are_exact(kernels):
    filled = Filled(LatentCase(lengths=(150,), heads=32, zeros=True), DEVICE, SEED)
    case = filled.case
    found = kernels.OPERATIONS.attend(StepInputs(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    assert torch.equal(found, torch.zeros_like(found))


def test_one_long_row_beside_zeros(kernels):
    """Tokens of zeros have a tiny scale: they take weight and give nothing."""
    case = LatentCase(lengths=(64,), heads=20)
    filled = Filled(case, DEVICE, SEED)
    zeros = torch.zeros(1, 1, 64, case.rank, dtype=case.dtype, device=DEVICE)
    reference.OPERATIONS.append(StepInputs(None, zeros, filled.random(1, 1, 64, case.rope)), filled.store)
    found = kernels.OPERATIONS.attend(StepInputs(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    truth = exact(filled)
    assert (found.float() - truth).norm() < 0.06 * truth.norm()


def test_weights_far_below_those_of_an_early_token_are_kept(kernels):
    """An attention sink: the first token outweighs each of the others by 2^20. What they add in channels of their own is kept,
    but for the 127 tokens of its own block, whose weights are quantized with it."""
    case, many = LatentCase(lengths=(0,), heads=32), 1500
    filled = Filled(case, DEVICE, SEED, room=many)
    filled.q[..., : case.rank], filled.q[..., case.rank :] = 0, 1
    content, rope = filled.random(1, 1, many, case.rank).abs(), torch.zeros(1, 1, many, case.rope, device=DEVICE)
    content[:, :, 1:, 0] = content[:, :, 0, 1:] = 0
    rope[:, :, 0] = 20 * math.log(2) / case.scaling / case.rope
    reference.OPERATIONS.append(StepInputs(None, content, rope.to(case.dtype)), filled.store)
    filled.k, filled.v = filled.k * 0, torch.full_like(filled.v, -1e3)  # the chunk's own token has no weight
    found = kernels.OPERATIONS.attend(StepInputs(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    truth = exact(filled)
    assert 0 < truth[..., 1:].max() < 0.01 * truth[..., 0].min()
    torch.testing.assert_close(found.float()[..., 1:], truth[..., 1:], rtol=127 / many + 0.03, atol=0)


def test_steps(kernels):
    check_steps(kernels, LatentCase(lengths=(62, 0), heads=20), 3, DEVICE, SEED)


@pytest.mark.skipif(GPU, reason="races are seen in the emulator")
@pytest.mark.parametrize(
    "barrier",
    [
        "maxima_ready",
        "renewed_weights_ready",
        "stages_free",
    ],
)
def test_a_missing_barrier_is_seen(barrier, kernels, monkeypatch):
    without = {"latent_wide.cu": barrier}
    monkeypatch.setattr(
        latent,
        "load",
        lambda name, defines, device, arch_specific=False: cuda_emulator.Module(name, defines, without.get(name)),
    )
    with pytest.raises(AssertionError, match=r"races in shared memory|plain"):
        check_attend(kernels, LatentCase(lengths=(900,), heads=20), DEVICE, SEED, wide=True)
