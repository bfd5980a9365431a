"""A layer's kernel contains addresses: code that replaces the layer's tensors must drop the kernel."""

import copy
import functools

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import Noted, emulated
from kernel_cases import Case, filled, generator, random_step, random_tokens, records_for, relative_error

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points, modules

pytestmark = pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++ on x86-64")
CASE = Case(lengths=(100, 70), heads=1, groups=2, head_dim=64)


@pytest.fixture
def cuda(monkeypatch):
    with emulated(monkeypatch) as module:
        yield module.OPERATIONS


def layers(**options):
    """A layer that has held its kernel since a first step, and one that the reference computes; their step."""
    case = fragment(Case(**{**vars(CASE), **options}))
    gen = generator(case, kernels.SEED)
    truth, layer = filled(case, gen, "cpu")
    return case, gen, truth, layer


def step(cuda, case, gen, truth, layer) -> None:
    """A step of both: outputs, and what is stored."""
    inputs = random_step(case, gen).inputs(case)
    out, expected = cuda.step(inputs, layer), reference.OPERATIONS.step(inputs, truth)
    assert relative_error(out, expected) < 2e-3
    for name in ("length", "paged", "tail_k", "tail_v"):
        a, b = (getattr(store.state, name).nan_to_num() for store in (layer, truth))
        assert torch.equal(a, b), name


def grown(layer):
    layer.reserve(3000)
    return layer


def selected(layer):
    layer.memory.selecting(torch.tensor([1, 1]))()
    return layer


def copied(layer):
    return copy.deepcopy(layer)


def reset(layer):
    layer.reset()
    return layer


def cropped(layer):
    layer.state.length.sub_(40)
    reference.unpack_into_tail(layer)
    layer.memory.own_pages()
    return layer


