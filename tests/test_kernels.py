"""Triton kernels against the reference: identical bytes, and outputs within twice the error of plain low-precision attention.

The whole matrix is marked `gpu`. Without a GPU a part of it runs in Triton's interpreter, in a process of its own, because
the interpreter is chosen when Triton is imported (`TRITON_INTERPRET=1 pytest tests/test_kernels.py` runs it directly).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from interpreted import PARTS, run_part
from kernel_cases import (
    Case,
    assert_same_state,
    copy_state,
    filled,
    generator,
    matrix,
    plain,
    put_heavy_sink,
    random_mask,
    random_step,
    random_tokens,
    real_queries,
    relative_error,
    rounding_bound,
    store_for,
    stores,
)
from scale_cases import CONSTANT_ROWS, GPU_SPREAD, check_constant_rows, spread_cases

from hf_lowbit_kv import backend as ops
from hf_lowbit_kv import reference
from hf_lowbit_kv.formats import HEAD_DIMS
from hf_lowbit_kv.transforms import parse_transform

pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_interpreted starts")
#: fresh data on every run; the run's last lines tell it (see `conftest.py`)
SEED = int(os.environ["TEST_SEED"])

from hf_lowbit_kv.triton_kernels import common, launch, prompt, read  # noqa: E402


def attended() -> int:
    """Launches of kernels that attend; the CUDA kernels leave long chunks to a Triton kernel."""
    counted = (launch.launches, common.launches)
    return sum(launches.get(name, 0) for launches in counted for name in ("attend_kernel", "prompt_kernel"))


def attend_poisoned(*args) -> torch.Tensor:
    """`launch.attend` where whatever it allocates holds NaN at first."""
    torch.use_deterministic_algorithms(True)
    try:
        before = attended()
        out = launch.attend(*args)
        assert attended() > before
    finally:
        torch.use_deterministic_algorithms(False)
    return out


def check_attend(case: Case, seed: int = SEED) -> None:
    gen = generator(case, seed)
    ref, dev = filled(case, gen, DEVICE)
    step = random_step(case, gen)
    if case.heavy_sink is not None:
        put_heavy_sink(step, (ref, dev), case)
    before = [x.clone() for x in dev.state.tensors()]
    wide, here = step.float(), step.to(DEVICE)
    exact = reference.attend(
        wide.q, wide.k, wide.v, step.mask, ref.state, case.spec, step.scaling, case.softcap, step.sinks
    )
    out = attend_poisoned(
        here.q, here.k, here.v, here.mask, dev.state, case.spec, here.scaling, case.softcap, here.sinks
    )
    assert out.dtype == case.dtype
    assert out.shape == exact.shape
    assert out.isfinite().all()
    for old, new in zip(before, dev.state.tensors(), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num()), "attend changed the state"
    if case.outliers or case.spread is not None:  # scores are beyond what the plain computation can represent
        off = (out.cpu().double() - exact.double()).abs()
        off, bound = real_queries(off, step), real_queries(rounding_bound(step, ref.state, case), step)
        assert (off <= bound).all(), f"{(off / bound).max()} of what rounding explains"
        return
    own = slice(0 if case.value_offset is None else 1, None)
    out, exact, near = (real_queries(x, step)[..., own] for x in (out, exact, plain(step, ref.state, case)))
    error, error_plain = relative_error(out, exact), relative_error(near, exact)
    print(f"relative error {error:.2e}, plain {error_plain:.2e}")
    assert error <= 2 * error_plain + 1e-6


def check_store(case: Case, chunks: list[int], seed: int = SEED) -> None:
    """Store chunks (0: a single unmasked token) and compare every byte after each; then read all back."""
    gen = generator(case, seed)
    ref, dev = store_for(case, "cpu"), store_for(case, DEVICE)
    length = 0
    for chunk in chunks:
        tokens, mask = max(chunk, 1), None
        k, v = random_tokens(case, tokens, gen)
        if chunk and case.padded:
            mask = random_mask(torch.randint(0, tokens + 1, (len(case.lengths),), generator=gen), tokens, gen)
            for x in (k, v):
                x.masked_fill_(~mask[:, None, :, None], float("inf"))
        length += tokens
        for store in (ref, dev):
            store.reserve(length)
        reference.append(k, v, mask, ref.state, case.spec)
        launch.append(k.to(DEVICE), v.to(DEVICE), None if mask is None else mask.to(DEVICE), dev.state, case.spec)
        assert_same_state(ref.state, dev.state)
    for a, b in zip(
        reference.read(ref.state, case.spec, length + 3),
        launch.read(dev.state, case.spec, length + 3),
        strict=True,
    ):
        assert torch.equal(a, b.cpu())


SMALL = [
    Case(),
    Case(keys="int2-channel", values="int2-token", lengths=(70, 33)),
    Case(keys="int8-token", values="int8-token", sink=0, residual=0, lengths=(33, 64)),
    Case(keys="int2-channel-g32", values="int2-token-g32", page_size=64, residual=64, lengths=(140, 1), heads=1),
    Case(keys="fp8", values="fp8", lengths=(70, 33), heads=1, sink=0, residual=0),
    Case(keys="dense", values="int4-channel", lengths=(0, 130), tokens=5, padded=True, sinks=True, heads=1),
    Case(groups=3, softcap=20.0, head_dim=80, head_dim_v=96, lengths=(33, 100), tokens=9, heads=1),
    Case(keys="int4-token", values="dense", lengths=(31, 64), tokens=20, sink=0, residual=0, padded=True, heads=1),
    Case(keys="int8-token-g64", values="int4-token-g32", head_dim=128, head_dim_v=64, lengths=(65, 3), groups=1),
    Case(keys="int4-channel", values="int8-channel", dtype=torch.float32),
    Case(outliers=True, heads=1),
    *(
        Case(keys="int8-token", values=values, heads=1, head_dim=128, lengths=(600,), value_offset=-100.0)
        for values in ("int8-token", "int4-token-g32", "int2-token")
    ),
    *(
        Case(keys=keys, values="int8-token", heads=1, head_dim=128, lengths=(600,), key_size=2.0**-10)
        for keys in ("int8-channel", "int4-channel", "int8-token", "boosted2-r0.125")
    ),
    Case(heavy_sink=5.0, heads=1, groups=1, lengths=(300,)),
    Case(
        heavy_sink=5.0, heads=1, groups=1, lengths=(300,), keys="int8-token", values="int8-token", dtype=torch.bfloat16
    ),
    Case(heavy_sink=5.0, heads=1, groups=1, lengths=(300,), keys="boosted2-r0.125", values="int2-token-g32"),
    Case(outliers=True, values="int8-token", keys="int8-token", heads=1),
    Case(lengths=(0, 0), heads=1, sinks=True),
    Case(capacity=140, lengths=(100, 90), heads=1),
    Case(keys="boosted2-r0.125", values="int2-token"),
    Case(keys="vq-d4b8", values="vq-d2b5"),
    Case(keys="vq-d8b12", values="int2-token", head_dim=80, lengths=(100,), groups=1, tokens=5, dtype=torch.bfloat16),
    Case(
        keys="boosted2-r0.25-variance",
        values="int2-token",
        head_dim=96,
        tokens=5,
        padded=True,
        lengths=(140, 70),
        heads=1,
    ),
    Case(keys="boosted2-r1", values="boosted2-r0.25", head_dim=80, head_dim_v=64, heads=1, dtype=torch.float32),
    Case(keys="boosted2-r0", values="boosted2-r1-random", heads=1),
    Case(keys="boosted2-r0.125", values="boosted2-r0.125", outliers=True, heads=1),
    # pages whose words of high codes are a plane of their own: in two tiles, in eight, in the other orientation
    Case(keys="boosted2-r0.125", values="int2-token", head_dim=128, page_size=128, lengths=(300, 130)),
    Case(keys="boosted2-r0.3-range", values="int2-token", page_size=256, lengths=(530,), heads=1, dtype=torch.float32),
    Case(keys="boosted2-r0.25", values="int2-channel-g32", page_size=128, lengths=(300,), heads=1, outliers=True),
    Case(keys="boosted2-r0.25", values="int2-token", page_size=256, lengths=(530, 300), tokens=9, padded=True, heads=1),
]
SMALL_STORES = [
    (Case(heads=1), [37, 0, 60, 0, 0]),
    (Case(heads=1, padded=True, keys="int2-channel", values="int2-token", capacity=120), [50, 1, 70, 0, 0]),
    (Case(heads=1, keys="int4-token", values="int8-token-g32", residual=0, sink=3, padded=True), [1, 0, 0, 40, 30]),
    (Case(heads=1, keys="int8-channel", values="dense", residual=0, outliers=True), [30, 0, 1, 40]),
    (Case(heads=1, keys="int2-channel-g32", values="int4-channel", head_dim=80, page_size=64, residual=5), [130]),
    (Case(heads=1, keys="fp8", values="fp8-static", residual=0, sink=3, padded=True, outliers=True), [30, 0, 40]),
    (Case(keys="vq-d4b5", values="vq-d2b8", lengths=(5, 37)), [40, 0]),
    (Case(heads=1, keys="boosted2-r0.125", values="int2-token", padded=True, page_size=64), [90, 70, 0, 0]),
    (Case(heads=1, keys="boosted2-r0.25-variance", values="boosted2-r1", head_dim=80, head_dim_v=96), [37, *[0] * 30]),
    (Case(heads=1, keys="boosted2-r0.25-random5", values="boosted2-r0.3-range", residual=0, outliers=True), [70, 0]),
    (
        Case(heads=1, keys="boosted2-r0.5", values="boosted2-r0", residual=0, outliers=True, dtype=torch.float32),
        [40, 30],
    ),
]


@pytest.mark.skipif(GPU or INTERPRETED, reason="the tests themselves run here")
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted(part):
    run_part(__file__, part)


@needs_interpreter
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_attend(case):
    check_attend(case)


@needs_interpreter
@pytest.mark.parametrize(("case", "chunks"), SMALL_STORES, ids=str)
def test_small_store(case, chunks):
    check_store(case, chunks)


#: head size, dtype, transform: what kernels apply by themselves
TRANSFORMS = [
    (head_dim, dtype, name)
    for head_dim in HEAD_DIMS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for name in ("hadamard", "smooth", "smooth+hadamard", "hadamard+smooth")
]


def check_transform(head_dim, dtype, name):
    """Every bit, of queries and keys and of keys alone, in whatever order their axes lie; factors by head and shared."""
    how = parse_transform(name)
    for heads in (2, 1):
        given = {"factors": torch.rand(heads, head_dim) + 0.1} if "smooth" in name else {}
        tensors = here = ()
        if given:
            record = how.record(given, head_dim, 2, slice(0, 2), torch.device("cpu"))
            tensors, here = how.tensors(record, head_dim), how.tensors(record.to(DEVICE), head_dim)
        q = torch.randn(2, 3, 6, head_dim).to(dtype).transpose(1, 2)
        k = (torch.randn(2, 2, 3, head_dim) * 100).to(dtype)
        expected = reference.transform(q, k, how, tensors)
        before = launch.launches.get("transform_kernel", 0)
        found = launch.transform(q.to(DEVICE), k.to(DEVICE), how, here)
        assert launch.launches["transform_kernel"] == before + 1
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b)
        queries, keys = launch.transform(None, k.to(DEVICE), how, here)
        assert queries is None
        assert torch.equal(keys.cpu(), expected[1])


def check_attend_transformed(case: Case, seed: int = SEED) -> None:
    """The output against the exact transform in float32."""
    gen = generator(case, seed)
    ref, dev = filled(case, gen, DEVICE)
    step = random_step(case, gen)
    wide, here = step.float(), step.to(DEVICE)
    options = step.scaling, case.softcap
    exact = reference.attend(wide.q, wide.k, wide.v, step.mask, ref.state, case.spec, *options, step.sinks)
    torch.use_deterministic_algorithms(True)  # what is allocated holds NaN at first
    try:
        out = launch.attend(here.q, here.k, here.v, here.mask, dev.state, case.spec, *options, here.sinks)
    finally:
        torch.use_deterministic_algorithms(False)
    inputs = reference.transformed(step.q, step.k, step.v, ref.state, case.spec)
    transformed = dataclasses.replace(step, **dict(zip("qkv", inputs, strict=True)))
    near = reference.restored(plain(transformed, ref.state, case), ref.state, case.spec)
    error = relative_error(real_queries(out, step), real_queries(exact, step))
    error_plain = relative_error(real_queries(near, step), real_queries(exact, step))
    print(f"relative error {error:.2e}, plain {error_plain:.2e}")
    assert error <= 2 * error_plain + 1e-6


def _transformed_cases() -> list[Case]:
    """Few query rows and many, one block of the window for the chunk and several, padding, every head size."""
    cases = []
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, (groups, tokens) in enumerate(((4, 1), (1, 1), (3, 5), (16, 1), (4, 40))):
            keys = ("int4-channel", "boosted2-r0.125", "dense")[(i + j) % 3]
            options = {"keys": keys, "groups": groups, "tokens": tokens, "padded": tokens > 1, "lengths": (700, 1, 290)}
            cases.append(Case(head_dim=head_dim, dtype=(torch.float16, torch.bfloat16)[(i + j) % 2], **options))
    names = ("hadamard", "smooth+hadamard", "hadamard+smooth", "smooth", "matrix")
    both = [dataclasses.replace(cases[i], transform=name, value_transform=names[-i]) for i, name in enumerate(names)]
    return [dataclasses.replace(case, transform="hadamard") for case in cases] + both


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", _transformed_cases(), ids=str)
def test_attend_transformed(case):
    check_attend_transformed(case)


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 64, "transform": "hadamard"},
        {"head_dim": 96, "transform": "hadamard"},
        {"head_dim": 64, "transform": "smooth+hadamard", "value_transform": "matrix"},
        {"head_dim": 64, "transform": "matrix", "value_transform": "hadamard"},
    ],
    ids=str,
)
def test_small_attend_transformed(options):
    check_attend_transformed(Case(heads=2, tokens=3, padded=True, **options))


@needs_interpreter
@pytest.mark.parametrize("options", [x for x in TRANSFORMS if x[1] != torch.bfloat16 and x[0] != 256], ids=str)
def test_small_transform(options):
    check_transform(*options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_transform(options):
    check_transform(*options)


POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


def compile_only(kernel, grid, *args, device, **constants):
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
    for capability in (80, 90):
        if "PDL" in kernel.arg_names:
            values |= {(kernel.arg_names.index("PDL"),): capability >= 90}
        source = ASTSource(kernel, signature, values, attributes)
        compile(source, target=GPUTarget("cuda", capability, 32), options={**options, **launch.OPTIONS})


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "case",
    [
        Case(keys="int2-channel", values="int2-token", head_dim=128, page_size=128, residual=128, lengths=(4000,)),
        Case(keys="int4-token", values="int8-token-g32", dtype=torch.bfloat16, tokens=100, residual=0, padded=True),
        Case(keys="boosted2-r0.125", values="int2-token", head_dim=128, page_size=128, residual=128, lengths=(4000,)),
        Case(
            keys="boosted2-r0.25-variance", values="boosted2-r1-random", dtype=torch.bfloat16, tokens=100, padded=True
        ),
    ],
    ids=str,
)
def test_compiles(case, monkeypatch):
    """Every kernel gets through Triton's compiler for sm80 and sm90, without a GPU: the interpreter accepts more."""
    for module in (launch, prompt, read):
        monkeypatch.setattr(module, "_launch", compile_only)
    monkeypatch.setattr(launch, "_takes_ptx", lambda device: True)
    monkeypatch.setattr(launch, "_chained", lambda device: False)  # `compile_only` decides
    monkeypatch.setattr(read, "takes_ptx", lambda device: True)
    gen = generator(case, SEED)
    store, step = store_for(case, "cpu"), random_step(case, gen)
    launch.attend(step.q, step.k, step.v, step.mask, store.state, case.spec, step.scaling)
    launch.append(step.k, step.v, step.mask, store.state, case.spec)
    for backend in ("triton", "cuda"):
        launch.read(store.state, ops.storage_spec(case.spec, backend), 50)
    launch.transform(step.q, step.k, parse_transform("hadamard"), ())
    factors = torch.ones(case.heads, 48)
    launch.transform(None, step.k[..., :48], parse_transform("smooth+hadamard"), (factors, factors))


