"""The README: its code runs, its links lead somewhere, and its figures are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from cases import tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import tables
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

    def from_pretrained(name, dtype, attn_implementation):
        model, _ = tiny_models("llama")
        model.set_attn_implementation(attn_implementation)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "LowBitCache kivi-4-sink" in out
    assert "lowbit_kv (reads packed pages)" in out


@pytest.mark.parametrize("name", ["dev/recording.md", "per-layer.md", "choose.md"])
def test_the_code_of_a_page_runs(name, tokenizer):
    """All of a page's blocks in their order, with what its text says is there; on the CPU, with fewer tokens."""
    model, _ = tiny_models("llama")
    model.set_attn_implementation("lowbit_kv")
    config = model.config
    known = {
        "model": model,
        "tokenizer": tokenizer,
        "text": "5 6 7 8",
        "layers": config.num_hidden_layers,
        "factors": torch.rand(config.num_hidden_layers, config.num_key_value_heads, config.head_dim) + 0.5,
    }
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        code = block.replace('to("cuda")', 'to("cpu")').replace("max_new_tokens=256", "max_new_tokens=8")
        exec(compile(code, name, "exec"), known)
    stored = known.get("cache")
    assert (stored is None) == (name == "dev/recording.md")
    if stored is not None:
        output = model.generate(torch.arange(3, 43)[None], past_key_values=stored, max_new_tokens=3)
        assert output.shape == (1, 43)
    else:
        assert known["tokens"].shape == (1, 12)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(((?!https?://)[^)#]+)\)", TEXT)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("preset", ["eigen-2", "eigen-3"])
def test_the_figures_of_calibrated_presets_are_those_of_the_records(preset):
    ((bits, top1),) = re.findall(rf"`{preset}` \(([\d.]+) bits\) in ([\d.]+) %", " ".join(TEXT.split()))
    assert bits == f"{lb.get_preset(preset).spec().bits_per_value(32768, 128):.2f}"
    records = read_records(RESULTS / "accuracy-smollm2.jsonl")
    newest = {record["text"]: record["top1"] for record in records if record["preset"] == preset}
    assert float(top1) == pytest.approx(50 * (newest["worked.txt"] + newest["popular.txt"]), abs=0.06)


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def _rows() -> dict[str, list[str]]:
    found = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|$", TEXT, re.MULTILINE)
    return {preset: figures for preset, *figures in found}


@pytest.mark.parametrize("preset", ["kv8", "kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink"])
def test_the_figures_are_those_of_the_records(preset):
    bits, ratio, top1 = _rows()[preset]
    assert bits == f"{lb.get_preset(preset).spec().bits_per_value(32768, 128):.2f}"
    timed = preset.removesuffix("-sink")
    setting = {"shape": "gqa_b8_32k", "preset": timed, "backend": "cuda", "dtype": "float16", "head_dim": 128}
    setting |= {"query_length": 1, "gpu": "NVIDIA H200"}
    ratios = [
        record["ratio"]
        for record in read_records(RESULTS / "decode-nvidia-h200.jsonl")
        if setting.items() <= record.items()
    ]
    assert float(ratio) == pytest.approx(ratios[-1], abs=0.05, rel=0.03)  # rounded, and two runs differ
    (essays,) = (row.essays for row in tables.load() if row.preset == preset)
    assert float(top1) == pytest.approx(100 * essays["top1"], abs=0.06)
