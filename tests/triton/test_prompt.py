"""Many query tokens over packed history, in stretches, on both GPU backends: `triton_kernels/prompt.py`.

Without a GPU a part of it runs in Triton's interpreter, in processes of its own (`test_interpreted`).
"""

import dataclasses
import re

import kernel_checks as kernels
import pytest
import torch
from cases import FORMATS, left_padded, tiny_models
from kernel_cases import Case, copy_state, filled, generator, plain, random_step, real_queries, relative_error

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import common, config, entry_points, prompt
from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points, geometry

LAYOUTS = ["triton", "cuda"]
#: by a backend's name, the module with its operations
MODULES = {"triton": entry_points, "cuda": cuda_entry_points}


def stored_for(case: Case, backend: str) -> Case:
    """The case with its pages in the layout of that backend."""
    spec = choice.storage_spec(case.spec, backend)
    return dataclasses.replace(case, keys=spec.key_format.name, values=spec.value_format.name)


def in_stretches(monkeypatch, case: Case, tokens: int, queries: int) -> None:
    """Let the buffer hold so many tokens of one row, and so many query tokens be carried."""
    size = 4 if case.dtype == torch.float32 else 2
    monkeypatch.setattr(prompt, "BUFFER_BYTES", tokens * case.heads * sum(case.dims) * size)
    monkeypatch.setattr(prompt, "CARRY_BYTES", queries * case.heads * case.groups * (case.dims[1] + 1) * 4)


def count(name: str) -> int:
    return common.launches.get(name, 0)


def check_truth(case: Case) -> None:
    """Against plain float32 attention over all tokens, read back by the reference: nothing in common with the kernels."""
    gen = generator(case, kernels.SEED)
    ref, dev = filled(case, gen, kernels.DEVICE)
    step = random_step(case, gen)
    expected = plain(step.float(), ref.state, case)
    here = step.to(kernels.DEVICE)
    out = prompt.attend(StepInputs(here.q, here.k, here.v, here.mask, here.scaling, case.softcap, here.sinks), dev)
    assert relative_error(real_queries(out, step), real_queries(expected, step)) < 1e-3


SMALL = [
    Case(tokens=40, heads=1),
    Case(tokens=40, padded=True, lengths=(0, 130), sinks=True, groups=3, head_dim=80, head_dim_v=96, softcap=20.0),
    Case(tokens=45, heads=1, groups=2, residual=0, sink=0, keys="int4-token", values="int8-token", lengths=(33, 200)),
    Case(tokens=33, heads=1, groups=4, lengths=(0, 0)),
    Case(tokens=33, heads=1, groups=1, lengths=(300,), heavy_sink=5.0),
    Case(tokens=130, heads=1, groups=1, keys="dense", values="dense", lengths=(1, 5), dtype=torch.float32),
    Case(tokens=33, heads=1, keys="boosted2-r0.25", values="int2-token-g32", lengths=(170, 70), padded=True),
]


def _has_layout(case: Case, layout: str) -> bool:
    return not (layout == "cuda" and case.keys.startswith("boosted"))


def _small_cases() -> list:
    """In every run are stretches in Triton's layout, and padded rows whole: `test_small_center` has padded rows in
    stretches, and `test_small_read` what differs between the layouts."""
    fast = [
        *((case, "triton", 128) for case in (SMALL[0], SMALL[2], SMALL[5])),
        (SMALL[1], "cuda", None),
        (SMALL[6], "triton", None),
    ]
    return [
        (case, layout, stretch)
        if (case, layout, stretch) in fast
        else pytest.param(case, layout, stretch, marks=pytest.mark.slow)
        for case in SMALL
        for layout in LAYOUTS
        if _has_layout(case, layout)
        for stretch in (None, 128, 256)
    ]


@kernels.needs_interpreter
@pytest.mark.parametrize(("case", "layout", "stretch"), _small_cases(), ids=str)
def test_small(case, layout, stretch, monkeypatch):
    monkeypatch.setitem(config.FUSED_ROWS, "triton", 0)
    if stretch is not None:
        in_stretches(monkeypatch, case, stretch, 20 if case.tokens < 100 else 65)  # in two parts or three
    kernels.check_attend(stored_for(case, layout))
    if case.dtype == torch.float16:
        check_truth(stored_for(case, layout))


@kernels.needs_interpreter
def test_small_center(monkeypatch):
    """What a center takes off the scores of a query is added in every stretch, for padded rows too."""
    monkeypatch.setitem(config.FUSED_ROWS, "triton", 0)
    case = Case(tokens=40, padded=True, lengths=(0, 130), groups=3, transform="eigen", softcap=9.0, sinks=True)
    in_stretches(monkeypatch, case, 128, 20)
    kernels.check_attend_transformed(case)


