"""The kernel for latents (MLA) in the model's dtype: on a GPU where there is one, else for the CPU (`cuda_emulator`)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import cuda_emulator
import pytest
import torch
from latent_cases import Filled, LatentCase, check_append, check_attend, check_sizes_of_queries, check_steps
from marked import slow_case

from hf_lowbit_kv.backends.choice import BACKENDS, Served
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import LayerStore
from hf_lowbit_kv.storage.step import Chunk
from hf_lowbit_kv.triton_kernels.cuda import latent
from hf_lowbit_kv.triton_kernels.cuda.cuda_entry_points import launches

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SEED = 0

pytestmark = pytest.mark.skipif(
    not GPU and not cuda_emulator.available(), reason="needs a GPU, or g++ on an x86 processor"
)


@pytest.fixture(autouse=True, params=["three stages", slow_case("two stages")])
def kernels(request, monkeypatch):
    """With the shared memory of two kinds of GPUs, KiB; a row is shared by several blocks."""
    shared = {"three stages": 228, "two stages": 100}[request.param]
    found = SimpleNamespace(multi_processor_count=3, shared_memory_per_multiprocessor=shared * 1024)
    if not GPU:
        monkeypatch.setattr(
            latent, "load", lambda name, defines, device, arch_specific=False: cuda_emulator.Module(name, defines)
        )
        monkeypatch.setattr(latent, "converts", lambda device: False)
        monkeypatch.setattr(latent, "properties", lambda device: found)
    else:
        counted = latent.properties(torch.device("cuda", 0)).multi_processor_count
        monkeypatch.setattr(
            latent, "properties", lambda device: SimpleNamespace(**{**vars(found), "multi_processor_count": counted})
        )
    monkeypatch.setattr(latent, "DENSE_SHAPES", ((2, 3),) if shared == 228 else ((1, 2),))
    latent._module.cache_clear()
    yield latent
    latent._module.cache_clear()


def dense(**options) -> LatentCase:
    return LatentCase(content="dense", **options)


CASES = [
    dense(),
    dense(lengths=(0, 31, 32, 33), heads=4, tokens=2, dtype=torch.float16),
    dense(lengths=(300,), heads=5, tokens=3, padded=True, rank=192, rope=64),
    dense(lengths=(200, 90), rank=64, rope=16, heads=20, page_size=128),
    dense(lengths=(300,), heads=5, tokens=3, padded=True, rank=64, rope=16, page_size=128),
    dense(lengths=(257,), spread=1000.0, jump=1e4),
    dense(lengths=(257,), jump=1e-4, dtype=torch.float16),
    dense(lengths=(150,), zeros=True, dtype=torch.float16),
]


def both(cases: list[LatentCase]) -> list:
    """With both numbers of stages. Each is a compilation of its own: two are fast for the first case, other sizes for one."""
    return [
        *(("three stages", case) if case.rank != 192 else slow_case("three stages", case) for case in cases),
        *(("two stages", case) if case == CASES[0] else slow_case("two stages", case) for case in cases),
    ]


@pytest.mark.parametrize(("kernels", "case"), both(CASES), indirect=["kernels"], ids=str)
def test_attend(case, kernels):
    before = launches.get("latent_dense_attend", 0)
    check_attend(kernels, case, DEVICE, SEED)
    assert launches["latent_dense_attend"] == before + 1


@pytest.mark.parametrize(
    ("kernels", "case"),
    both([dense(), dense(lengths=(257,), heads=40, spread=1000.0, dtype=torch.float16)]),
    indirect=["kernels"],
    ids=str,
)
def test_queries_of_all_sizes(case, kernels):
    check_sizes_of_queries(kernels, case, DEVICE, SEED)


def test_what_lies_behind_a_row_is_no_number(kernels):
    """A page may have held another row's tokens: NaN there must not show."""
    filled = Filled(case := dense(lengths=(70, 3)), DEVICE, SEED)
    expected = kernels.OPERATIONS.attend(Chunk(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    state = filled.store.state
    for row, length in enumerate(case.lengths):
        for page in range(length // case.page_size, state.page_table.shape[1]):
            numbers = state.pool[0][int(state.page_table[row, page]), 0].view(case.dtype)
            content = numbers[: case.page_size * case.rank].view(case.page_size // 8, -1, 8, 8)
            rope = numbers[case.page_size * case.rank :].view(case.page_size // 8, -1, 8, 8)
            for part in (content, rope):
                tokens = part.transpose(1, 2).flatten(0, 1)  # a copy: bricks of eight tokens come apart
                tokens[max(length - page * case.page_size, 0) :] = float("nan")
                part.copy_(tokens.unflatten(0, (-1, 8)).transpose(1, 2))
    found = kernels.OPERATIONS.attend(
        Chunk(filled.q, filled.k, filled.v, scaling=case.scaling), LayerStore(state, case.spec)
    )
    assert torch.isfinite(expected).all()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attend_at_deepseek_sizes(heads, tokens, dtype, kernels):
    sizes = {"heads": heads, "tokens": tokens, "rank": 512, "rope": 64, "page_size": 128, "dtype": dtype}
    check_attend(kernels, dense(lengths=(1, 31, 32, 33, 1000, 8192), **sizes), DEVICE, SEED)
    check_attend(kernels, dense(lengths=(1000, 64), spread=1000.0, jump=1e4, **sizes), DEVICE, SEED)


@pytest.mark.parametrize(
    ("case", "steps"),
    [(dense(lengths=(62, 0), heads=2), 4), (dense(lengths=(60, 5), heads=2, tokens=3, padded=True), 3)],
    ids=str,
)
def test_steps(case, steps, kernels):
    check_steps(kernels, case, steps, DEVICE, SEED)


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (dense(lengths=(0, 0)), [1, 70, 5]),
        slow_case(dense(lengths=(30, 3), padded=True, rank=192, rope=64), [20, 70]),
        (dense(lengths=(64,), rank=64, rope=16, page_size=128), [64, 70]),
    ],
    ids=str,
)
def test_append(case, chunks, kernels):
    check_append(kernels, case, chunks, DEVICE, SEED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_query_rows_are_left_to_the_kernel_for_prompts(dtype, kernels, monkeypatch):
    """The latent is read once for every 16 rows, and unpacked once for all."""
    calls = []
    monkeypatch.setattr(latent, "why_no_launcher", lambda: None)
    monkeypatch.setattr(latent.prompt, "attend", lambda chunk, layer: calls.append(chunk.q.shape) or chunk.q)
    case = dense(lengths=(3,), heads=latent.DENSE_ROWS // 2 + 1, tokens=2, rank=64, rope=16, dtype=dtype)
    filled = Filled(case, DEVICE, SEED)
    kernels.OPERATIONS.attend(Chunk(filled.q, filled.k, filled.v, scaling=case.scaling), filled.store)
    assert len(calls) == 1


@pytest.mark.skipif(GPU, reason="races are seen in the emulator")
@pytest.mark.parametrize(
    "barrier",
    [
        "kv_tile_ready",  # and the stage of the next copies is free
        "maxima_ready",
        "renewed_weights_ready",
    ],
)
def test_a_missing_barrier_is_seen(barrier, kernels, monkeypatch):
    monkeypatch.setattr(latent, "load", lambda name, defines, device: cuda_emulator.Module(name, defines, barrier))
    with pytest.raises(AssertionError, match="races in shared memory"):
        check_attend(kernels, dense(lengths=(300,)), DEVICE, SEED)


def served(spec: LayerSpec, widths: tuple[int, int]) -> str | None:
    return latent.why_not(spec, widths, torch.bfloat16, torch.device("cuda", 0))


def test_what_the_kernel_serves(kernels, monkeypatch):
    spec = get_preset("mla").spec()
    assert served(spec, (512, 64)) is None
    assert served(spec, (192, 128)) is None
    assert "latent rank" in str(served(spec, (500, 64)))
    assert "pages of 64" in str(served(dataclasses.replace(spec, page_size=32), (512, 64)))
    monkeypatch.setattr(latent, "DENSE_SHAPES", ((2, 3), (1, 2)))
    assert latent.dense_shape(512, 64, 228 * 1024) == (2, 3)
    assert latent.dense_shape(512, 64, 100 * 1024) == (1, 2)
    assert latent.dense_shape(512, 64, 64 * 1024) is None
    assert (
        latent.why_not_dense(512, 64, 64 * 1024)
        == "needs 75 KiB of shared memory for latents of 512 + 64 channels, not 64"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_default_of_a_gpu(kernels):
    served = Served(torch.device("cuda", 0), torch.bfloat16, get_preset("mla").spec(), (512, 64))
    assert BACKENDS["cuda"].why_not(served) is None
