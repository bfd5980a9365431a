"""The CUDA kernels without a GPU: the checks of `kernel_checks`, on kernels compiled for the CPU (`cuda_emulator`)."""

import contextlib
import dataclasses

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from cuda_cases import LONG_CHUNKS, check_long_chunk, fragment
from emulated import emulated, needs_emulator
from kernel_cases import Case, check_steps, filled, generator, plain, random_step, relative_error
from kernel_matrix import CODEBOOK_STORES, EIGEN_2, EIGEN_3, TRANSFORMS, static_sizes
from scale_cases import CONSTANT_ROWS, HEAVY_TOKEN, check_constant_rows, check_heavy_token, spread_cases

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import determinism
from hf_lowbit_kv.triton_kernels.cuda import decode_kernel, modules

pytestmark = needs_emulator


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    with emulated(monkeypatch) as cuda:
        yield cuda


KITTY = {"keys": "boosted2-r0.125", "values": "int2-token"}
DENSE = {"keys": "dense", "values": "dense"}
PAIRS = [
    {"keys": "int4-channel", "values": "int4-token"},
    {"keys": "int8-token", "values": "int8-token-g32"},
    {"keys": "int2-channel", "values": "int2-channel"},
    DENSE,
    KITTY,
]
PAGES = {"head_dim": 128, "page_size": 128, "residual": 128, "sink": 32}


ATTENDS = [
    Case(),
    Case(keys="int8-token-g32", values="int8-channel", lengths=(300, 1), dtype=torch.bfloat16, softcap=20.0, sinks=True),
    Case(keys="dense", values="dense", head_dim=80, tokens=5, padded=True, sink=0, residual=0),
    Case(**KITTY, **PAGES, lengths=(700, 290), heads=1),
    Case(keys="boosted2-r0.3", values="int4-token", head_dim=96, groups=16, dtype=torch.bfloat16),
    Case(keys="int2-channel", values="int2-token", lengths=(1900, 1900), heads=1, **PAGES),
    Case(keys="int8-token", values="int2-token", heads=1, **PAGES, lengths=(1000,), value_offset=-100.0),
    Case(**KITTY, **PAGES, lengths=(1500,), heads=1, groups=1, heavy_sink=5.0, dtype=torch.float16),
    Case(keys="vq-d4b8", values="vq-d4b8", **PAGES, lengths=(700, 1, 290)),
    Case(keys="int6-token", values="int6-token", **PAGES, lengths=(700, 1, 290)),
    Case(**EIGEN_3, **PAGES, lengths=(700, 1, 290), heads=1, groups=3, tokens=5, padded=True, softcap=20.0, sinks=True),
]  # fmt: skip
SLOW_ATTENDS = [
    Case(**KITTY, lengths=(0, 0), heads=1),
    Case(lengths=(3700,), heads=1, head_dim=64, page_size=64),
    Case(heads=1, outliers=True),
    *(Case(keys="int8-token", values=values, heads=1, **PAGES, lengths=(1000,), value_offset=-100.0)
      for values in ("int8-token", "int4-token-g32")),
    *(Case(keys=keys, values="int8-token", heads=1, **PAGES, lengths=(1000,), key_size=2.0**-10)
          for keys in ("int8-channel", "int4-channel", "int2-channel", "int8-token", "boosted2-r0.125")),
    Case(keys="int8-channel", values="int8-token", heads=1, outliers=True),
    *(Case(**pair, **PAGES, lengths=(1500,), heads=1, groups=1, heavy_sink=5.0, dtype=dtype)
      for dtype in (torch.float16, torch.bfloat16) for pair in PAIRS if (dtype, pair) != (torch.float16, KITTY)),
    Case(**KITTY, **PAGES, lengths=(500, 1, 417), heads=1, outliers=True, dtype=torch.bfloat16),
    Case(keys="int2-channel", values="int2-token", **PAGES, lengths=(1900, 700), heads=1, groups=16),
    Case(keys="vq-d8b12", values="vq-d2b8", **PAGES, lengths=(300,), groups=3, sinks=True, softcap=20.0),
    Case(keys="vq-d2b3", values="vq-d8b8", lengths=(300,), groups=16, dtype=torch.bfloat16),
    Case(**KITTY, **PAGES, lengths=(700, 1, 290), heads=1, groups=3, tokens=5, padded=True, softcap=20.0, sinks=True),
    Case(keys="int5-token", values="int5-token", lengths=(300, 40), groups=3, heads=1, dtype=torch.bfloat16),
    Case(keys="int6-channel", values="int5-channel-g32", lengths=(300,), heads=1, tokens=3, padded=True, sinks=True),
    Case(keys="int5-channel", values="int6-token-g32", lengths=(300,), heads=1, head_dim=96, outliers=True),
    Case(keys="int6-channel-g32", values="int6-channel", lengths=(300,), heads=1, head_dim=80, key_size=2.0**-10),
    Case(**EIGEN_2, **PAGES, lengths=(700, 1, 290)),
    Case(**EIGEN_2, lengths=(300, 1), groups=8, dtype=torch.bfloat16),
    Case(**EIGEN_3, lengths=(300, 40), groups=16, heads=1, dtype=torch.bfloat16),
    Case(**EIGEN_2, **PAGES, lengths=(1500,), heads=1, groups=1, heavy_sink=5.0),
    Case(**EIGEN_3, **PAGES, lengths=(500, 1), heads=1, outliers=True),
    Case(keys="static-53222110", values="static-4-tn", lengths=(300, 40), groups=1, page_size=64),
    Case(keys="static-44422000", values="static-2-tn", **PAGES, lengths=(700, 1, 290)),
    Case(keys="static-65444333", values="static-4-tn", lengths=(300, 40), heads=1, groups=3, dtype=torch.bfloat16),
    Case(keys="static-4", values="static-3-tn", lengths=(300,), heads=1, head_dim=96, page_size=64, padded=True, tokens=3),
    Case(keys="static-442200", values="static-2-tn", head_dim=96, page_size=256, lengths=(600,), heads=1),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*ATTENDS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_ATTENDS)], ids=str
)
def test_attend(case):
    kernels.check_attend(fragment(case))


