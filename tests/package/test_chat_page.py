"""The examples of docs/chat-and-kept-prompts.md run, one after the other, on the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_lowbit_kv as lb

PAGE = Path(__file__).parents[2] / "docs" / "chat-and-kept-prompts.md"


@pytest.mark.slow  # a model of 135M on a CPU
def test_examples(tmp_path, monkeypatch, capsys):
    from hf_lowbit_kv.eval.local_models import MissingPackageError, load_model

    try:
        model, tokenizer = load_model(None, device="cpu")
    except MissingPackageError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    names = {"lb": lb, "torch": torch, "model": model, "tokenizer": tokenizer}
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    for example in examples:
        exec(example, names)
    printed = capsys.readouterr().out
    assert "hits=1, misses=1" in printed
    assert "bytes are shared" in printed
    assert len(names["chat"].messages) == 5
    assert names["tokens"].shape[1] == names["text"].shape[1] + 8
