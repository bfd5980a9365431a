"""The CUDA kernels for `formats.fp8` and `formats.fp8_centered`, emulated: by the instruction that converts e4m3 (sm89 and
later), and by moving bits."""

import dataclasses
import functools

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated, needs_emulator
from fp8_rows import SPECIAL, check_special_rows
from isolation import check as check_isolation
from kernel_cases import Case, check_steps, generator
from scale_cases import HEAVY_TOKEN, check_heavy_token

from hf_lowbit_kv.backends.choice import storage_spec
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.triton_kernels.cuda import format_structs, geometry

FP8 = {"keys": "fp8", "values": "fp8"}
CENTERED = {"keys": "fp8-centered", "values": "fp8"}
PAGES = {"head_dim": 128, "page_size": 128, "residual": 128, "sink": 32}
half, bf16 = torch.float16, torch.bfloat16


def _converting(convert: bool, name: str, defines: tuple) -> cuda_emulator.Module:
    return cuda_emulator.Module(name, (("CONVERT", "1"), *defines) if convert else defines)


@pytest.fixture(params=["convert", "move"])
def launch(request, monkeypatch):
    with emulated(monkeypatch, module=functools.partial(_converting, request.param == "convert")) as cuda:
        yield cuda


ATTENDS = [
    Case(**FP8, **PAGES, lengths=(700, 1, 290)),
    Case(**CENTERED, **PAGES, lengths=(700, 1, 290), heads=1, key_offset=300.0),
    # a partial page, which ends inside a KV tile; NaN follows its last token
    Case(**FP8, residual=0, sink=0, lengths=(70, 33), groups=5, dtype=bf16, heads=1),
]  # fmt: skip
MORE_ATTENDS = [
    Case(keys="fp8", values="int4-token", head_dim=96, lengths=(300, 40), heads=1, groups=16, tokens=2, padded=True),
    *(
        Case(**FP8, head_dim=dim, groups=groups, dtype=dtype, lengths=(300, 1, 90), heads=1, padded=tokens > 1, tokens=tokens)
        for dim, groups, dtype, tokens in (
            (64, 1, half, 1), (64, 8, bf16, 1), (80, 4, bf16, 3), (96, 5, half, 1), (128, 16, bf16, 1), (128, 8, half, 1),
            (256, 4, half, 1), (256, 16, bf16, 1),
        )
    ),
    *(
        Case(keys="fp8", values=other, lengths=(300, 40), heads=1, groups=5, dtype=bf16)
        for other in ("dense", "int2-channel", "int8-token-g32", "int2-token", "vq-d4b6", "static-3-tn")
    ),
    *(
        Case(keys=other, values="fp8", lengths=(300, 40), heads=1, groups=5)
        for other in ("dense", "int2-channel", "int4-token", "boosted2-r0.125", "vq-d4b6", "static-44422000")
    ),
    Case(**FP8, residual=0, page_size=256, head_dim=128, lengths=(200, 300), groups=16, heads=1),
    *(
        Case(**CENTERED, page_size=size, head_dim=dim, groups=groups, dtype=dtype, lengths=(600, 1, 90), heads=1,
             key_offset=300.0, padded=tokens > 1, tokens=tokens, softcap=softcap, sinks=softcap is not None)
        for dim, size, groups, dtype, tokens, softcap in (
            (64, 32, 1, half, 1, None), (80, 64, 4, bf16, 3, 20.0), (96, 128, 5, half, 1, None), (128, 256, 16, bf16, 1, 20.0),
            (256, 64, 4, half, 1, None), (128, 128, 8, bf16, 1, None),
        )
    ),
    Case(keys="fp8-centered", values="int4-token", **PAGES, lengths=(500, 1), heads=1, outliers=True, dtype=bf16, groups=3),
    Case(**FP8, **PAGES, lengths=(1500,), heads=1, groups=1, heavy_sink=5.0, dtype=bf16),
    Case(**FP8, **PAGES, lengths=(500, 1), heads=1, outliers=True, dtype=bf16, groups=3),
    Case(**FP8, **PAGES, lengths=(500, 1), heads=1, softcap=20.0, sinks=True),
    Case(**FP8, **PAGES, lengths=(500,), heads=1, value_offset=-100.0),
    *(
        Case(**FP8, **PAGES, lengths=(500,), heads=1, key_size=size, value_size=size, dtype=dtype)
        for size, dtype in ((2.0**-12, half), (2.0**-40, bf16), (2.0**10, bf16))
    ),
    *(Case(**FP8, **PAGES, lengths=(800,), heads=1, spread=side) for side in ("keys", "values")),
    Case(head_dim=96, heads=1, **FP8, groups=3, tokens=5, padded=True, lengths=(300, 1, 90)),
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize(
    ("launch", "case"),
    [
        *(("convert", ATTENDS[0]), *(("move", case) for case in ATTENDS)),
        *(pytest.param("convert", case, marks=pytest.mark.slow) for case in [*ATTENDS[1:], *MORE_ATTENDS]),
        *(pytest.param("move", case, marks=pytest.mark.slow) for case in MORE_ATTENDS),
    ],
    ids=str,
    indirect=["launch"],
)
def test_attend(case, launch):
    kernels.check_attend(fragment(case))


@needs_emulator
@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (Case(**CENTERED, heads=1, head_dim=80, dtype=bf16, key_offset=300.0), [37, 0, 60, 0, 0]),
        pytest.param(
            Case(**CENTERED, heads=1, padded=True, head_dim=256, page_size=64, outliers=True),
            [130, 0, 40],
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(**FP8, heads=1, padded=True, head_dim=96), [37, 0, 60, 0, 0], marks=pytest.mark.slow),
        pytest.param(
            Case(**FP8, heads=1, padded=True, residual=0, sink=3, outliers=True),
            [30, 0, 0, 40, 0],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(keys="fp8", values="int2-token", heads=1, head_dim=80, residual=0, capacity=60, dtype=bf16),
            [30, 0, 40],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(keys="int4-channel", values="fp8", heads=1, head_dim=256, page_size=64, dtype=bf16),
            [130, 0],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_store(case, chunks, monkeypatch):
    with emulated(monkeypatch):
        kernels.check_store(fragment(case), chunks)


@needs_emulator
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case(**FP8, lengths=(94, 37), heads=1), 6),
        (Case(**FP8, residual=0, lengths=(65, 2), groups=5, dtype=bf16, heads=1), 4),
        pytest.param(Case(**CENTERED, lengths=(94, 37), heads=1, key_offset=300.0), 6, marks=pytest.mark.slow),
        pytest.param(Case(**FP8, residual=0, lengths=(65, 2), heads=1, padded=True), 4, marks=pytest.mark.slow),
        pytest.param(
            Case(**FP8, **PAGES, lengths=(286, 700), heads=1, groups=16, dtype=bf16), 4, marks=pytest.mark.slow
        ),
        pytest.param(
            Case(**FP8, lengths=(91, 33), residual=5, transform="hadamard", heads=1), 34, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_step(case, steps, monkeypatch):
    with emulated(monkeypatch) as cuda:
        check_steps(cuda, fragment(case), steps, kernels.SEED, "cpu", twin=False)


@needs_emulator
@pytest.mark.slow
def test_a_heavy_token_in_a_page_leaves_the_others_their_part(launch):
    check_heavy_token(kernels.attend_poisoned, fragment(dataclasses.replace(HEAVY_TOKEN, **FP8)), "cpu")


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("residual", [0, 32])
def test_nan_and_inf_stay_in_their_row_and_head(residual, launch):
    case = Case(**FP8, lengths=(100, 75), groups=2, residual=residual)
    check_isolation(launch, fragment(case), "cpu", kernels.SEED)


@needs_emulator
@pytest.mark.parametrize(
    "case",
    [*SPECIAL[1:3], *(pytest.param(case, marks=pytest.mark.slow) for case in (SPECIAL[0], *SPECIAL[3:]))],
    ids=str,
)
def test_special_rows(case, monkeypatch):
    with emulated(monkeypatch) as cuda:
        check_special_rows(cuda.OPERATIONS.append, fragment(case), "cpu", generator(case, kernels.SEED))


def test_which_are_served():
    """A scale per token; others stay with Triton, or the reference. The preset keeps a window, as others do."""
    setup = [("fp8", "fp8"), ("fp8-centered", "fp8")]
    others = [("fp8-static", "fp8-static"), ("fp8-block", "fp8-block"), ("fp8", "fp8-centered")]
    for names, reason in [(names, None) for names in setup] + [(names, "no kernels for") for names in others]:
        why_not = geometry.why_not(LayerSpec(*map(parse_format, names)), (128, 128), None, torch.device("cpu"))
        assert (why_not is None) == (reason is None)
        assert reason is None or reason in why_not
    spec = get_preset("fp8").spec()
    assert (spec.residual, get_preset("snapmla").spec().residual) == (128, 0)
    stored = storage_spec(spec, "cuda")
    assert [fmt.name for fmt in stored.formats] == ["fp8-centered@fragment-1", "fp8@fragment-1t"]
    with pytest.raises(ValueError, match=r"backend='cuda' stores 'fp8@fragment-1' in layout 'fragment-1t'"):
        format_structs.needs(parse_format("fp8@fragment-1"), 128, 128, half, True)
