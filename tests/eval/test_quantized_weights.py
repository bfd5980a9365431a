"""`hf_lowbit_kv.eval.quantized_weights`, as far as it goes without a GPU and torchao."""

from __future__ import annotations

import pytest
import torch
import typer

from hf_lowbit_kv.eval import quantized_weights as script


class Packed(torch.Tensor):
    """A weight that consists of codes and of a scale that consists of others, as torchao's do."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


def test_bytes_are_those_of_the_parts():
    inner, outer = (torch.zeros(64, 64).as_subclass(Packed) for _ in range(2))
    inner.codes, inner.scale = torch.zeros(4, dtype=torch.float16), torch.zeros(2)
    outer.codes, outer.scale = torch.zeros(64, 32, dtype=torch.uint8), inner
    assert sum(part.nbytes for part in script.plain_tensors(outer)) == 64 * 32 + 4 * 2 + 2 * 4
    assert [part.nbytes for part in script.plain_tensors(torch.zeros(3))] == [12]


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="a GPU is needed"):
        script.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(typer.BadParameter, match="torchao is needed"):
        script.main()


def test_table():
    row = {
        "preset": "kv4",
        "weight_bits": 4,
        "ppl": 25.0,
        "kl": 0.01,
        "weight_bytes": 2e6,
        "kv_bytes": 1e6,
        "step_ms": 3.0,
    }
    cells = [list(column.cells) for column in script.table([row]).columns]
    assert [cell for (cell,) in cells] == ["4 bit", "kv4", "25.00", "0.01000", "2.0", "1.0", "3.00"]
