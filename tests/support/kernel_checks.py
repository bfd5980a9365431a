"""Kernels against the reference: bytes and counters are equal, outputs within twice the error of plain low-precision attention.

`launch` is the module of Triton's entry points; tests of another backend put theirs in its place.
"""

import contextlib
import dataclasses
import os
import zlib

import pytest
import torch
from kernel_cases import (
    Case,
    assert_same_state,
    copy_state,
    filled,
    generator,
    plain,
    put_heavy_sink,
    random_mask,
    random_step,
    random_tokens,
    real_queries,
    relative_error,
    rounding_bound,
    store_for,
)

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import parse_transform
from hf_lowbit_kv.triton_kernels import determinism

pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_interpreted starts")
#: fresh data on every run; the run's last lines show it (see `conftest.py`)
SEED = int(os.environ["TEST_SEED"])

from hf_lowbit_kv.triton_kernels import common  # noqa: E402
from hf_lowbit_kv.triton_kernels import entry_points as launch  # noqa: E402


def attended() -> int:
    """Launches of kernels that attend; the CUDA kernels leave long chunks to a Triton kernel."""
    counted = (launch.launches, common.launches)
    return sum(launches.get(name, 0) for launches in counted for name in ("attend_kernel", "prompt_kernel"))


def orders(case: Case) -> tuple[str, ...]:
    """Values of `determinism.VARIABLE` for which a check runs: both of every fourth case, because each is a compilation of its
    own. Emulated, `test_fixed_order` has some."""
    both = DEVICE == "cuda" and hasattr(launch, "kernel_for") and zlib.crc32(str(case).encode()) % 4 == 0
    return ("0", "1") if both else ("0",)


@contextlib.contextmanager
def poisoned():
    """Within the context, all newly allocated memory holds NaN. PyTorch's mode for that also requests sums in a fixed order.
    So the environment variable is set, and kernels run as they do by default."""
    order = os.environ.get(determinism.VARIABLE) or "0"
    with pytest.MonkeyPatch.context() as patch, determinism.deterministic():
        patch.setenv(determinism.VARIABLE, order)
        yield


def attend_poisoned(inputs: StepInputs, store: PagedStore) -> torch.Tensor:
    """The output where whatever it allocates holds NaN at first."""
    with poisoned():
        before = attended()
        out = launch.OPERATIONS.attend(inputs, store)
        assert attended() > before
    return out


def check_attend(case: Case, seed: int = SEED) -> None:
    for order in orders(case):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(determinism.VARIABLE, order)
            _check_attend(case, seed)


def _check_attend(case: Case, seed: int) -> None:
    gen = generator(case, seed)
    ref, dev = filled(case, gen, DEVICE)
    step = random_step(case, gen)
    if case.heavy_sink is not None:
        put_heavy_sink(step, (ref, dev), case)
    before = [x.clone() for x in dev.state.tensors()]
    wide, here = step.float(), step.to(DEVICE)
    exact = reference.OPERATIONS.attend(
        StepInputs(wide.q, wide.k, wide.v, step.mask, step.scaling, case.softcap, step.sinks), ref
    )
    out = attend_poisoned(here.inputs(case), dev)
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


def check_store(case: Case, chunks: list[int], seed: int = SEED) -> bool:
    """Store chunks (0: a single unmasked token) and compare every byte after each; then read all back. Returns whether a token
    was stored in a page."""
    gen = generator(case, seed)
    ref, dev = store_for(case, "cpu"), store_for(case, DEVICE)
    length = 0
    for chunk in chunks:
        tokens, mask = max(chunk, 1), None
        k, v = random_tokens(case, tokens, gen)
        if chunk and case.padded:
            real = torch.randint(0, tokens + 1, (len(case.lengths),), generator=gen)
            real[0] = tokens - tokens // 8  # enough for a page
            mask = random_mask(real, tokens, gen)
            for x in (k, v):
                x.masked_fill_(~mask[:, None, :, None], float("inf"))
        length += tokens
        for store in (ref, dev):
            store.reserve(length)
        reference.OPERATIONS.append(StepInputs(None, k, v, mask), ref)
        launch.OPERATIONS.append(
            StepInputs(None, k.to(DEVICE), v.to(DEVICE), None if mask is None else mask.to(DEVICE)), dev
        )
        assert_same_state(ref.state, dev.state)
    for a, b in zip(
        reference.OPERATIONS.read(ref, length + 3),
        launch.OPERATIONS.read(dev, length + 3),
        strict=True,
    ):
        assert torch.equal(a, b.cpu())
    return bool(ref.state.paged.any())


def check_full_rows(case: Case, seed: int = SEED) -> None:
    """Two rows get full, with a chunk and token by token: real tokens without room are lost, padding is not."""
    gen = generator(case, seed)
    ref, dev = store_for(case, "cpu"), store_for(case, DEVICE)
    room, came = case.spec.room(ref.pages_per_row), torch.zeros(2, dtype=torch.int64)
    # tokens of a chunk, and how many of them are real in each row
    for tokens, real in ((room - 4, None), (7, (3, 6)), (1, (1, 0)), (1, (1, 0)), (1, None), (5, (0, 2))):
        k, v = random_tokens(case, tokens, gen)
        mask = None if real is None else random_mask(torch.tensor(real), tokens, gen)
        came += tokens if mask is None else mask.sum(1)
        reference.OPERATIONS.append(StepInputs(None, k, v, mask), ref)
        here = None if mask is None else mask.to(DEVICE)
        launch.OPERATIONS.append(StepInputs(None, k.to(DEVICE), v.to(DEVICE), here), dev)
        assert_same_state(ref.state, dev.state)
    assert torch.equal(dev.state.length[:, 0].cpu().long(), came.clamp(max=room))
    assert torch.equal(dev.state.lost[:, 0].cpu().long(), came - room)


def check_transform(head_dim, dtype, name):
    """Every bit, of queries and keys and of keys only, in whatever order their axes lie; factors by head and shared."""
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
    exact = reference.OPERATIONS.attend(wide.inputs(case), ref)
    with poisoned():
        out = launch.OPERATIONS.attend(here.inputs(case), dev)
    inputs = reference.transformed(step.inputs(case), ref)
    transformed = dataclasses.replace(step, q=inputs.q, k=inputs.k, v=inputs.v)
    near = reference.restored(plain(transformed, ref.state, case, inputs.score_bias), ref)
    error = relative_error(real_queries(out, step), real_queries(exact, step))
    error_plain = relative_error(real_queries(near, step), real_queries(exact, step))
    print(f"relative error {error:.2e}, plain {error_plain:.2e}")
    assert error <= 2 * error_plain + 1e-6


def check_graph(options: dict) -> None:
    """A captured step, replayed over lengths that cross a page, gives what the reference gives."""
    case = Case(head_dim=128, page_size=128, capacity=600, lengths=(250, 380), **options)
    gen = generator(case, SEED)
    ref, dev = filled(case, gen, DEVICE)
    step = random_step(case, gen)
    here = step.to(DEVICE)

    def run():
        out = launch.OPERATIONS.attend(StepInputs(here.q, here.k, here.v, scaling=here.scaling), dev)
        launch.OPERATIONS.append(StepInputs(None, here.k, here.v), dev)
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
        exact = reference.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), ref)
        assert relative_error(out, exact) < 2e-3
        reference.OPERATIONS.append(StepInputs(None, step.k, step.v), ref)
    assert_same_state(ref.state, dev.state)
