"""Latents (MLA) on backend `triton`: attention over decoded stretches (`triton_kernels/prompt.py`), storing and reading.

Without a GPU the small cases run in Triton's interpreter, in processes of their own (`test_interpreted`).
"""

import kernel_checks as kernels
import pytest
import torch
from latent_cases import Filled, LatentCase, check_append, check_attend, check_steps, exact

from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.triton_kernels import common, entry_points, prompt

SEED = 0


CASES = [
    LatentCase(tokens=20, heads=3, layout="triton"),
    LatentCase(lengths=(0, 65), heads=2, tokens=5, dtype=torch.float16),
    LatentCase(lengths=(100, 30), heads=2, tokens=20, padded=True, rank=192, rope=64, dtype=torch.float16),
    LatentCase(lengths=(90,), heads=4, content="dense", layout="triton"),
    LatentCase(lengths=(90,), heads=4, content="dense", tokens=9, dtype=torch.float16),
    LatentCase(lengths=(70,), heads=4, content="fp8-static", tokens=9, layout="triton"),
    LatentCase(lengths=(140,), heads=2, tokens=17, spread=1000.0, jump=1e4, layout="triton"),
]


@kernels.needs_interpreter
@pytest.mark.parametrize("stretch", [None, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(case, stretch, monkeypatch):
    if stretch is not None:
        size = (case.rank + case.rope) * case.dtype.itemsize
        monkeypatch.setattr(prompt, "BUFFER_BYTES", stretch * size)
        monkeypatch.setattr(prompt, "CARRY_BYTES", 7 * case.heads * (case.rank + 1) * 4)
    before = common.launches.get("prompt_kernel", 0)
    check_attend(prompt, case, kernels.DEVICE, SEED)
    assert common.launches["prompt_kernel"] > before


@kernels.needs_interpreter
def test_small_float32():
    filled = Filled(
        LatentCase(lengths=(100, 3), heads=3, tokens=9, dtype=torch.float32, layout="triton"), kernels.DEVICE, SEED
    )
    truth = exact(filled)
    assert (entry_points.OPERATIONS.attend(filled.step, filled.store) - truth).norm() < 1e-5 * truth.norm()


@kernels.needs_interpreter
@pytest.mark.parametrize("content", ["fp8", "dense"])
def test_small_steps(content):
    check_steps(
        entry_points, LatentCase(lengths=(62, 0), heads=2, content=content, layout="triton"), 3, kernels.DEVICE, SEED
    )


@kernels.needs_interpreter
@pytest.mark.parametrize("content", ["fp8", "dense"])
def test_small_append(content):
    padded = LatentCase(lengths=(30, 3), padded=True, dtype=torch.float16, rank=192, content=content, layout="triton")
    check_append(entry_points, padded, [20, 70], kernels.DEVICE, SEED)


@kernels.needs_interpreter
@pytest.mark.parametrize("layout", ["triton", "cuda"])
def test_small_read(layout):
    filled = Filled(LatentCase(lengths=(70, 3), layout=layout, dtype=torch.float16), kernels.DEVICE, SEED)
    state, spec = filled.store.state, filled.case.spec
    for found, expected in zip(
        entry_points.OPERATIONS.read(PagedStore.over(state, spec), 80),
        reference.OPERATIONS.read(PagedStore.over(state, spec), 80),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not kernels.GPU, reason="needs a GPU")
@pytest.mark.parametrize("content", ["fp8", "dense"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_at_deepseek_sizes(tokens, content):
    sizes = {"heads": 16, "rank": 512, "rope": 64, "page_size": 128}
    case = LatentCase(lengths=(1000, 65, 1), tokens=tokens, content=content, layout="triton", **sizes)
    check_attend(entry_points, case, kernels.DEVICE, SEED)