SPREAD = spread_cases(**PAGES, heads=1, lengths=(800,))
#: in libraries that other cases have
FEW_SPREAD = [
    *(case for case in SPREAD if case.spread == "values" and case.values == "int2-token"),
    Case(keys="int2-channel", values="int2-token", **PAGES, heads=1, lengths=(800,), spread="keys"),
]
MORE_SPREAD = [pytest.param(case, marks=pytest.mark.slow) for case in SPREAD if case not in FEW_SPREAD]


@pytest.mark.parametrize("case", [*FEW_SPREAD, *MORE_SPREAD], ids=str)
def test_scales_of_all_sizes(case):
    kernels.check_attend(fragment(case))


@pytest.mark.parametrize(
    "case",
    [
        case if case.dtype == torch.bfloat16 else pytest.param(case, marks=pytest.mark.slow)
        for case in static_sizes(**EIGEN_2, **PAGES, heads=1, lengths=(500,))
    ],
    ids=str,
)
def test_steps_of_all_sizes(case):
    kernels.check_attend(fragment(case))


@pytest.mark.parametrize(
    "case", [CONSTANT_ROWS[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CONSTANT_ROWS[1:])], ids=str
)
def test_constant_rows(case):
    check_constant_rows(kernels.attend_poisoned, fragment(case), "cpu", kernels.SEED)


@pytest.mark.parametrize(
    ("variable", "mode", "fixed"), [(None, False, 0), (None, True, 1), ("0", True, 0), ("1", False, 1)]
)
def test_fixed_order(variable, mode, fixed, launch, monkeypatch):
    """PyTorch's mode requests it like the package's own variable, which has priority. Outputs are right in both orders."""
    loaded = []
    load = modules.load
    monkeypatch.setattr(
        modules, "load", lambda name, defines, device: loaded.append(dict(defines)) or load(name, defines, device)
    )
    monkeypatch.delenv(determinism.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(determinism.VARIABLE, variable)
    case = fragment(Case(keys="int2-channel", values="int2-token", **PAGES, lengths=(1900, 300), heads=1))
    gen = generator(case, kernels.SEED)
    ref, dev = filled(case, gen, "cpu")
    step = random_step(case, gen)
    with determinism.deterministic() if mode else contextlib.nullcontext():
        out = launch.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), dev)
    assert [int(defines["ORDERED"]) for defines in loaded if "ORDERED" in defines] == [fixed]
    wide = step.float()
    exact = reference.OPERATIONS.attend(StepInputs(wide.q, wide.k, wide.v, scaling=step.scaling), ref)
    assert relative_error(out, exact) <= 2 * relative_error(plain(step, ref.state, case), exact) + 1e-6


