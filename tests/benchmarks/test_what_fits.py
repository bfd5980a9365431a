"""docs/what-fits.md is what `lb.fits` counts. That the page is current: `test_report`."""

from __future__ import annotations

import pytest

from hf_lowbit_kv.eval.benchmarks import page_tables
from hf_lowbit_kv.planning.fits import GB, fits


@pytest.mark.parametrize(
    ("model", "weights", "preset", "memory"),
    [("Qwen/Qwen3-8B", "bfloat16", "kivi-4-sink", 24), ("meta-llama/Llama-3.1-8B", "int4", "16-bit", 24)],
)
def test_cells_are_those_of_fits(model, weights, preset, memory):
    names = [] if preset == "16-bit" else [preset]
    fit = fits(model, page_tables.ROW, memory * GB, weights=weights, presets=names or ["kv8"])[len(names)]
    longest, rows = page_tables.cell(model, weights, preset, memory * GB).split(" / ")
    assert int(rows) == fit.most_rows
    own = page_tables.known_models()[model]["config"]["max_position_embeddings"]
    assert longest == ("all" if fit.longest_context >= own else f"{fit.longest_context // 1000}k")