@kernels.needs_interpreter
@pytest.mark.parametrize(("stretch", "launches"), [(None, 1), pytest.param(1024, 2, marks=pytest.mark.slow)])
def test_small_split(stretch, launches, monkeypatch):
    """Few rows over a long history are divided among programs, and merged at the end."""
    case = Case(heads=1, groups=2, tokens=3, lengths=(1500,), sinks=True)
    if stretch is not None:
        in_stretches(monkeypatch, case, stretch, 1000)
    monkeypatch.setattr(prompt, "MERGE_SPLITS", 2)  # without stretches there are three
    before = count("prompt_kernel"), count("merge_kernel")
    check_truth(case)
    assert (count("prompt_kernel"), count("merge_kernel")) == (before[0] + launches, before[1] + 1)


@kernels.needs_interpreter
def test_small_launches(monkeypatch):
    """How rows, query tokens and history are divided where the buffer is small."""
    case = Case(tokens=40, heads=1, groups=2, capacity=600, lengths=(100, 37, 150))
    gen = generator(case, kernels.SEED)
    _, dev = filled(case, gen, "cpu")
    step = random_step(case, gen)

    def run(seen) -> tuple[torch.Tensor, int]:
        before = count("prompt_kernel")
        out = prompt.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling, seen=seen), dev)
        return out, count("prompt_kernel") - before

    expected, launches = run(None)
    assert launches == 1
    in_stretches(monkeypatch, case, 2 * 190, 1000)
    two, launches = run(150)
    assert launches == 2  # two rows together, then one
    in_stretches(monkeypatch, case, 128, 20)
    many, launches = run(150)
    assert launches == 3 * (2 + 2)  # a row at a time, 20 queries at a time, stretches of 128 tokens
    assert run(None)[1] > launches  # the capacity, where lengths are not known
    for out in (two, many):
        assert relative_error(out, expected) < 1e-3


@kernels.needs_interpreter
def test_small_threshold():
    """One row more than the fused kernel takes."""
    limit = config.FUSED_ROWS["triton"]
    for tokens, name in ((limit, "attend_kernel"), (limit + 1, "prompt_kernel")):
        before = count(name)
        kernels.check_attend(Case(tokens=tokens, groups=1, heads=1, lengths=(50,)))
        assert count(name) == before + 1


@kernels.needs_interpreter
@pytest.mark.parametrize("scaling", [-0.1, 0.0])
def test_small_scaling(scaling):
    """A factor that is not positive is unusual, and allowed."""
    case = Case(tokens=20, heads=1)
    gen = generator(case, kernels.SEED)
    ref, dev = filled(case, gen, "cpu")
    step = random_step(case, gen)
    exact = step.float()
    expected = reference.OPERATIONS.attend(StepInputs(exact.q, exact.k, exact.v, scaling=scaling), ref)
    out = prompt.attend(StepInputs(step.q, step.k, step.v, scaling=scaling), dev)
    assert relative_error(out, expected) < 2e-3


#: formats with one head size in the fast tests: other widths are the same but for a mask
ONE_SIZE = ("int2-token", "int8-channel", "boosted2-r0", "boosted2-r1")


@kernels.needs_interpreter
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        pytest.param(name, head_dim, marks=pytest.mark.slow)
        if head_dim == 96 or (name in ONE_SIZE and head_dim != 80)
        else (name, head_dim)
        for name in (
            *("int2-channel", "int4-channel-g32", "int8-channel", "int2-token", "int4-token", "int8-token-g32"),
            *("boosted2-r0", "boosted2-r0.125", "boosted2-r0.3-range", "boosted2-r1"),
        )
        for head_dim in (64, 80, 96)
        if not (name == "int8-token-g32" and head_dim == 80)  # groups of 32 do not divide it
    ]
    + [("fp8", 64), ("fp8", 80)]
    + [("int4-channel", 192), ("int8-token", 512), ("boosted2-r0.125", 512)]
    + [
        ("static-44422000", 64),
        ("static-64332222", 128),
        ("static-53222110", 64),
        ("static-442200", 96),
        ("static-4", 64),
    ],
)
def test_small_read(name, head_dim):
    """Pages in fragment order, unpacked: what the reference decodes, bit for bit."""
    values = {"boosted": "int2-token", "static": "static-3-tn"}.get(re.match("[a-z]+", name)[0], name)
    case = stored_for(Case(keys=name, values=values, head_dim=head_dim, heads=1, lengths=(130, 3)), "cuda")
    ref, dev = filled(case, generator(case, kernels.SEED), "cpu")
    for a, b in zip(
        reference.OPERATIONS.read(ref, 135),
        entry_points.OPERATIONS.read(dev, 135),
        strict=True,
    ):
        assert torch.equal(a, b)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=LAYOUTS)
def backend(request, monkeypatch):
    """A backend, whose kernels `check_attend` then takes."""
    monkeypatch.setattr(kernels, "launch", MODULES[request.param])
    return request.param