#: few enough for the interpreter
SMALL_SPREAD = [
    case
    for case in spread_cases(heads=1, groups=2, head_dim=64, lengths=(150,), page_size=64, residual=64)
    if (case.spread == "values" and case.values in ("int2-token", "int4-token-g64"))
    or (case.spread == "keys" and case.keys in ("int2-channel", "int4-channel"))
    or (case.key_size == 2.0**-12 and case.keys in ("int2-channel", "boosted2-r0.125"))
]


@needs_interpreter
@pytest.mark.parametrize("case", SMALL_SPREAD, ids=str)
def test_small_scales_of_all_sizes(case):
    check_attend(case)


@needs_interpreter
def test_small_constant_rows():
    check_constant_rows(
        attend_poisoned, dataclasses.replace(CONSTANT_ROWS[0], page_size=64, lengths=(256,)), DEVICE, SEED
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_SPREAD, ids=str)
def test_scales_of_all_sizes(case):
    check_attend(case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CONSTANT_ROWS, ids=str)
def test_constant_rows(case):
    check_constant_rows(attend_poisoned, case, DEVICE, SEED)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_attend(case):
    check_attend(case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("case", "chunks"), stores(), ids=str)
def test_store(case, chunks):
    check_store(case, chunks)


GRAPHS = [
    {"keys": "int8-token", "values": "int4-token", "residual": 0},
    {"keys": "int8-token", "values": "int4-token", "residual": 128},
    {"keys": "boosted2-r0.125", "values": "int2-token", "residual": 128, "transform": "hadamard"},
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_graph(options):
    """A captured step, replayed over lengths that cross a page, gives what the reference gives."""
    case = Case(head_dim=128, page_size=128, capacity=600, lengths=(250, 380), **options)
    gen = generator(case, SEED)
    ref, dev = filled(case, gen, DEVICE)
    step = random_step(case, gen)
    here = step.to(DEVICE)

    def run():
        out = launch.attend(here.q, here.k, here.v, None, dev.state, case.spec, here.scaling)
        launch.append(here.k, here.v, None, dev.state, case.spec)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    copy_state(ref.state, dev.state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    copy_state(ref.state, dev.state)
    for _ in range(140):
        step = random_step(case, gen)
        for name in ("q", "k", "v"):
            getattr(here, name).copy_(getattr(step, name))
        graph.replay()
        exact = reference.attend(step.q, step.k, step.v, None, ref.state, case.spec, step.scaling)
        assert relative_error(out, exact) < 2e-3
        reference.append(step.k, step.v, None, ref.state, case.spec)
    assert_same_state(ref.state, dev.state)