def test_a_heavy_token_in_a_page_leaves_the_others_their_part():
    """Weights of 2^-19 beside one of 0.8 are not lost."""
    case = dataclasses.replace(HEAVY_TOKEN, residual=128, sink=32)  # a library that other cases have
    check_heavy_token(kernels.attend_poisoned, fragment(case), "cpu")


@pytest.mark.parametrize(
    "case", [LONG_CHUNKS[0], *(pytest.param(case, marks=pytest.mark.slow) for case in LONG_CHUNKS[1:])], ids=str
)
def test_long_chunks_where_triton_cannot_launch(case, launch, monkeypatch):
    check_long_chunk(case, launch, monkeypatch)


@pytest.mark.parametrize("preset", [pytest.param("kivi-2", marks=pytest.mark.slow), "kitty-hadamard"])
def test_generate_without_triton(preset, launch, monkeypatch):
    """Prompt, steps and a second turn of a model: no kernel of Triton's is launched, and the text is the reference's."""
    from triton.runtime.jit import JITFunction

    def refused(*args, **kwargs):
        raise AssertionError("a kernel of Triton's was launched")

    monkeypatch.setattr(JITFunction, "run", refused)
    monkeypatch.setattr(launch, "why_triton_cannot_launch", lambda: "no compiler")
    model = tiny_models("llama")[0].half()
    prompt = torch.randint(3, 160, (1, 130), generator=torch.Generator().manual_seed(0))
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    assert prompt.shape[1] * groups > launch.FUSED_ROWS["cuda"]
    texts = []
    for backend in ("torch", "cuda"):
        monkeypatch.setattr(choice, "choose_backend", lambda *args, chosen=backend: chosen)
        cache = lb.from_preset(preset, model, **SMALL_PAGES)
        options = {"past_key_values": cache, "do_sample": False, "pad_token_id": 0}
        text = model.generate(prompt, max_new_tokens=12, **options)
        texts.append(model.generate(torch.cat([text, prompt[:, :20]], 1), max_new_tokens=3, **options))
    assert launch.launches["attend_kernel"] > 0
    assert torch.equal(*texts)


def test_a_chunk_longer_than_a_grid(launch, monkeypatch):
    for module in (launch, decode_kernel):
        monkeypatch.setattr(module, "why_triton_cannot_launch", lambda: "Triton needs a C compiler")
    monkeypatch.setattr(decode_kernel, "MAX_ROW_BLOCKS", 20)
    kernels.check_attend(fragment(Case(tokens=160, lengths=(40,), heads=1, groups=2)))
    with pytest.raises(ValueError, match=r"a chunk of 161 tokens.*allowed here: 160.*prefill_chunk_size.*C compiler"):
        kernels.check_attend(fragment(Case(tokens=161, lengths=(40,), heads=1, groups=2)))


#: on a multiprocessor with 64 KiB of shared memory a warp group has one warp
ONE_WARP = Case(**DENSE, head_dim=128, head_dim_v=256, heads=1, groups=1, sink=31, residual=0, page_size=128)


def test_one_warp_takes_window_and_pages(launch, monkeypatch):
    """The warp's part of the window, n / n, is less than 1 for n = 41 where division is by a rounded reciprocal."""
    with emulated(monkeypatch, shared=64, processors=1):
        kernels.check_attend(fragment(dataclasses.replace(ONE_WARP, lengths=(31 + 40 * 64,))))


def test_more_warp_groups_share_a_row_than_are_merged_at_a_time(launch, monkeypatch):
    with emulated(monkeypatch, shared=64, processors=12):
        kernels.check_attend(fragment(dataclasses.replace(ONE_WARP, groups=4, lengths=(31 + 16 * 64,))))


