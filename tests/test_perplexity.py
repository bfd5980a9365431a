"""`hf_lowbit_kv.eval.perplexity` on a tiny random model: what it must say of caches whose error is known."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.accuracy import BANDS, table
from hf_lowbit_kv.eval.perplexity import Totals, chunk_bounds, run

CONTEXT, START = 400, 200
VOCABULARY = 64


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **kwargs):
        self.input_ids = torch.tensor([[ord(letter) % VOCABULARY for letter in text]])
        return self


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.3,  # attention must matter for its errors to show
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="lowbit_kv").eval()


@pytest.fixture
def texts(tmp_path):
    letters = torch.randint(0, VOCABULARY, (2, CONTEXT + 50), generator=torch.Generator().manual_seed(1)) + 64
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for path, row in zip(paths, letters.tolist(), strict=True):
        path.write_text("".join(map(chr, row)), encoding="utf-8")
    return paths


def score(presets, texts, model, **options):
    rows = run(presets, texts, model, Letters(), **{"context": CONTEXT, "start": START, "progress": False} | options)
    assert [row["preset"] for row in rows] == list(presets)
    return rows


@pytest.mark.parametrize("chunk", [1, 100, 128, 1000])
def test_dense_equals_full_precision(model, texts, chunk):
    (row,) = score(["dense"], texts, model, chunk=chunk)
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["top1"] == 1
    assert row["ppl"] == pytest.approx(row["ppl_full"], rel=1e-4)
    assert row["bits_per_value"] == 32


def test_fewer_bits_cost_more(model, texts):
    kv8, kv4, kv2 = score(["kv8", "kivi-4", "kivi-2-sink"], texts, model)
    assert 0 < kv8["kl"] < kv4["kl"] < kv2["kl"]
    assert kv8["top1"] >= kv4["top1"] > kv2["top1"]
    assert kv8["bits_per_value"] > kv4["bits_per_value"]
    # the full-precision pass differs by its chunks alone
    assert kv8["ppl_full"] == pytest.approx(kv2["ppl_full"], rel=1e-4)


@pytest.mark.parametrize("preset", ["kivi-2", "kivi-2-sink"])
def test_default_chunk_is_decoding_token_by_token(model, texts, preset):
    chunked, decoded, coarse = (score([preset], texts[:1], model, chunk=chunk)[0] for chunk in (128, 1, 300))
    assert chunked["kl"] == pytest.approx(decoded["kl"], rel=1e-3)
    assert coarse["kl"] < 0.95 * decoded["kl"]


def test_overrides_reach_the_cache(model, texts):
    plain, wide = (score(["kivi-2"], texts[:1], model, overrides=o)[0] for o in (None, {"residual": 256}))
    assert wide["bits_per_value"] > plain["bits_per_value"]
    assert wide["kl"] < plain["kl"]


@pytest.mark.parametrize(
    ("preset", "chunk", "expected"),
    [
        ("kivi-2", 128, (0, 128, 256, 384, 400)),
        ("kivi-2-sink", 128, (0, 32, 160, 288, 400)),
        ("kivi-2-sink", 512, (0, 160, 400)),
        ("kivi-2", 200, (0, 128, 328, 400)),
    ],
)
def test_chunks_end_where_pages_are_packed(preset, chunk, expected):
    assert chunk_bounds(lb.get_preset(preset).spec(), 400, chunk) == expected


def test_totals_of_known_distributions():
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    totals = Totals()
    totals.add(other, full, torch.tensor([0, 0]))
    means = totals.means()
    assert means["kl"] == pytest.approx((0.5 * torch.tensor(4 / 3).log().item()) / 2, rel=1e-5)
    assert means["ppl"] == pytest.approx((1 / (0.25 * 0.9)) ** 0.5, rel=1e-5)
    assert means["ppl_full"] == pytest.approx((1 / (0.5 * 0.9)) ** 0.5, rel=1e-5)
    assert means["top1"] in (0.5, 1)  # the first row is a tie


def test_bad_input(model, texts):
    with pytest.raises(ValueError, match=r"one\.txt' has 450 tokens, and context=500"):
        score(["kivi-2"], texts, model, context=500)
    with pytest.raises(ValueError, match="start=400 is not allowed with context=400"):
        score(["kivi-2"], texts, model, start=CONTEXT)
    with pytest.raises(ValueError, match=r"preset='kivi-3' is not known; did you mean .*'kivi-2'"):
        score(["kivi-3"], texts, model)
    with pytest.raises(ValueError, match="chunk=0 is not allowed"):
        score(["kivi-2"], texts, model, chunk=0)
    with pytest.raises(ValueError, match=r"texts=\[\]"):
        score(["kivi-2"], [], model)
    latin = texts[0].parent / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt' is not UTF-8"):
        score(["kivi-2"], [latin], model)
    with pytest.raises(FileNotFoundError):
        score(["kivi-2"], [texts[0].with_name("none.txt")], model)


def test_band_table():
    inside = {"preset": "kv8", "bits_per_value": 8.5, "ppl": 22.0, "ppl_full": 22.0, "kl": 0.0003, "top1": 0.99}
    rows = [inside, inside | {"kl": 0.01}, inside | {"preset": "dense"}]
    assert [list(column.cells) for column in table(rows).columns][-1] == ["within", "OUTSIDE", ""]
    assert not BANDS["kivi-4-sink"].holds({"kl": 0.001, "top1": 0.9})
