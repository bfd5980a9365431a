"""Sums in a fixed order: the settings that request it, and that PyTorch's mode is restored."""

from __future__ import annotations

import pytest
import torch

from hf_lowbit_kv.calibration import kmeans
from hf_lowbit_kv.eval.benchmarks import packed_layer
from hf_lowbit_kv.triton_kernels import determinism


@pytest.fixture
def mode():
    """Sets PyTorch's mode for a test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield lambda on, warn_only: torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def current() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("variable", "on", "fixed"),
    [(None, False, False), (None, True, True), ("", True, True), ("0", True, False), ("1", False, True)],
)
def test_who_asks_for_a_fixed_order(variable, on, fixed, mode, monkeypatch):
    monkeypatch.delenv(determinism.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(determinism.VARIABLE, variable)
    mode(on, False)
    assert determinism.fixed_order() is fixed


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(determinism.VARIABLE, "yes")
    with pytest.raises(ValueError, match="HF_LOWBIT_KV_DETERMINISTIC='yes' is not allowed; it must be '0' or '1'"):
        determinism.fixed_order()


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_mode_is_what_it_was(before, mode, monkeypatch):
    """Also after an error, and `warn_only` too: otherwise a program that set `warn_only` would get errors later."""
    mode(*before)
    with pytest.raises(ZeroDivisionError), determinism.deterministic():
        1 / (current() != (True, False))
    assert current() == before
    assert packed_layer._poisoned(lambda: bool(torch.empty(9).isnan().all()))
    assert current() == before
    seen = []
    monkeypatch.setattr(kmeans, "_lloyd", lambda *args: seen.append(current()))
    kmeans.kmeans(Elsewhere(torch.zeros(4, 2)), 2, seed=0)
    assert seen == [(True, False)]
    assert current() == before


class Elsewhere:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def isfinite(self) -> torch.Tensor:
        return self.tensor.isfinite()

    def float(self) -> Elsewhere:
        return self