@pytest.mark.parametrize("change", [grown, selected, copied, reset, cropped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("capacity", [None, 400], ids=["growing", "preallocated"])
def test_a_held_kernel_follows_the_layers_tensors(cuda, change, capacity):
    case, gen, truth, layer = layers(capacity=capacity)
    step(cuda, case, gen, truth, layer)
    (held,) = layer.kernels.values()
    before = layer
    truth, layer = change(truth), change(layer)
    for _ in range(2):
        step(cuda, case, gen, truth, layer)
    (now,) = layer.kernels.values()
    moved = layer is not before or layer.state is not held._state
    assert (now is not held) == moved
    if layer is not before:  # the original is unchanged, and continues independently
        assert int(before.state.length.max()) == max(case.lengths) + 1


def test_a_step_of_another_kind_gets_another_kernel(cuda, monkeypatch):
    """Padding, query tokens and options decide what is compiled; strides and addresses of a step's tensors do not."""
    case, gen, truth, layer = layers(capacity=400)
    for _ in range(2):
        step(cuda, case, gen, truth, layer)
    assert len(layer.kernels) == 1
    inputs = random_step(case, gen).inputs(case)
    masked = inputs._replace(mask=torch.tensor([[True], [False]]))
    assert relative_error(cuda.attend(masked, layer)[:1], reference.OPERATIONS.attend(masked, truth)[:1]) < 2e-3
    capped = inputs._replace(softcap=2.0)
    assert relative_error(cuda.attend(capped, layer), reference.OPERATIONS.attend(capped, truth)) < 2e-3
    half = capped._replace(softcap=0.5, scaling=0.5)  # the same kernel with other numbers
    count = len(layer.kernels)
    assert relative_error(cuda.attend(half, layer), reference.OPERATIONS.attend(half, truth)) < 2e-3
    assert len(layer.kernels) == count == 3
    sinks = torch.randn(inputs.queries.shape[1], generator=gen)
    for of_dtype in (sinks.half(), sinks):
        sunk = inputs._replace(sinks=of_dtype)
        assert relative_error(cuda.attend(sunk, layer), reference.OPERATIONS.attend(sunk, truth)) < 2e-3
    for order in ("0", "1"):  # of sums
        monkeypatch.setenv(determinism.VARIABLE, order)
        cuda.attend(inputs, layer)
    assert len(layer.kernels) == count + 4


def test_tensors_that_lie_otherwise(cuda):
    """Other strides, a pointer that no load of 16 bytes takes, and usual ones again: of all tensors, and of each one."""
    case, gen, truth, layer = layers(capacity=400)
    inputs = random_step(case, gen).inputs(case)._replace(mask=torch.tensor([[False], [True]]))
    expected = reference.OPERATIONS.attend(inputs, truth)[1]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        return wide.copy_(x)

    def spaced(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros_like(x)], -1)[..., : x.shape[-1]]

    def usual(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()

    def check(**changes) -> None:
        other = inputs._replace(**{name: change(getattr(inputs, name)) for name, change in changes.items()})
        assert relative_error(cuda.attend(other, layer)[1], expected) < 2e-3, list(changes)

    names = ("q", "k", "v", "mask")
    for change in (usual, shifted, spaced, usual, shifted):
        check(**dict.fromkeys(names, change))
    for name in names:
        check()
        check(**{name: spaced})


def test_parameters_and_copies_go_with_the_layer(cuda):
    """A layer with a codebook in its records and factors of its keys: a copy reads its own."""
    case, gen, truth, layer = layers(transform="smooth+hadamard", capacity=400)
    step(cuda, case, gen, truth, layer)
    twin, twin_truth = copy.deepcopy(layer), copy.deepcopy(truth)
    assert not twin.kernels
    assert twin.tensors()["key_transform"][0].data_ptr() != layer.tensors()["key_transform"][0].data_ptr()
    for store in (layer, truth):
        for record in store.state.parameters:
            record.zero_()  # only the original's
    step(cuda, case, gen, twin_truth, twin)


def test_long_chunks_cache_no_kernel(cuda, monkeypatch):
    """Where Triton launches nothing this kernel reads prompts too, and each length is a kind of its own."""
    monkeypatch.setitem(cuda_entry_points.FUSED_ROWS, "cuda", 16)
    monkeypatch.setattr(cuda_entry_points, "why_triton_cannot_launch", lambda: "no compiler")
    case, gen, truth, layer = layers(capacity=400)
    for tokens in (9, 10):
        k, v = random_tokens(Case(**{**vars(case), "tokens": tokens}), tokens, gen)
        q = torch.randn(2, 2, tokens, 64, generator=gen).half()
        inputs = StepInputs(q, k, v, scaling=0.1)
        assert relative_error(cuda.attend(inputs, layer), reference.OPERATIONS.attend(inputs, truth)) < 2e-3
    assert not layer.kernels


# ---- kernels that are compiled while a prompt is read ---------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("preset", ["kivi-4-sink", "kivi-2-hadamard", "fp8", "eigen-2"])
def test_a_prompt_and_its_steps_take_the_kernels_that_were_expected(preset, masked, monkeypatch):
    expected, loaded, spec = set(), {}, choice.storage_spec(get_preset(preset).spec(), "cuda")
    monkeypatch.setattr(modules, "compile_ahead", lambda name, macros, device: expected.add((name, macros)))
    store = PagedStore(spec, 2, 2, 128, 128, torch.bfloat16, "cpu", 900, parameters=records_for(spec, (128, 128), 2))

    def chunk(tokens: int, mask: torch.Tensor | None) -> StepInputs:
        q, k = (torch.zeros(2, heads, tokens, 128, dtype=torch.bfloat16) for heads in (8, 2))
        return StepInputs(q, k, k, mask, scaling=1.0)

    with emulated(monkeypatch, processors=132, module=functools.partial(Noted, loaded)) as cuda:
        cuda.OPERATIONS.expect_steps(chunk(300, None), store, masked)
        cuda.OPERATIONS.append(chunk(300, None)._replace(q=None), store)
        cuda.OPERATIONS.step(chunk(1, torch.ones(2, 1, dtype=torch.bool) if masked else None), store)
    assert expected == {each for each in loaded if each[0] in ("append.cu", "attend.cu")}
