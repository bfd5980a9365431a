"""What tests of the CUDA kernels share: cases in their page layout, and chunks with many query rows."""

import dataclasses

import kernel_checks as kernels
import torch
from kernel_cases import Case

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.triton_kernels import prompt

GPU = torch.cuda.is_available() and not kernels.INTERPRETED


def fragment(case: Case) -> Case:
    """The case with its formats in the layout of the CUDA kernels."""
    spec = choice.storage_spec(case.spec, "cuda")
    return dataclasses.replace(case, keys=spec.key_format.name, values=spec.value_format.name)


#: more query rows than decoding has: read by its kernel where Triton cannot launch its own
LONG_CHUNKS = [
    Case(tokens=150, lengths=(300, 5), heads=1, groups=2),
    Case(
        keys="int2-channel",
        values="int2-token",
        head_dim=128,
        page_size=128,
        residual=128,
        sink=32,
        tokens=70,
        lengths=(700, 0),
        groups=4,
        padded=True,
    ),
    Case(
        keys="boosted2-r0.125",
        values="int2-token",
        tokens=100,
        heads=1,
        groups=3,
        softcap=20.0,
        sinks=True,
        dtype=torch.bfloat16,
    ),
    Case(keys="dense", values="dense", tokens=300, heads=2, groups=1, residual=0, sink=0, lengths=(65, 3)),
    Case(tokens=270, heads=1, groups=1, head_dim=256, lengths=(90,)),
]


def check_long_chunk(case: Case, launch, monkeypatch) -> None:
    def refused(*args):
        raise AssertionError("Triton's kernels were called")

    monkeypatch.setattr(launch, "why_triton_cannot_launch", lambda: "no compiler")
    monkeypatch.setattr(prompt, "attend", refused)
    assert case.groups * case.tokens > launch.FUSED_ROWS["cuda"]
    kernels.check_attend(fragment(case))
