"""The README: its code runs, and its figures are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_hub import TinyHub

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import model_tables
from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.local_models import MissingPackageError
from hf_lowbit_kv.eval.provenance import RESULTS, append_record

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs_and_prints_the_table_of_the_page(tmp_path, monkeypatch, capsys):
    """Unchanged, with a tiny model under the name of the real one."""
    monkeypatch.chdir(tmp_path)
    try:
        TinyHub(tmp_path / "hub").link(TEXT, tmp_path)
    except MissingPackageError as error:
        pytest.skip(str(error))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (table,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Put a long text here." in printed
    assert [line.rstrip() for line in printed.splitlines() if line.startswith(("preset", "16-bit", "kivi"))] == (
        table.splitlines()
    )
    llama = names["llama"]
    inputs = llama.tokenizer("a b c", return_tensors="pt").to(llama.device)
    output = llama.model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
    summary = str((output.get("cache") or output["past_key_values"]).summary())
    lb.disable(llama.model)
    assert "LowBitCache kivi-4-sink" in summary
    assert "lowbit_kv (reads packed pages)" in summary


def test_the_decode_step_is_that_of_the_newest_records():
    """Compressed and not compressed in the same loop, and eager transformers."""
    newest = {
        (r["cache"], r["mode"]): r["step_ms"]
        for r in read_records(RESULTS / "generate-nvidia-h200.jsonl")
        if (r["batch"], r["tokens"]) == (8, 32768)
    }
    sentence = r"takes ([\d.]+) ms with `kivi-4-sink`, ([\d.]+) ms without compression, and ([\d.]+) ms in eager"
    shown = re.search(sentence, " ".join(TEXT.split()))
    for figure, key in zip(
        shown.groups(), [("kivi-4-sink", "recorded"), ("dense", "recorded"), ("DynamicCache", "eager")], strict=True
    ):
        assert float(figure) == pytest.approx(newest[key], abs=0.051)


def test_the_first_case_is_what_fits_counts():
    full, packed = lb.fits("meta-llama/Llama-3.1-8B", 131072, "24GB", presets=["kivi-4-sink"])
    assert (full.fits, packed.fits) == (False, True)
    assert f"{full.longest_context:,} tokens fit with a 16-bit cache" in TEXT
    assert f"whole context of 131,072 tokens fits, in {packed.total / 1e9:.1f} GB" in TEXT


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 90


def test_humaneval_has_a_column_if_the_default_has_a_record(tmp_path):
    """Only records of the measured model and of all items count."""
    records = tmp_path / "tasks.jsonl"
    base = {"task": "humaneval", "model": model_tables.MEASURED, "items": 164}
    for other in ({"items": 10}, {"task": "gsm8k"}, {"model": "another"}):
        append_record(records, base | {"preset": "int8", "score": 0.5} | other)
    assert model_tables.front_table(records) == model_tables.front_table(tmp_path / "none.jsonl")
    for preset, solved in (("dense", 91), ("int8", 80), ("int8", 90), ("kivi-4-sink", 89)):
        assert "HumanEval" not in model_tables.front_table(records)
        append_record(records, base | {"preset": preset, "score": solved / 164})
    table = model_tables.front_table(records)
    assert "| HumanEval, of 164 |" in table
    assert re.search(r"^\| 16 bits \|.* \| 91 \| 1.0 \|$", table, re.MULTILINE)
    assert re.search(r"^\| `int8` \|.* \| 90 \| [\d.]+ \|$", table, re.MULTILINE)
    assert re.search(r"^\| `int6` \|.* \|  \| [\d.]+ \|$", table, re.MULTILINE)
