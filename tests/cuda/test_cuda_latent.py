"""The latent kernels (MLA), for pages in FP8 and in the model's dtype: on a GPU where there is one, else compiled for the CPU
(`cuda_emulator`)."""

import dataclasses
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

from hf_lowbit_kv.backends.choice import BACKENDS, LayerSetup
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels.cuda import latent
from hf_lowbit_kv.triton_kernels.cuda.cuda_entry_points import launches

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SEED = 0

pytestmark = pytest.mark.skipif(
    not GPU and not cuda_emulator.available(), reason="needs a GPU, or g++ on an x86 processor"
)
#: kernels for FP8, whether they convert codes or move bits
FP8 = {"convert": True, "move": False}
#: kernels for the model's dtype: the shared memory of two kinds of GPUs, KiB, and the shapes that it has room for
DENSE = {"three stages": (228, ((2, 3),)), "two stages": (100, ((1, 2),))}
#: each kernel is a compilation of its own: the second of each is fast for few cases
SECOND = ("move", "two stages")


class Kernels:
    OPERATIONS = latent.OPERATIONS

    def __init__(self, kind: str):
        self.dense = kind in DENSE

    def case(self, case: LatentCase) -> LatentCase:
        """The case with pages that these kernels read."""
        return dataclasses.replace(case, content="dense" if self.dense else "fp8")

    def attend(self, filled: Filled, store=None) -> torch.Tensor:
        inputs = StepInputs(filled.q, filled.k, filled.v, scaling=filled.case.scaling)
        return self.OPERATIONS.attend(inputs, store or filled.store)


@pytest.fixture(
    autouse=True,
    params=[pytest.param(kind, marks=pytest.mark.slow) if kind in SECOND else kind for kind in (*FP8, *DENSE)],
)
def kernels(request, monkeypatch):
    """In the emulator a row is shared by several blocks."""
    kind, properties = request.param, {"multi_processor_count": 3}
    if kind in DENSE:
        shared, shapes = DENSE[kind]
        properties["shared_memory_per_multiprocessor"] = shared * 1024
        monkeypatch.setattr(latent, "DENSE_SHAPES", shapes)
    else:
        monkeypatch.setattr(latent, "CONVERT", FP8[kind])
        monkeypatch.setattr(latent, "WIDE_ROWS", 10**6)
    if GPU:
        properties["multi_processor_count"] = latent.properties(torch.device("cuda", 0)).multi_processor_count
    else:
        monkeypatch.setattr(
            latent, "load", lambda name, defines, device, arch_specific=False: cuda_emulator.Module(name, defines)
        )
        monkeypatch.setattr(latent, "converts", lambda device: FP8.get(kind, False))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if kind in DENSE or not GPU:
        monkeypatch.setattr(latent, "properties", lambda device: SimpleNamespace(**properties))
    latent._module.cache_clear()
    yield Kernels(kind)
    latent._module.cache_clear()


fp8_only = pytest.mark.parametrize("kernels", ["convert", pytest.param("move", marks=pytest.mark.slow)], indirect=True)
dense_only = pytest.mark.parametrize(
    "kernels", ["three stages", pytest.param("two stages", marks=pytest.mark.slow)], indirect=True
)

CASES = [
    LatentCase(),
    LatentCase(lengths=(0, 63, 64, 65), heads=4, tokens=2, dtype=torch.float16),
    LatentCase(lengths=(0, 31, 32, 33), heads=4, tokens=2, dtype=torch.float16),
    LatentCase(lengths=(300,), heads=5, tokens=3, padded=True, rank=192, rope=64),
    LatentCase(lengths=(200, 90), rank=64, rope=16, heads=20, page_size=128),
    LatentCase(lengths=(300,), heads=5, tokens=3, padded=True, rank=64, rope=16, page_size=128),
    LatentCase(lengths=(257,), spread=1000.0, jump=1e4),
    LatentCase(lengths=(257,), jump=1e-4, dtype=torch.float16),
    LatentCase(lengths=(150,), zeros=True, dtype=torch.float16),
]


def with_each(cases: list[LatentCase]) -> list:
    """With each kernel: the second ones are fast for the first case, other sizes slow for all."""
    return [
        pytest.param(kind, case, marks=pytest.mark.slow)
        if case.rank == 192 or (kind in SECOND and case != CASES[0])
        else (kind, case)
        for kind in (*FP8, *DENSE)
        for case in cases
    ]


