"""While a first prompt is read, the kernels of the next steps are compiled. They must be the kernels that these steps take."""

from __future__ import annotations

import functools

import pytest
import torch
from emulated import emulated
from kernel_cases import records_for

from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import Chunk
from hf_lowbit_kv.triton_kernels.cuda import modules


class Loaded:
    """In the place of a loaded file: notes its name and macros, and launches nothing."""

    def __init__(self, loaded: set, name: str, macros: tuple):
        loaded.add((name, macros))
        self.macros = dict(macros)

    def integer(self, name: str) -> int:
        return int(self.macros[name.upper()])

    def launch(self, *arguments, **options) -> None:
        pass


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("preset", ["kivi-4-sink", "kivi-2-hadamard", "fp8", "eigen-2"])
def test_a_prompt_and_its_steps_take_the_kernels_that_were_expected(preset, masked, monkeypatch):
    expected, loaded, spec = set(), set(), choice.storage_spec(get_preset(preset).spec(), "cuda")
    monkeypatch.setattr(modules, "compile_ahead", lambda name, macros, device: expected.add((name, macros)))
    store = PagedStore(spec, 2, 2, 128, 128, torch.bfloat16, "cpu", 900, parameters=records_for(spec, (128, 128), 2))

    def chunk(tokens: int, mask: torch.Tensor | None) -> Chunk:
        q, k = (torch.zeros(2, heads, tokens, 128, dtype=torch.bfloat16) for heads in (8, 2))
        return Chunk(q, k, k, mask, scaling=1.0)

    with emulated(monkeypatch, processors=132, module=functools.partial(Loaded, loaded)) as cuda:
        cuda.OPERATIONS.expect_steps(chunk(300, None), store, masked)
        cuda.OPERATIONS.append(chunk(300, None)._replace(q=None), store)
        cuda.OPERATIONS.step(chunk(1, torch.ones(2, 1, dtype=torch.bool) if masked else None), store)
    assert expected == {each for each in loaded if each[0] in ("append.cu", "attend.cu")}
