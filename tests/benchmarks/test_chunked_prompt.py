"""What a prompt that is read in chunks costs: the measurement, and what the documentation says of its records."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from bench_runs import records_of
from cases import tiny_models
from tiny_tokenizers import characters

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import bench_prompt
from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.perplexity import chunk_bounds
from hf_lowbit_kv.eval.provenance import RESULTS

ROOT = Path(__file__).resolve().parents[2]
PROMPT, AFTER = 700, 300


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama", max_position_embeddings=2048)[0]


def texts():
    """Two of random letters."""
    letters = torch.randint(32, 127, (2, PROMPT + AFTER)).tolist()
    return [bench_prompt.Text(str(number), "".join(map(chr, row))) for number, row in enumerate(letters)]


def measured(model, *presets, chunks=(128, 512, 0)):
    records = bench_prompt.measure_kl(model, characters, presets, texts(), PROMPT, AFTER, chunks)
    return {(record["preset"], record["chunk"]): record for record in records}


@pytest.mark.usefixtures("one_thread")
def test_only_packed_history_makes_a_difference(model):
    """Pages in the model's dtype are exact. With two bits, chunks differ from the whole prompt, smaller ones more."""
    found = measured(model, "dense", "kivi-2-sink")
    for chunk in (128, 512, 0):
        assert found["dense", chunk]["kl"] == pytest.approx(0, abs=1e-6)
        assert found["dense", chunk]["kl_whole"] == pytest.approx(0, abs=1e-6)
    rows = {chunk: found["kivi-2-sink", chunk] for chunk in (128, 512, 0)}
    assert rows[0]["kl_whole"] == 0
    assert rows[0]["kl"] > 1e-4
    assert rows[128]["kl_whole"] > 1e-4
    assert rows[512]["kl_whole"] > 1e-4
    assert rows[0]["ppl_full"] == rows[128]["ppl_full"] == found["dense", 0]["ppl_full"]


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.slow), 256])
def test_tokens_after_the_prompt_are_decoded(model, chunk):
    """Their logits are those of one token at a time, after `lb.generate`'s own way of reading a prompt."""
    ids = torch.randint(3, 160, (1, 700))
    packs = chunk_bounds(lb.get_preset("kivi-2-sink").spec(), 700, 128)
    got = bench_prompt.logits_after(model, lb.from_preset("kivi-2-sink", model), ids, 400, chunk, packs)
    out = lb.generate(
        *(model, ids[:, :400], "kivi-2-sink", 1),
        max_cache_len=700,
        prefill_chunk_size=chunk,
        **{"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "pad_token_id": 0},
    )
    want = [out.logits[0]]
    for at in range(400, 699):
        want.append(model(ids[:, at : at + 1], past_key_values=out.past_key_values).logits[:, -1])
    assert got.shape == (300, 160)
    assert (got - torch.cat(want)).abs().max() < 1e-3 * got.std()


@pytest.mark.parametrize(
    ("prompt", "length", "chunk", "packs", "want"),
    [
        (700, 1000, 0, (0, 32, 160, 672, 800, 928, 1000), [0, 700, 800, 928, 1000]),
        (700, 1000, 256, (800,), [0, 256, 512, 700, 800, 1000]),
        (512, 600, 256, (), [0, 256, 512, 600]),
        (512, 600, 1000, (512, 600), [0, 512, 600]),
    ],
)
def test_pieces(prompt, length, chunk, packs, want):
    assert [*bench_prompt.pieces(prompt, length, chunk, packs)] == [*itertools.pairwise(want)]


def test_memory_in_a_dry_run(tmp_path):
    arguments = ["--memory", "--tiny", "--device", "cpu", "--tokens", 300, "--chunk", 128, "--chunk", 0]
    records = records_of(bench_prompt.compare_chunks, tmp_path / "chunked.jsonl", *arguments)
    assert [record["chunk"] for record in records] == [128, 0]
    assert {record["nbytes"] for record in records} == {records[0]["nbytes"]}
    assert all(record["seconds"] > 0 and record["peak"] is None for record in records)  # a CPU has no allocator to ask


# ---- the documentation --------------------------------------------------------------------------------------------------


def section() -> str:
    return (ROOT / "docs/dev/prefill.md").read_text(encoding="utf-8")


def newest(kind):
    """By preset and chunk, the newest record."""
    records = read_records(RESULTS / "chunked-prompt.jsonl")
    return {(x["preset"], x["chunk"]): x for x in records if x["kind"] == kind}


def size(shown: str) -> int:
    return 0 if shown == "whole" else int(shown)


def test_the_documentation_gives_the_measured_kl():
    records = newest("kl")
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", section(), re.MULTILINE)
    assert {(preset, size(chunk)) for preset, chunk, *_ in rows} == set(records)
    assert {preset for preset, _ in records} >= {"kivi-2-sink", "kivi-4-sink", "eigen-2"}
    for preset, chunk, exact, from_whole in rows:
        record = records[preset, size(chunk)]
        assert (exact, from_whole) == (f"{record['kl']:.4f}", f"{record['kl_whole']:.4f}")
        assert f"prefills {record['prompt']:,} tokens" in section()
        assert f"the next {record['behind']} tokens" in " ".join(section().split())


def test_the_documentation_gives_the_measured_memory():
    records = newest("memory")
    rows = re.findall(r"^\| (\d+|whole) \| ([\d.]+) \| ([\d.]+) \|$", section(), re.MULTILINE)
    assert [size(chunk) for chunk, *_ in rows] == [512, 2048, 8192, 0]
    for chunk, peak, seconds in rows:
        record = records["kivi-4-sink", size(chunk)]
        assert (peak, seconds) == (f"{record['peak'] / 1e9:.2f}", f"{record['seconds']:.2f}")
        assert f"{record['nbytes'] / 1e9:.2f} GB" in section()
        assert (record["layers"], record["tokens"]) == (32, 32768)
