"""Two presets of the bundled model and texts against the bands of an independent simulation (`eval/accuracy.py`)."""

from __future__ import annotations

import json

import pytest

from hf_lowbit_kv.eval import accuracy


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_presets_are_within_their_bands(tmp_path):
    out = tmp_path / "rows.jsonl"
    accuracy.main(
        preset=["kivi-4-sink", "kitty"],
        context=4096,
        start=512,
        chunk=128,
        device="cpu",
        dtype="float32",
        backend=None,
        commit="none",
        out=out,
    )  # exits, which raises here, where a row is outside its band
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["preset"] for row in rows] == ["kivi-4-sink", "kitty"]
    assert rows[0]["kl"] < 0.0022 < rows[1]["kl"] < 0.08
