"""Triton kernels against the reference: identical bytes, and outputs within twice the error of plain low-precision attention.

The whole matrix is marked `gpu`. Without a GPU a part of it runs in Triton's interpreter, in processes of their own
(`test_interpreted`): the interpreter is chosen when Triton is imported. `TRITON_INTERPRET=1 pytest tests/triton/test_kernels.py
-k small` runs it directly.
"""

import dataclasses
import functools

import pytest
import torch
from fp8_rows import SPECIAL, check_special_rows
from gpu_selection import in_every_run, is_stored_in_every_run
from kernel_cases import Case, generator, random_step, store_for
from kernel_checks import (
    DEVICE,
    INTERPRETED,
    SEED,
    attend_poisoned,
    check_attend,
    check_attend_transformed,
    check_full_rows,
    check_graph,
    check_store,
    check_transform,
    needs_interpreter,
)
from kernel_matrix import (
    GRAPHS,
    SMALL,
    SMALL_LOOKUPS,
    SMALL_STORES,
    TRANSFORMS,
    codebook_attends,
    matrix,
    stores,
    transformed,
)
from scale_cases import CONSTANT_ROWS, GPU_SPREAD, SMALL_SPREAD, check_constant_rows

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import parse_transform
from hf_lowbit_kv.triton_kernels import entry_points, prompt, read


def _other_width(case: Case) -> bool:
    """Whether another case of `SMALL` asks the same of another width: sizes of keys and values, outliers, heavy sinks."""
    asks = case.key_size != 1 or case.value_offset is not None or case.outliers or case.heavy_sink is not None
    return asks and case.keys in ("int8-channel", "int8-token") and case.values != "int2-token"


#: formats that differ from another one of the small cases by a width, a pattern or a score
OTHERS = {
    *("boosted2-r0", "boosted2-r0.25", "boosted2-r0.25-variance", "boosted2-r0.25-random5"),
    *("static-65444333", "int6-token", "vq-d8b12", "vq-d4b5"),
}


def _is_slow(case: Case) -> bool:
    return (case.keys == "boosted2-r0.125" and case.outliers) or case.keys in OTHERS or _other_width(case)


def _small(cases: list[Case]) -> list:
    return [pytest.param(case, marks=pytest.mark.slow) if _is_slow(case) else case for case in cases]


@needs_interpreter
@pytest.mark.parametrize("case", _small(SMALL), ids=str)
def test_small_attend(case):
    check_attend(case)


@needs_interpreter
@pytest.mark.parametrize("case", SMALL_LOOKUPS, ids=str)
def test_small_lookups(case):
    check_attend(case)


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "chunks"),
    [pytest.param(*x, marks=pytest.mark.slow) if x[0].keys in OTHERS else x for x in SMALL_STORES],
    ids=str,
)
def test_small_store(case, chunks):
    assert check_store(case, chunks), "the chunks are too short for a page"


@needs_interpreter
def test_small_full_rows():
    check_full_rows(Case(capacity=60))


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_small_special_rows(case):
    check_special_rows(entry_points.OPERATIONS.append, case, DEVICE, generator(case, SEED))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_special_rows(case):
    check_special_rows(entry_points.OPERATIONS.append, case, DEVICE, generator(case, SEED))