@pytest.mark.parametrize(("kernels", "case"), with_each(CASES), indirect=["kernels"], ids=str)
def test_attend(case, kernels):
    before = launches.get("latent_dense_attend", 0)
    check_attend(kernels, kernels.case(case), DEVICE, SEED)
    assert launches.get("latent_dense_attend", 0) == before + kernels.dense


@pytest.mark.parametrize(
    ("kernels", "case"),
    with_each([CASES[0], LatentCase(lengths=(257,), heads=40, spread=1000.0, dtype=torch.float16)]),
    indirect=["kernels"],
    ids=str,
)
def test_queries_of_all_sizes(case, kernels):
    check_sizes_of_queries(kernels, kernels.case(case), DEVICE, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_attend_at_deepseek_sizes(heads, tokens, kernels):
    for dtype in (torch.bfloat16, torch.float16) if kernels.dense else (torch.bfloat16,):
        sizes = {"heads": heads, "tokens": tokens, "rank": 512, "rope": 64, "page_size": 128, "dtype": dtype}
        for case in (
            LatentCase(lengths=(1, 31, 32, 33, 63, 64, 65, 1000, 8192), **sizes),
            LatentCase(lengths=(1000, 64), spread=1000.0, jump=1e4, **sizes),
        ):
            check_attend(kernels, kernels.case(case), DEVICE, SEED)


@fp8_only
def test_latents_of_zeros_are_exact(kernels):
    found = kernels.attend(Filled(LatentCase(lengths=(150,), zeros=True), DEVICE, SEED))
    assert torch.equal(found, torch.zeros_like(found))


@fp8_only
def test_one_long_row_beside_zeros(kernels):
    """Tokens of zeros have a tiny scale: they take weight and give nothing."""
    filled = Filled(case := LatentCase(lengths=(64,), heads=8), DEVICE, SEED)
    zeros = torch.zeros(1, 1, 64, case.rank, dtype=case.dtype, device=DEVICE)
    reference.OPERATIONS.append(StepInputs(None, zeros, filled.random(1, 1, 64, case.rope)), filled.store)
    torch.testing.assert_close(kernels.attend(filled).float(), exact(filled), rtol=0.01, atol=0.01)


@dense_only
def test_bytes_past_a_row_may_be_nan(kernels):
    """A page may have held another row's tokens: NaN there must not show."""
    filled = Filled(case := LatentCase(lengths=(70, 3), content="dense"), DEVICE, SEED)
    expected = kernels.attend(filled)
    state = filled.store.state
    for row, length in enumerate(case.lengths):
        for page in range(length // case.page_size, state.page_table.shape[1]):
            numbers = state.pool[0][int(state.page_table[row, page]), 0].view(case.dtype)
            content = numbers[: case.page_size * case.rank].view(case.page_size // 8, -1, 8, 8)
            rope = numbers[case.page_size * case.rank :].view(case.page_size // 8, -1, 8, 8)
            for part in (content, rope):
                tokens = part.transpose(1, 2).flatten(0, 1)  # a copy: core matrices of eight tokens come apart
                tokens[max(length - page * case.page_size, 0) :] = float("nan")
                part.copy_(tokens.unflatten(0, (-1, 8)).transpose(1, 2))
    assert torch.isfinite(expected).all()
    assert torch.equal(kernels.attend(filled, PagedStore.over(state, case.spec)), expected)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (LatentCase(lengths=(62, 0), heads=2), 4),
        (LatentCase(lengths=(60, 5), heads=2, tokens=3, padded=True), 3),
    ],
    ids=str,
)
def test_steps(case, steps, kernels):
    check_steps(kernels, kernels.case(case), steps, DEVICE, SEED)


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (LatentCase(lengths=(0, 0)), [1, 70, 5]),
        pytest.param(LatentCase(lengths=(30, 3), padded=True, rank=192, rope=64), [20, 70], marks=pytest.mark.slow),
        (LatentCase(lengths=(64,), jump=1e4, spread=1000.0, rank=64, rope=16, page_size=128), [64, 70]),
    ],
    ids=str,
)
def test_append(case, chunks, kernels):
    check_append(kernels, kernels.case(case), chunks, DEVICE, SEED)