def test_counters_stay_where_they_are(launch):
    """Captured graphs keep their address; they are the layer's own."""
    case = fragment(Case(lengths=(60, 37), heads=1))
    gen = kernels.generator(case, kernels.SEED)
    _, store = kernels.filled(case, gen, "cpu")
    for tokens in (4, 1, 60):
        step = kernels.random_step(dataclasses.replace(case, tokens=tokens), gen)
        launch.OPERATIONS.attend(StepInputs(step.q, step.k, step.v, scaling=step.scaling), store)
        row_blocks = -(-case.groups * tokens // 8)
        count = row_blocks * case.heads * len(case.lengths) + 1
        assert decode_kernel.counters_for(store.state, count) is store.state.scratch
        assert not store.state.scratch.any()


TRANSFORMED = [
    Case(head_dim=80, groups=2, transform="smooth+hadamard", value_transform="matrix"),
    Case(**EIGEN_2, lengths=(300, 37), transform="eigen", value_transform="hadamard"),
    Case(**EIGEN_2, lengths=(90, 3), transform="eigen", value_transform="hadamard", softcap=20.0, dtype=torch.bfloat16),
    Case(**PAGES, lengths=(300,), groups=3, tokens=4, padded=True, transform="smooth+eigen", softcap=9.0, sinks=True),
]
SLOW_TRANSFORMED = [
    Case(**KITTY, **PAGES, lengths=(700, 1, 290), transform="hadamard"),
    Case(head_dim=96, groups=3, tokens=5, padded=True, lengths=(300, 1, 90), transform="hadamard"),
    Case(head_dim=80, tokens=10, heads=1, dtype=torch.bfloat16, transform="hadamard"),
    Case(groups=2, transform="hadamard+smooth", value_transform="hadamard"),
    Case(**PAGES, lengths=(700, 1), groups=3, tokens=2, padded=True, transform="matrix", value_transform="hadamard"),
    Case(head_dim=96, heads=1, transform="matrix", dtype=torch.bfloat16, sinks=True),
    Case(head_dim=80, head_dim_v=256, lengths=(40,), transform="matrix", value_transform="hadamard"),
    Case(heads=1, groups=16, lengths=(3,) * 40, transform="matrix", value_transform="hadamard"),
]


@pytest.mark.parametrize(
    "case", [*TRANSFORMED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_TRANSFORMED)], ids=str
)
def test_attend_transformed(case):
    kernels.check_attend_transformed(fragment(case))


STORES = [
    (Case(padded=True), [20, 0, 200, 0, 0]),
    (Case(**KITTY, heads=1, padded=True), [90, 70, 0, 0]),
    (
        Case(keys="boosted2-r0.25-variance", values="int4-channel-g32", head_dim=80, heads=1, dtype=torch.bfloat16),
        [70, 0],
    ),
    (Case(keys="vq-d4b8", values="vq-d2b3", lengths=(5,), outliers=True), [70]),
    (Case(keys="int6-token", values="int5-token", residual=0, heads=1, outliers=True), [70, 0]),
    (Case(keys="boosted2-r0.3-random5", values="int8-token", residual=0, heads=1, outliers=True), [70, 0]),
    (Case(heads=1, padded=True, capacity=60, lengths=(1, 1, 1)), [70, 60, 0, 0]),
    (Case(keys="static-65444333", values="static-2-tn", heads=1, lengths=(5,), outliers=True), [70, 0]),
    (Case(keys="vq-d4b8", values="vq-d2b3", lengths=(5,), heads=1, ties=True), [70]),
]
SLOW_STORES = [
    (Case(keys="int5-channel-g32", values="int6-token-g32", heads=1, lengths=(5,)), [70, 0]),
    (
        Case(keys="int6-channel", values="int6-channel", heads=1, lengths=(5,), head_dim=80, dtype=torch.bfloat16),
        [70],
    ),
    (Case(keys="vq-d8b8", values="vq-d4b4", lengths=(5,), heads=1, dtype=torch.bfloat16), [90]),
    *CODEBOOK_STORES,
    (Case(**EIGEN_2, heads=1, padded=True, lengths=(5, 9)), [90, 0]),
    (Case(**EIGEN_2, **PAGES | {"residual": 5}, heads=1, lengths=(5,), outliers=True), [200]),
    (Case(**EIGEN_3, heads=1, lengths=(5,), dtype=torch.bfloat16, outliers=True, key_size=2.0**-20), [70]),
    (Case(keys="static-53222110", values="static-4-tn", heads=1, lengths=(5,), value_size=2.0**-8), [70, 0]),
    (Case(keys="static-4", values="static-4-tn", heads=1, lengths=(5,), dtype=torch.bfloat16), [70]),
    (Case(keys="vq-d4b8", values="vq-d2b8", lengths=(5,), outliers=True), [70]),
    (Case(**KITTY, heads=1, padded=True, page_size=64), [90, 70, 0, 0]),
]


