"""Rows of the accuracy table, and what presets store today: computed once per process, because each takes two seconds."""

import functools

import pytest

from hf_lowbit_kv.eval.benchmarks import measure, tables

definition = functools.cache(measure.definition)


@functools.cache
def rows() -> list[tables.PresetRow]:
    """`tables.load()` of the committed records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "definition", definition)
        return tables.load()