def served(case: Case, backend: str) -> Case:
    if backend == "cuda" and (reason := geometry.why_not(case.spec, case.dims, None, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    return stored_for(case, backend)


BASE = {"head_dim": 128, "page_size": 128, "residual": 128, "sink": 4, "lengths": (1000, 1, 417)}


def _gpu_cases() -> list[Case]:
    """Every format, in ragged and padded chunks; every head size; thresholds; what a kernel is specialised by."""
    cases = [
        Case(keys=keys, values=values, tokens=150 + i, groups=4, padded=i % 2 > 0, dtype=(torch.float16, torch.bfloat16)[i % 2],
             **BASE)
        for i, (keys, values) in enumerate(FORMATS)
    ]  # fmt: skip
    cases += [Case(keys="boosted2-r0.25", values="int2-token", tokens=300, **BASE)]
    for dim, dim_v in ((64, 64), (80, 80), (96, 64), (64, 96), (256, 256)):
        cases.append(Case(tokens=300, groups=1, padded=dim > 64, **BASE | {"head_dim": dim, "head_dim_v": dim_v}))
    cases += [Case(tokens=tokens, groups=4, **BASE) for tokens in (32, 33, 64, 65)]
    cases += [
        Case(tokens=200, softcap=30.0, sinks=True, padded=True, groups=2, **BASE),
        Case(tokens=300, outliers=True, dtype=torch.bfloat16, **BASE),
        Case(tokens=300, groups=1, heavy_sink=5.0, **BASE | {"lengths": (1000, 600, 417)}),
        Case(tokens=2100, heads=8, **BASE | {"lengths": (3000,)}),
        Case(tokens=130, **BASE | {"lengths": (0, 0)}),
    ]
    return cases


def _attends() -> list:
    """In every run are long chunks and narrow heads in stretches with one backend, and whole with the other."""
    return [
        pytest.param(backend, case, stretch, marks=pytest.mark.slow)
        if (case.heads == 8 or case.head_dim in (64, 80)) and (stretch is None) != (backend == "triton")
        else (backend, case, stretch)
        for backend in LAYOUTS
        for case in _gpu_cases()
        for stretch in ((None, 512) if case.tokens >= 300 else (None,))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "case", "stretch"), _attends(), indirect=["backend"], ids=str)
def test_attend(case, stretch, backend, monkeypatch):
    if stretch is not None:
        in_stretches(monkeypatch, case, stretch, 200)
    kernels.check_attend(served(case, backend))


@pytest.mark.gpu
def test_float32(monkeypatch):
    case = Case(tokens=150, dtype=torch.float32, **BASE)
    in_stretches(monkeypatch, case, 512, 100)
    kernels.check_attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 3000])
def test_memory(tokens, backend):
    """What is allocated on the way does not grow with the history, and hardly with the rows."""
    spec = choice.storage_spec(Case(**BASE).spec, backend)
    store = PagedStore(spec, 1, 8, 128, 128, torch.bfloat16, "cuda", capacity=200_000)
    for block in store.state.pool:
        block.zero_()
    store.state.length.fill_(190_000)
    store.state.paged.fill_(spec.paged_after(190_000 - spec.sink))
    q = torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    peaks = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = MODULES[backend].OPERATIONS.attend(StepInputs(q, k, v, scaling=0.1), store)
        peaks.append(torch.cuda.max_memory_allocated() - before - out.nbytes)
        del out
    assert peaks[-1] < config.BUFFER_BYTES + config.CARRY_BYTES + 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 700}], ids=["growing", "preallocated"])
def test_model(options, backend):
    """Padded prompts in long chunks, a second turn, then decoding, with a whole model, against the reference."""
    model = tiny_models("llama")[0].half().cuda()
    ids, mask = (x.cuda() for x in left_padded(3, 600))
    outs = []
    for name in (backend, "torch"):
        cache = lb.from_preset("kivi-4", model, backend=name, residual=32, page_size=32, **options)
        logits = []
        with torch.no_grad():
            for start, stop in ((0, 250), (250, 500), (500, 501), (501, 600)):
                out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
                logits.append(out.logits[mask[:, start:stop].bool()].float())
        outs.append(torch.cat(logits))
    assert ((outs[0] - outs[1]).norm() / outs[1].norm()) < 1e-2


@pytest.mark.gpu
def test_graph(backend):
    """Nothing waits for the device: a long chunk can be captured, and replayed on another history."""
    case = served(Case(tokens=100, groups=4, padded=True, capacity=1500, **BASE), backend)
    gen = generator(case, kernels.SEED)
    ref, dev = filled(case, gen, "cuda")
    step = random_step(case, gen)
    here = step.to("cuda")
    module = MODULES[backend]

    def run():
        return module.OPERATIONS.attend(StepInputs(here.q, here.k, here.v, here.mask, here.scaling), dev)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    other = dataclasses.replace(case, lengths=(3, 1100, 600))
    ref, found = filled(other, generator(other, 1), "cuda")
    copy_state(found.state, dev.state)
    graph.replay()
    exact = step.float()
    expected = reference.OPERATIONS.attend(StepInputs(exact.q, exact.k, exact.v, step.mask, step.scaling), ref)
    assert relative_error(real_queries(out, step), real_queries(expected, step)) < 2e-3


def test_a_format_that_is_read_needs_only_decode():
    """`prompt` knows no format: what it takes of one is `params` and `decode`, whatever the layout."""
    from hf_lowbit_kv.triton_kernels.registry import reader

    for name in ("dense", "int4-token", "int4-channel@fragment-1", "boosted2-r0.25"):
        module = reader(parse_format(name))
        assert callable(module.params)
        assert hasattr(module, "decode")