@pytest.mark.parametrize(
    ("case", "chunks"), [*STORES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_STORES)], ids=str
)
def test_store(case, chunks):
    assert kernels.check_store(fragment(case), chunks), "the chunks are too short for a page"


def test_full_rows():
    kernels.check_full_rows(fragment(Case(capacity=60)))


#: a step in one launch: straight into pages or through the ring, one block of query rows and two, rows of any length, padding,
#: pages that are due in every way, no room left
STEPS = [
    (Case(lengths=(130, 64, 1)), 7),
    (Case(keys="dense", values="dense", lengths=(98, 0), residual=0, padded=True), 9),
    (Case(**KITTY, lengths=(103, 38), residual=5, transform="hadamard", heads=1), 6),
    (Case(head_dim=80, head_dim_v=96, lengths=(94,), capacity=100, sinks=True, softcap=20.0), 8),
    (Case(**EIGEN_2, lengths=(66, 64), transform="hadamard", value_transform="hadamard"), 6),
    (Case(**KITTY, **PAGES, lengths=(286, 700), heads=1), 4),
]
SLOW_STEPS = [
    (Case(keys="vq-d4b8", values="vq-d8b4", lengths=(66, 64), transform="smooth+hadamard"), 6),
    (Case(lengths=(100, 37, 5)), 40),
    (Case(keys="dense", values="dense", lengths=(96, 0), residual=0, padded=True), 36),
    (Case(keys="int8-token", values="int4-token-g32", lengths=(65, 2), residual=0, sink=3, padded=True), 36),
    (Case(keys="int2-channel", values="int8-channel", lengths=(60,), heads=1, residual=0, groups=24), 36),
    (Case(keys="int4-token", values="int2-token", lengths=(130,), heads=1, residual=0, groups=20), 5),
    (Case(**KITTY, lengths=(91, 33), residual=5, transform="hadamard", dtype=torch.bfloat16), 34),
    (Case(lengths=(128, 130), capacity=100, heads=1, padded=True), 7),
    (Case(head_dim=256, lengths=(66,), heads=1, groups=16, residual=0, transform="hadamard"), 3),
    (Case(keys="vq-d4b8", values="vq-d8b4", lengths=(60, 37), transform="smooth+hadamard"), 30),
    (Case(**EIGEN_2, lengths=(60, 37), transform="hadamard", value_transform="hadamard"), 30),
    (Case(**EIGEN_3, **PAGES, lengths=(286, 700), heads=1, groups=8, dtype=torch.bfloat16), 4),
    (Case(**KITTY, **PAGES, lengths=(1950, 1950), heads=1), 2),
    (Case(**KITTY, **PAGES, lengths=(286, 1950), heads=1, groups=16), 2),
]


@pytest.mark.parametrize(
    ("case", "steps"), [*STEPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_STEPS)], ids=str
)
def test_step(case, steps, launch):
    check_steps(launch, fragment(case), steps, kernels.SEED, "cpu", twin=(case, steps) in SLOW_STEPS)


@pytest.mark.parametrize(
    "barrier",
    [
        "queries_ready",
        "sums_ready",  # of the warps, to be merged
        "tokens_ready",  # of a page, to be packed
        "merging_done",  # with its memory, which packing uses then
    ],
)
def test_a_missing_barrier_is_seen(barrier, launch, monkeypatch):
    monkeypatch.setattr(modules, "load", lambda name, defines, device: cuda_emulator.Module(name, defines, barrier))
    with pytest.raises(AssertionError, match="races in shared memory"):
        check_steps(launch, fragment(Case(lengths=(94, 90), heads=1)), 8, kernels.SEED, "cpu", twin=False)


#: rotations that begin with blocks of 12 channels and of one, and each order of factors and rotation once (blocks of 20 are
#: in `TRANSFORMED`)
FAST_TRANSFORMS = [(96, torch.float16, "smooth+hadamard"), (128, torch.float16, "hadamard+smooth")]


@pytest.mark.parametrize(
    "options",
    [
        x if x in FAST_TRANSFORMS else pytest.param(x, marks=pytest.mark.slow)
        for x in TRANSFORMS
        if x[1] == torch.float16
    ],
    ids=str,
)
def test_transform(options):
    kernels.check_transform(*options)