@fp8_only
def test_tokens_of_nan_and_inf(kernels):
    """The reference's bytes."""
    case = LatentCase(lengths=(3,), tokens=5)
    filled, twin = Filled(case, DEVICE, SEED), Filled(case, DEVICE, SEED)
    for each in (filled, twin):
        for token, bad in enumerate((float("nan"), -float("nan"), float("inf"), -float("inf"))):
            each.k[:, :, token, 7 * token] = bad
    kernels.OPERATIONS.append(StepInputs(None, filled.k, filled.v), filled.store)
    reference.OPERATIONS.append(StepInputs(None, twin.k, twin.v), twin.store)
    compare(filled.store, twin.store)


@fp8_only
def test_no_room_left(kernels):
    case = LatentCase(lengths=(60,), heads=2, tokens=4)
    filled = Filled(case, DEVICE, SEED, room=0)
    room = filled.store.state.page_address.shape[1] * case.page_size
    for _ in range(2):
        kernels.OPERATIONS.step(filled.step, filled.store)
    assert int(filled.store.state.length[0, 0]) == room
    assert int(filled.store.state.lost[0, 0]) == 60 + 8 - room


@dense_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_query_rows_are_left_to_the_kernel_for_prompts(dtype, kernels, monkeypatch):
    """The latent is read once for every 16 rows, and unpacked once for all."""
    calls = []
    monkeypatch.setattr(latent, "why_triton_cannot_launch", lambda: None)
    monkeypatch.setattr(latent.prompt, "attend", lambda chunk, layer: calls.append(chunk.q.shape) or chunk.q)
    sizes = {"heads": latent.DENSE_ROWS // 2 + 1, "tokens": 2, "rank": 64, "rope": 16, "dtype": dtype}
    kernels.attend(Filled(LatentCase(lengths=(3,), content="dense", **sizes), DEVICE, SEED))
    assert len(calls) == 1


@pytest.mark.skipif(GPU, reason="races are seen in the emulator")
@pytest.mark.parametrize(
    ("kernels", "barrier"),
    [
        ("convert", "kv_tile_ready"),  # and the other stage is free
        ("convert", "weights_ready"),
        ("three stages", "kv_tile_ready"),  # and the stage of the next copies is free
        ("three stages", "maxima_ready"),
        ("three stages", "renewed_weights_ready"),
        *(pytest.param("move", barrier, marks=pytest.mark.slow) for barrier in ("kv_tile_ready", "weights_ready")),
        *(
            pytest.param("two stages", barrier, marks=pytest.mark.slow)
            for barrier in ("kv_tile_ready", "maxima_ready", "renewed_weights_ready")
        ),
    ],
    indirect=["kernels"],
)
def test_a_missing_barrier_is_seen(barrier, kernels, monkeypatch):
    monkeypatch.setattr(latent, "load", lambda name, defines, device: cuda_emulator.Module(name, defines, barrier))
    with pytest.raises(AssertionError, match="races in shared memory"):
        check_attend(kernels, kernels.case(LatentCase(lengths=(300,))), DEVICE, SEED)


def setup(spec: LayerSpec, widths: tuple[int, int]) -> str | None:
    return latent.why_not(spec, widths, torch.bfloat16, torch.device("cuda", 0))


@dense_only
def test_what_the_kernel_serves(kernels, monkeypatch):
    spec = get_preset("mla").spec()
    assert setup(spec, (512, 64)) is None
    assert setup(spec, (192, 128)) is None
    assert "latent rank" in str(setup(spec, (500, 64)))
    assert "pages of 64" in str(setup(dataclasses.replace(spec, page_size=32), (512, 64)))
    monkeypatch.setattr(latent, "DENSE_SHAPES", ((2, 3), (1, 2)))
    assert latent.dense_shape(512, 64, 228 * 1024) == (2, 3)
    assert latent.dense_shape(512, 64, 100 * 1024) == (1, 2)
    assert latent.dense_shape(512, 64, 64 * 1024) is None
    assert (
        latent.why_not_dense(512, 64, 64 * 1024)
        == "needs 75 KiB of shared memory for latents of 512 + 64 channels, not 64"
    )


@pytest.mark.gpu
@dense_only
def test_the_default_of_a_gpu(kernels):
    setup = LayerSetup(torch.device("cuda", 0), torch.bfloat16, get_preset("mla").spec(), (512, 64))
    assert BACKENDS["cuda"].why_not(setup) is None
