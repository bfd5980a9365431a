"""The README: its code runs, its links lead somewhere, and its figures are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from cases import tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.provenance import RESULTS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tokenizer():
    """Words are numbers."""
    plain = Tokenizer(models.WordLevel({str(i): i for i in range(160)}, unk_token="7"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="0")


def test_the_code_runs(monkeypatch, capsys, tokenizer):
    """As it stands, with a tiny model in place of the one from the hub."""
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)

    def from_pretrained(name, dtype):
        return tiny_models("llama")[1]

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert capsys.readouterr().out.count(" ") > 60  # the text
    output = names["model"].generate(**names["inputs"], max_new_tokens=2, return_dict_in_generate=True)
    summary = str((output.get("cache") or output["past_key_values"]).summary())
    lb.disable(names["model"])
    assert "LowBitCache kivi-4-sink" in summary
    assert "lowbit_kv (reads packed pages)" in summary


def test_links_lead_somewhere():
    links = re.findall(r"\]\(((?!https?://)[^)#]+)\)", TEXT)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_step_of_the_default_stands_beside_dense_in_the_same_loop():
    """And the figures are those of the newest record."""
    records = [r for r in read_records(RESULTS / "generate-nvidia-h200.jsonl") if r["mode"] == "recorded"]
    newest = {(r["cache"], r["batch"], r["tokens"]): r["step_ms"] for r in records}
    text = " ".join(TEXT.split())
    for rows, batch, tokens in (("1 row of 131072", 1, 131072), ("8 rows of 32768", 8, 32768)):
        shown = re.search(rf"\| {rows} tokens \| ([\d.]+) \| ([\d.]+) \|", text)
        assert float(shown[1]) == pytest.approx(newest["kivi-4-sink", batch, tokens], abs=0.051)
        assert float(shown[2]) == pytest.approx(newest["dense", batch, tokens], abs=0.051)


def test_the_first_case_is_what_fits_counts():
    fit = {each.preset: each for each in lb.fits("Qwen/Qwen3-8B", 65536, "24GB", presets=["kivi-4-sink"])}
    full, packed = fit["16-bit"], fit["kivi-4-sink"]
    assert (full.fits, packed.fits) == (False, True)
    for figure in (f"{full.total / 1e9:.0f} GB in 16 bits", f"{full.weights / 1e9:.1f} GB of weights"):
        assert figure in TEXT
    assert f"{full.cache / 1e9:.1f} GB of key-value cache" in TEXT
    assert f"the cache takes {packed.cache / 1e9:.1f} GB," in TEXT
    assert f"everything takes {packed.total / 1e9:.1f} GB" in TEXT


def test_no_row_of_the_table_is_beaten_by_another():
    """Within its group: more memory and a larger KL."""
    rows = re.findall(r"^\| \**`([\w-]+)`\** \| (yes|no) \| ([\d.]+) \| ([\d.]+) \|", TEXT, re.MULTILINE)
    assert len(rows) >= 6
    for name, group, size, loss in rows:
        for other, its_group, its_size, its_loss in rows:
            beaten = float(its_size) < float(size) and float(its_loss) < float(loss)
            assert not (group == its_group and beaten), f"{other} beats {name}"


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120
