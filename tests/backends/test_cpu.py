"""The CPU backend against the reference: the same bytes, and outputs as close to float32 attention as float32 allows."""

import os

import pytest
import torch
from cases import tiny_models
from kernel_cases import (
    Case,
    assert_same_state,
    filled,
    generator,
    plain,
    random_step,
    real_queries,
    relative_error,
    rounding_bound,
    separate_step,
)

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import cpu
from hf_lowbit_kv.storage import reference

SEED = int(os.environ["TEST_SEED"])
FLOAT = torch.float32

CASES = [
    Case(dtype=FLOAT),
    Case(dtype=torch.bfloat16, tokens=70, lengths=(300, 37)),
    Case(keys="int2-channel", values="int2-token", lengths=(70, 70), dtype=FLOAT),
    Case(keys="int8-token", values="int8-token", sink=0, residual=0, lengths=(33, 64), tokens=3, dtype=FLOAT),
    Case(keys="int2-channel-g32", values="int2-token-g32", page_size=64, residual=64, lengths=(140, 1), heads=1),
    Case(keys="dense", values="int4-channel", lengths=(0, 130), tokens=5, padded=True, sinks=True, dtype=FLOAT),
    Case(groups=3, softcap=20.0, head_dim=80, head_dim_v=96, lengths=(33, 100), tokens=9, dtype=FLOAT),
    Case(groups=8, softcap=20.0, sinks=True, lengths=(200,), tokens=40, dtype=FLOAT),
    Case(lengths=(31, 64), tokens=20, sink=0, residual=0, keys="int4-token", padded=True, dtype=FLOAT),
    Case(keys="int8-token-g64", head_dim=128, head_dim_v=64, lengths=(65, 3), groups=1),
    Case(head_dim=512, lengths=(65, 3), groups=2, heads=1),
    Case(head_dim=192, head_dim_v=128, lengths=(65, 3), tokens=5, padded=True, dtype=FLOAT, transform="hadamard"),
    Case(lengths=(0, 0), tokens=4, padded=True, dtype=FLOAT),
    Case(lengths=(0, 0), sinks=True),
    Case(capacity=140, lengths=(100, 90), dtype=FLOAT),
    Case(keys="boosted2-r0.25-variance", tokens=130, lengths=(2, 400, 0), padded=True, dtype=FLOAT),
    Case(keys="boosted2-r0.125", transform="hadamard", lengths=(150, 150), tokens=33),
    Case(lengths=(5000,), heads=1, groups=2, tokens=2, dtype=FLOAT, page_size=128, residual=128),
]


def attention(case: Case, step, store, module):
    return module.OPERATIONS.attend(step.inputs(case), store)


def check(case: Case) -> None:
    gen = generator(case, SEED)
    store, other = filled(case, gen, "cpu")
    step = random_step(case, gen)
    wide = step.float()
    before = [x.clone() for x in other.state.tensors()]
    exact = attention(case, wide, store, reference)
    out = attention(case, step, other, cpu)
    assert (out.dtype, out.shape) == (case.dtype, exact.shape)
    assert out.isfinite().all()
    for old, new in zip(before, other.state.tensors(), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num()), "attend changed the state"
    if case.dtype == FLOAT:  # padded queries too: what they see is defined
        assert relative_error(out, exact) < 3e-6
    if case.transform is None:
        near = real_queries(plain(step, store.state, case), step)
        error = relative_error(near, real_queries(exact, step))
        assert relative_error(real_queries(out, step), real_queries(exact, step)) <= 2 * error + 1e-6
    else:
        assert relative_error(out, attention(case, step, store, reference)) < 0.01


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend(case):
    check(case)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 5, 6, 13)], ids=str)
def test_attend_in_pieces(case, monkeypatch):
    """Rows, query tokens and scores beyond what is held at a time."""
    monkeypatch.setattr(cpu, "BUFFER_NUMBERS", 1)
    monkeypatch.setattr(cpu, "SCORES", 1)
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 3)
    check(case)


def test_outliers():
    case = Case(outliers=True, tokens=3, lengths=(100, 60), dtype=FLOAT)
    gen = generator(case, SEED)
    store, _ = filled(case, gen, "cpu")
    step = random_step(case, gen)
    off = (attention(case, step, store, cpu) - attention(case, step, store, reference)).abs()
    assert (off <= rounding_bound(step, store.state, case)).all()


@pytest.mark.parametrize("case", [Case(padded=True, dtype=FLOAT), Case(transform="hadamard", dtype=FLOAT)], ids=str)
def test_steps_store_the_same_bytes(case):
    gen = generator(case, SEED)
    one, other = filled(case, gen, "cpu")
    for store in (one, other):
        store.reserve(200)
    for _ in range(40):
        step = random_step(case, gen)
        separate_step(reference, case, step, one)
        separate_step(cpu, case, step, other)
        assert_same_state(one.state, other.state)


def test_default_on_a_cpu(monkeypatch):
    model, _ = tiny_models("llama")
    calls = []
    original = cpu.OPERATIONS.step
    monkeypatch.setattr(cpu.OPERATIONS, "step", lambda *args: calls.append(1) or original(*args))
    cache = lb.from_preset("kivi-2", model)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
        model(torch.tensor([[5]]), past_key_values=cache)
    assert len(calls) == model.config.num_hidden_layers  # the prompt is attended to whole
    assert {layer.backend for layer in cache.packed_layers} == {"cpu"}


def test_elsewhere_it_is_refused():
    from hf_lowbit_kv.backends import choice

    with pytest.raises(ValueError, match=r"backend='cpu' needs the model on the CPU, and it is on 'meta'"):
        choice.choose_backend("cpu", choice.LayerSetup(torch.device("meta")))
