"""The CUDA kernels against the reference: the matrix and the checks of Triton's, on pages in fragment order.

What needs no GPU is in `test_cuda_without_gpu`, and in `test_cuda_emulated`.
"""

import contextlib
import dataclasses
import itertools

import kernel_checks as kernels
import pytest
import torch
from cases import tiny_models
from cuda_cases import LONG_CHUNKS, check_long_chunk, fragment
from fp8_rows import SPECIAL, check_special_rows
from gpu_selection import in_every_run, is_stored_in_every_run
from kernel_cases import Case, filled, generator, random_step
from kernel_matrix import (
    CODEBOOK_STORES,
    GRAPHS,
    SMALL,
    SMALL_STORES,
    TRANSFORMS,
    matrix,
    static_attends,
    static_stores,
    stores,
    transformed,
)
from scale_cases import CONSTANT_ROWS, GPU_SPREAD, HEAVY_TOKEN, check_constant_rows, check_heavy_token

import hf_lowbit_kv as lb
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import geometry


@pytest.fixture
def launch(monkeypatch):
    from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points as launch

    monkeypatch.setattr(kernels, "launch", launch)
    return launch


def _half(cases):
    """Cases in the dtypes that these kernels compute in (`test_float32` covers the rest), and in formats that they cover."""

    def covered(case: Case) -> bool:
        return (
            case.dtype != torch.float32 and geometry.why_not(case.spec, case.dims, None, torch.device("cuda")) is None
        )

    return [case for case in cases if covered(case[0] if isinstance(case, tuple) else case)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case if in_every_run(case) else pytest.param(case, marks=pytest.mark.slow)
        for case in _half([*SMALL, *matrix(), *static_attends()])
    ],
    ids=str,
)
def test_attend(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_SPREAD, ids=str)
def test_scales_of_all_sizes(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CONSTANT_ROWS, ids=str)
def test_constant_rows(case, launch):
    check_constant_rows(kernels.attend_poisoned, fragment(case), "cuda", kernels.SEED)


@pytest.mark.gpu
def test_a_heavy_token_in_a_page_leaves_the_others_their_part(launch):
    check_heavy_token(kernels.attend_poisoned, fragment(dataclasses.replace(HEAVY_TOKEN, lengths=(1 << 16,))), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (case, chunks) if is_stored_in_every_run(case) else pytest.param(case, chunks, marks=pytest.mark.slow)
        for case, chunks in [*CODEBOOK_STORES, *_half([*SMALL_STORES, *stores(), *static_stores()])]
    ],
    ids=str,
)
def test_store(case, chunks, launch):
    kernels.check_store(fragment(case), chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_special_rows(case, launch):
    check_special_rows(launch.OPERATIONS.append, fragment(case), "cuda", generator(case, kernels.SEED))


#: beyond the common matrix: one block of query rows and several, rows split among many CTAs, many rows
SHAPES = [
    Case(heads=1, groups=groups, tokens=tokens, head_dim=128, page_size=128, residual=128, lengths=(3000, 5, 700), dtype=dtype)
    for groups, tokens in ((1, 8), (16, 1), (7, 3), (16, 8), (5, 2))
    for dtype in (torch.float16, torch.bfloat16)
] + [
    Case(keys="int2-channel", values="int4-token", head_dim=128, page_size=128, residual=128, lengths=(200000,), heads=1),
    Case(keys="int8-token", values="int2-token", head_dim=128, page_size=128, residual=0, lengths=(777, 90001), heads=2),
    Case(keys="dense", values="dense", head_dim=128, page_size=128, residual=0, sink=0, lengths=(129, 65000), heads=2),
    Case(head_dim=128, page_size=128, residual=128, lengths=tuple(range(0, 4000, 97)), heads=2),
    Case(head_dim=64, page_size=64, residual=64, lengths=(500,) * 3, capacity=60000, heads=2),
    *(
        Case(keys=keys, values=values, head_dim=128, page_size=page, residual=128, lengths=(3000, 5, 700), groups=4, tokens=4)
        for keys, values in (("int2-channel", "int2-token"), ("int4-token", "int2-token"), ("boosted2-r0.125", "int2-token"))
        for page in (64, 128)
    ),
] + [
    # every number of boosted columns (none, less than an operand has, one, several, all), and of tiles of query rows
    Case(
        keys=f"boosted2-r{ratio}", values="int2-token", head_dim=dim, page_size=(32, 64, 128, 256)[i % 4], residual=128,
        lengths=(1500, 300), groups=(1, 4, 16)[i % 3], dtype=(torch.float16, torch.bfloat16)[i % 2],
    )
    for i, (dim, ratio) in enumerate(itertools.product((64, 80, 96, 128, 256), (0, 0.125, 0.25, 1)))
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case, launch):
    kernels.check_attend(fragment(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CHUNKS, ids=str)
def test_long_chunks_without_triton(case, launch, monkeypatch):
    check_long_chunk(case, launch, monkeypatch)


@pytest.mark.begins_first
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "score"),
    [
        *((80, ""), (256, ""), (128, "-variance"), (128, "-range"), (128, "-random7")),
        *(pytest.param(head_dim, "", marks=pytest.mark.slow) for head_dim in (64, 96, 128)),
        *(
            pytest.param(head_dim, score, marks=pytest.mark.slow)
            for head_dim in (64, 80, 96, 256)
            for score in ("-variance", "-range", "-random7")
        ),
    ],
)
def test_boosted_pages(head_dim, score, launch):
    """Byte for byte: the same channels are chosen, for every score, head size and page size. Pages are packed after a
    chunk, and after a single token."""
    for i, ratio in enumerate((0.125, 0.25, 0.3, 1)):
        page, dtype = (32, 64, 128, 256)[i], (torch.float16, torch.bfloat16)[i % 2]
        keys = f"boosted2-r{ratio}{score}"
        case = Case(
            keys=keys,
            values="int2-token",
            head_dim=head_dim,
            page_size=page,
            residual=5,
            dtype=dtype,
            outliers=(head_dim // 16 + i) % 2 == 0,
        )
        kernels.check_store(fragment(case), [page + 3, *[0] * 8, page - 5, *[0] * 5])


@pytest.mark.gpu
def test_repeated_launches_agree(launch):
    """Blocks leave their counters as they found them, and nothing races: the same step gives the same up to rounding."""
    case = fragment(Case(head_dim=128, page_size=128, residual=128, lengths=(9000, 3000, 40, 12000)))
    gen = generator(case, kernels.SEED)
    _, dev = filled(case, gen, "cuda")
    step = random_step(case, gen).to("cuda")
    outs = [launch.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), dev) for _ in range(50)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["variable", "torch"])