@pytest.mark.gpu
@pytest.mark.parametrize("case", transformed(), ids=str)
def test_attend_transformed(case):
    check_attend_transformed(case)


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 96, "transform": "hadamard"},
        pytest.param(
            {"head_dim": 64, "transform": "smooth+hadamard", "value_transform": "matrix"}, marks=pytest.mark.slow
        ),
        {"head_dim": 64, "transform": "eigen", "softcap": 9.0, "keys": "static-44422000", "values": "static-2-tn"},
        {"head_dim": 64, "transform": "eigen", "sinks": True, "lengths": (190, 0, 1), "capacity": 300},
        {"head_dim": 64, "transform": "matrix", "value_transform": "hadamard"},
    ],
    ids=str,
)
def test_small_attend_transformed(options):
    check_attend_transformed(Case(heads=2, tokens=3, padded=True, **options))


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        x
        if x[:2] == (96, torch.float16)
        or x in ((80, torch.float16, "hadamard"), (96, torch.float32, "smooth+hadamard"))
        else pytest.param(x, marks=pytest.mark.slow)
        for x in TRANSFORMS
        if x[1] != torch.bfloat16 and x[0] != 256
    ],
    ids=str,
)
def test_small_transform(options):
    check_transform(*options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_transform(options):
    check_transform(*options)


POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


def compile_only(capability, kernel, grid, *args, device, **constants):
    """In place of `launch._launch`: compile for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    bound = dict(zip(kernel.arg_names, args))
    bound |= {name: value for name, value in constants.items() if name in kernel.arg_names}
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    signature, values, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        if param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            signature[param.name], values[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    if "PDL" in kernel.arg_names:
        values |= {(kernel.arg_names.index("PDL"),): capability >= 90}
    source = ASTSource(kernel, signature, values, attributes)
    compile(source, target=GPUTarget("cuda", capability, 32), options={**options, **entry_points.OPTIONS})


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.slow  # `test_triton_compiles` has fast cases, for sm90
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "case",
    [
        Case(keys="int2-channel", values="int2-token", head_dim=128, page_size=128, residual=128, lengths=(4000,)),
        Case(keys="int4-token", values="int8-token-g32", dtype=torch.bfloat16, tokens=100, residual=0, padded=True),
        Case(keys="boosted2-r0.125", values="int2-token", head_dim=128, page_size=128, residual=128, lengths=(4000,)),
        Case(
            keys="boosted2-r0.25-variance", values="boosted2-r1-random", dtype=torch.bfloat16, tokens=100, padded=True
        ),
        Case(keys="fp8", values="fp8", head_dim=96, residual=0, tokens=100, padded=True),
    ],
    ids=str,
)
def test_compiles(case, capability, monkeypatch):
    """Every kernel gets through Triton's compiler for sm80 and sm90, without a GPU: the interpreter accepts more."""
    for module in (entry_points, prompt, read):
        monkeypatch.setattr(module, "_launch", functools.partial(compile_only, capability))
    monkeypatch.setattr(entry_points, "_takes_ptx", lambda device: True)
    monkeypatch.setattr(entry_points, "_chained", lambda device: False)  # `compile_only` decides
    monkeypatch.setattr(read, "takes_ptx", lambda device: True)
    gen = generator(case, SEED)
    store, step = store_for(case, "cpu"), random_step(case, gen)
    entry_points.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, step.mask, step.scaling), store)
    entry_points.OPERATIONS.append(StepInputs(None, step.k, step.v, step.mask), store)
    for backend in ("triton", "cuda"):
        entry_points.OPERATIONS.read(PagedStore.over(store.state, choice.storage_spec(case.spec, backend)), 50)
    entry_points.transform(step.q, step.k, parse_transform("hadamard"), ())
    factors = torch.ones(case.heads, 48)
    entry_points.transform(None, step.k[..., :48], parse_transform("smooth+hadamard"), (factors, factors))


@needs_interpreter
@pytest.mark.parametrize("case", SMALL_SPREAD, ids=str)
def test_small_scales_of_all_sizes(case):
    check_attend(case)


@needs_interpreter
def test_small_constant_rows():
    check_constant_rows(
        attend_poisoned, dataclasses.replace(CONSTANT_ROWS[0], page_size=64, lengths=(256,)), DEVICE, SEED
    )


@needs_interpreter
def test_small_spread_of_boosted_keys():
    """Scales of 2^-24 to 2^14 among a page's boosted channels, and data for which products divided by the largest lost bits."""
    case = next(case for case in GPU_SPREAD if case.keys.startswith("boosted") and case.spread == "keys")
    check_attend(dataclasses.replace(case, lengths=(417,), heads=1), seed=2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_SPREAD, ids=str)
def test_scales_of_all_sizes(case):
    check_attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CONSTANT_ROWS, ids=str)
def test_constant_rows(case):
    check_constant_rows(attend_poisoned, case, DEVICE, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case if in_every_run(case) else pytest.param(case, marks=pytest.mark.slow) for case in matrix()], ids=str
)
def test_attend(case):
    check_attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case if in_every_run(case) else pytest.param(case, marks=pytest.mark.slow) for case in codebook_attends()],
    ids=str,
)
def test_attend_lookups(case):
    check_attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (case, chunks) if is_stored_in_every_run(case) else pytest.param(case, chunks, marks=pytest.mark.slow)
        for case, chunks in stores()
    ],
    ids=str,
)
def test_store(case, chunks):
    check_store(case, chunks)


@pytest.mark.begins_first
@pytest.mark.gpu
@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_graph(options):
    check_graph(options)
