"""Batches with more rows than warp groups: rows of one length are assigned whole, others are cut into equal ranges. In the
emulator (`cuda_emulator`)."""

import ctypes

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated, needs_emulator
from kernel_cases import Case, check_steps
from kernel_matrix import EIGEN_2

from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels.cuda import decode_kernel, geometry

pytestmark = needs_emulator

RANGES = geometry.Assignment(geometry.Schedule.WORK_RANGES)


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    with emulated(monkeypatch, processors=2) as cuda:
        yield cuda


@pytest.fixture
def assignments(monkeypatch):
    """The assignment of rows in each launch."""
    assigned = []
    assign = geometry.assign_rows
    monkeypatch.setattr(
        decode_kernel, "assign_rows", lambda groups, heads: assigned.append(assign(groups, heads)) or assigned[-1]
    )
    return assigned


def splits(count: int) -> geometry.Assignment:
    """Each row has `count` warp groups."""
    return geometry.Assignment(geometry.Schedule.ROW_SPLITS, count)


def whole(count: int) -> geometry.Assignment:
    """Each warp group has `count` rows."""
    return geometry.Assignment(geometry.Schedule.WHOLE_ROWS, count)


@pytest.mark.parametrize(
    ("case", "assignment"),
    [
        (Case(lengths=(70,) * 8), whole(2)),  # 16 rows, two processors with four warp groups each
        (Case(lengths=(70,) * 35), whole(9)),  # more sequences than lanes; the last warp group has fewer rows
        (Case(lengths=(70,) * 140, heads=1, head_dim=64), whole(18)),  # more sequences than one batch of loads has
        (Case(lengths=(70,) * 4), splits(1)),
        (Case(lengths=(70, 70, 70, 70, 69, 70, 70, 70)), whole(2)),  # not of one length: the kernel uses work ranges
        (Case(lengths=(0,) * 8), whole(2)),
        # the rows of a pool, followed by empty ones
        (Case(lengths=(310, 70, 1, *(0,) * 13)), whole(4)),
        pytest.param(Case(lengths=(90,) * 8, keys="vq-d4b8", values="vq-d8b4"), whole(8), marks=pytest.mark.slow),
        (Case(lengths=(90,) * 8, groups=3, tokens=2, padded=True, softcap=20.0, sinks=True), whole(2)),
        pytest.param(
            Case(lengths=(90,) * 8, heads=1, groups=16, dtype=torch.bfloat16), splits(1), marks=pytest.mark.slow
        ),
        pytest.param(Case(**EIGEN_2, lengths=(90,) * 8), whole(2), marks=pytest.mark.slow),
        # four warp groups have room with KV tiles of 32 tokens, not with 64
        (Case(lengths=(290,) * 4, head_dim=128, page_size=128, residual=128), splits(1)),
    ],
    ids=str,
)
def test_attend(case, assignment, assignments):
    kernels.check_attend(fragment(case))
    assert set(assignments) == {assignment}


class Counting(cuda_emulator.Module):
    """Counts the splits of each warp group."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        begin = "const Row row = split.row;"
        if begin in self.text:
            self.text = f'extern "C" {{ int taken[1024]; }}\n{self.text}'.replace(
                begin, f"{begin} if (thread == 0) taken[grid_warp_group]++;"
            )
            Counting.last = self


def test_empty_rows_do_not_all_go_to_one_warp_group(monkeypatch):
    """A pool's rows are followed by empty ones, which cost time but no bytes. By bytes, one or two warp groups would get all
    of them."""
    case = Case(lengths=(4000, 3900, 3950, *(0,) * 45), heads=1, head_dim=64)
    with emulated(monkeypatch, processors=4, module=Counting):
        kernels.check_attend(fragment(case))
    taken = list((ctypes.c_int * 1024).in_dll(Counting.last.library, "taken"))
    busiest, launches = max(taken), Counting.last.launched
    assert sum(taken) >= 48 * launches, "every row is taken"
    assert busiest <= 8 * launches


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case(lengths=(66,) * 8), 3),
        (Case(lengths=(66,) * 8, transform="smooth+hadamard", keys="int2-channel", values="int2-token"), 3),
        (Case(lengths=(66,) * 7 + (65,)), 3),  # pages are due at different steps
        (Case(lengths=(0,) * 140, heads=1), 2),
        # more than 256 counters are advanced in batches; some tokens are padding, and some rows get full
        pytest.param(Case(lengths=(1,) * 125 + (98,) * 6, heads=2, padded=True, capacity=60), 2, id="many-counters"),
    ],
    ids=str,
)
def test_step(case, steps, launch):
    check_steps(launch, fragment(case), steps, kernels.SEED, "cpu", twin=False)


@pytest.mark.parametrize(
    ("warp_groups", "heads", "assignment", "encoded"),
    [
        (528, 2048, whole(4), -4),
        (528, 512, RANGES, 0),
        (512, 512, splits(1), 1),
        (128, 64, splits(2), 2),
        (396, 2376, whole(6), -6),
        (396, 512, RANGES, 0),
        (264, 2048, whole(8), -8),
        (10, 11, RANGES, 0),
    ],
)
def test_whole_rows_are_assigned_if_that_is_even(warp_groups, heads, assignment, encoded):
    assert geometry.assign_rows(warp_groups, heads) == assignment
    assert assignment.encoded == encoded


@pytest.mark.parametrize(
    ("preset", "head_dim", "heads", "warps", "warp_groups"),
    [
        ("kivi-2", 128, 512, 3, 4),  # 64 sequences, 8 KV heads: one warp group per row
        ("kivi-2", 128, 2048, 3, 4),
        ("kitty-pro", 128, 512, 6, 2),  # packing needs a thread per channel
        ("kivi-4", 128, 512, 3, 4),  # with KV tiles of 32 tokens: four warp groups have no room for 64
        ("kivi-4", 128, 256, 6, 2),
        ("kivi-2", 128, 64, 12, 1),
        ("kivi-2", 128, 256, 6, 2),
        ("kivi-2", 256, 16, 8, 1),
        ("kitty-pro", 256, 16, 8, 1),
        ("kv8", 256, 16, 6, 1),  # no room for more
    ],
)
def test_kernel_shapes_on_an_h200(preset, head_dim, heads, warps, warp_groups):
    spec = fragment(Case()).spec  # its layouts
    spec = get_preset(preset).spec().with_layouts(spec.key_format.layout, spec.value_format.layout)
    shape = geometry.choose_shape(spec, head_dim, head_dim, torch.float16, 4, heads)
    assert (shape.warps, shape.warp_groups) == (warps, warp_groups)
    assert geometry.can_append(spec, head_dim, head_dim, shape)