def test_fixed_order(source, launch, monkeypatch):
    if source == "variable":
        monkeypatch.setenv(determinism.VARIABLE, "1")
    case = fragment(Case(head_dim=128, page_size=128, residual=128, lengths=(9000, 3000, 40, 12000)))
    gen = generator(case, kernels.SEED)
    _, dev = filled(case, gen, "cuda")
    step = random_step(case, gen).to("cuda")
    with determinism.deterministic() if source == "torch" else contextlib.nullcontext():
        outs = [
            launch.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), dev) for _ in range(20)
        ]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_graph(options, launch, monkeypatch):
    monkeypatch.setattr(kernels, "Case", lambda **options: fragment(Case(**options)))
    kernels.check_graph(options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", transformed(), ids=str)
def test_attend_transformed(case, launch):
    kernels.check_attend_transformed(fragment(case))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [x for x in TRANSFORMS if x[1] != torch.float32], ids=str)
def test_transform(options, launch):
    kernels.check_transform(*options)


@pytest.mark.gpu
def test_float32(launch):
    case = fragment(Case(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_attend(case)
    with pytest.raises(ValueError, match=r"float16 and bfloat16.*float32"):
        kernels.check_store(case, [3])


def _logits(model, tokens: torch.Tensor, prompt: int, backend: str, preset: str, **options) -> torch.Tensor:
    """Logits of each step `[B, steps, vocabulary]`, for the tokens `[B, n]` instead of the predicted ones."""
    cache = lb.from_preset(preset, model, backend=backend, residual=32, page_size=32, **options)
    with torch.no_grad():
        out = [model(tokens[:, :prompt], past_key_values=cache).logits[:, -1]]
        for i in range(prompt, tokens.shape[1]):
            out.append(model(tokens[:, i : i + 1], past_key_values=cache).logits[:, -1])
    assert {layer.backend for layer in cache.packed_layers} == {backend}
    assert backend in cache.summary()
    return torch.stack(out, 1).float()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}], ids=["growing", "preallocated"])
@pytest.mark.parametrize(("family", "preset"), [("llama", "kivi-4"), ("qwen3", "kivi-4"), ("llama", "kitty-hadamard")])
def test_model(family, preset, options, launch):
    """A whole model, step by step over several pages, against the reference on the same device."""
    model = tiny_models(family)[0].half().cuda()
    tokens = torch.randint(3, 160, (2, 250), generator=torch.Generator().manual_seed(kernels.SEED)).cuda()
    before = launch.launches.get("attend_kernel", 0)
    found = _logits(model, tokens, 130, "cuda", preset, **options)
    assert launch.launches["attend_kernel"] >= before + 120 * 2
    expected = _logits(model, tokens, 130, "torch", preset, **options)
    assert ((found - expected).norm() / expected.norm()) < 1e-2
