"""docs/what-fits.md is what `lb.fits` counts."""

from __future__ import annotations

import pytest

from hf_lowbit_kv.eval.benchmarks import memory_table
from hf_lowbit_kv.planning.fits import GB, fits

TEXT = memory_table.PAGE.read_text(encoding="utf-8")


def test_the_page_is_current():
    assert memory_table.filled(TEXT) == TEXT, "run `make results`"


def test_a_page_that_is_not_current_is_noticed():
    stale = TEXT.replace("| all / 4 |", "| all / 5 |", 1)
    assert stale != TEXT
    assert memory_table.filled(stale) == TEXT


@pytest.mark.parametrize(
    ("model", "weights", "preset", "memory"),
    [("Qwen/Qwen3-8B", "bfloat16", "kivi-4-sink", 24), ("meta-llama/Llama-3.1-8B", "int4", "16-bit", 24)],
)
def test_cells_are_those_of_fits(model, weights, preset, memory):
    names = [] if preset == "16-bit" else [preset]
    fit = fits(model, memory_table.ROW, memory * GB, weights=weights, presets=names or ["kv8"])[len(names)]
    longest, rows = memory_table.cell(model, weights, preset, memory * GB).split(" / ")
    assert int(rows) == fit.most_rows
    own = memory_table.known_models()[model]["config"]["max_position_embeddings"]
    assert longest == ("all" if fit.longest_context >= own else f"{fit.longest_context // 1000}k")
