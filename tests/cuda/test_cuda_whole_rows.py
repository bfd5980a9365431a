"""Batches with more rows than teams of warps: rows of one length are dealt out whole, others are cut into equal shares. In the
emulator (`cuda_emulator`)."""

from __future__ import annotations

import ctypes

import cuda_emulator
import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from emulated import emulated
from kernel_cases import Case, check_steps
from kernel_matrix import EIGEN_2
from marked import slow_case

from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels.cuda import decode_kernel, geometry

pytestmark = [
    pytest.mark.skipif(not cuda_emulator.available(), reason="needs g++ and an x86 processor"),
    pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the kernels themselves run elsewhere"),
]


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    with emulated(monkeypatch, processors=2) as cuda:
        yield cuda


@pytest.fixture
def dealt(monkeypatch):
    """How rows were dealt out, launch by launch."""
    found = []
    deal = geometry.rows_of_teams
    monkeypatch.setattr(
        decode_kernel, "rows_of_teams", lambda teams, heads: found.append(deal(teams, heads)) or found[-1]
    )
    return found


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(lengths=(70,) * 8), -2),  # 16 rows, two processors with four teams each
        (Case(lengths=(70,) * 35), -9),  # more sequences than a warp has lanes; the last team has fewer rows
        (Case(lengths=(70,) * 140, heads=1, head_dim=64), -18),  # more than lengths are loaded for at a time
        (Case(lengths=(70,) * 4), 1),
        (Case(lengths=(70, 70, 70, 70, 69, 70, 70, 70)), -2),  # not of one length: shares
        (Case(lengths=(0,) * 8), -2),
        # a pool's rows, and the empty slots after them
        (Case(lengths=(310, 70, 1, *(0,) * 13)), -4),
        slow_case(Case(lengths=(90,) * 8, keys="vq-d4b8", values="vq-d8b4"), -8),
        (Case(lengths=(90,) * 8, groups=3, tokens=2, padded=True, softcap=20.0, sinks=True), -2),
        slow_case(Case(lengths=(90,) * 8, heads=1, groups=16, dtype=torch.bfloat16), 1),
        slow_case(Case(**EIGEN_2, lengths=(90,) * 8), -2),
        # four teams have room with pieces of 32 tokens, not with 64
        (Case(lengths=(290,) * 4, head_dim=128, page_size=128, residual=128), 1),
    ],
    ids=str,
)
def test_attend(case, rows, dealt):
    kernels.check_attend(fragment(case))
    assert set(dealt) == {rows}


class Counting(cuda_emulator.Module):
    """Counts the parts of rows that each team takes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        begin = "const Row row = part.row;"
        if begin in self.text:
            self.text = f'extern "C" {{ int taken[1024]; }}\n{self.text}'.replace(
                begin, f"{begin} if (thread == 0) taken[here]++;"
            )
            Counting.last = self


def test_empty_rows_do_not_all_go_to_one_team(monkeypatch):
    """After the rows of a pool come empty ones, which cost a team time and no bytes: three long rows would leave them to one
    or two teams."""
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
        pytest.param(Case(lengths=(1,) * 125 + (98,) * 6, heads=2, padded=True, capacity=60), 3, id="many-counters"),
    ],
    ids=str,
)
def test_step(case, steps, launch):
    check_steps(launch, fragment(case), steps, kernels.SEED, "cpu", twin=False)


@pytest.mark.parametrize(
    ("teams", "heads", "rows"),
    [
        (528, 2048, -4),
        (528, 512, 0),
        (512, 512, 1),
        (128, 64, 2),
        (396, 2376, -6),
        (396, 512, 0),
        (264, 2048, -8),
        (10, 11, 0),
    ],
)
def test_rows_are_dealt_out_where_that_is_even(teams, heads, rows):
    assert geometry.rows_of_teams(teams, heads) == rows


@pytest.mark.parametrize(
    ("preset", "head_dim", "heads", "warps", "teams"),
    [
        ("kivi-2", 128, 512, 3, 4),  # 64 sequences, 8 KV heads: a team a row
        ("kivi-2", 128, 2048, 3, 4),
        ("kitty-pro", 128, 512, 6, 2),  # packing takes a thread for every channel
        ("kivi-4", 128, 512, 3, 4),  # with pieces of 32 tokens: four teams have no room for 64
        ("kivi-4", 128, 256, 6, 2),
        ("kivi-2", 128, 64, 12, 1),
        ("kivi-2", 128, 256, 6, 2),
        ("kivi-2", 256, 16, 8, 1),
        ("kitty-pro", 256, 16, 8, 1),
        ("kv8", 256, 16, 6, 1),  # no room for more
    ],
)
def test_layouts_of_an_h200(preset, head_dim, heads, warps, teams):
    spec = fragment(Case()).spec  # its layouts
    spec = get_preset(preset).spec().with_layouts(spec.key_format.layout, spec.value_format.layout)
    choice = geometry.choose(spec, head_dim, head_dim, torch.float16, 4, heads)
    assert (choice.warps, choice.teams) == (warps, teams)
    assert geometry.can_store(spec, head_dim, head_dim, choice)
