"""The benchmark of tensor parallelism: what it compares, and a run of two processes on a CPU."""

import json

import pytest
import torch
import typer
from ranks import run_ranks

from hf_lowbit_kv.eval.benchmarks import parallel
from hf_lowbit_kv.eval.benchmarks.parallel import BatchSize, TextsDifferError, compared, fitting_layers, main


def test_cases():
    assert BatchSize.parse("8x32768") == (8, 32768)
    for text in ("8", "x5", "8x1", "0x100", "8x1k"):
        with pytest.raises(typer.BadParameter, match="ROWSxTOKENS"):
            BatchSize.parse(text)


def test_layers_that_fit():
    assert fitting_layers("llama-8b") == 32  # 16 GB
    layers = fitting_layers("llama-70b")
    # a layer has 0.86e9 weights and the two embeddings 2.1e9, of 2 bytes
    assert layers == int((parallel.WEIGHTS_LIMIT / 2 - 2.1e9) / 0.8556e9)


def test_near_ties_are_counted_and_other_texts_refused():
    logits = torch.zeros(2, 3, 8)
    logits[:, :, 2] = 1.0
    logits[1, 1, 5] = 0.99  # a near-tie of row 1 at its second token
    reference = {"tokens": logits.argmax(-1), "logits": logits}
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)) * 0.01
    found = {"tokens": reference["tokens"].clone(), "logits": logits + noise}
    assert compared(found, reference) == {"rows_equal": 2, "rows_near_tie": 0}
    found["tokens"][1, 1:] = 5
    assert compared(found, reference) == {"rows_equal": 1, "rows_near_tie": 1}
    found["tokens"][0, 2] = 7
    with pytest.raises(TextsDifferError, match="token 2 of row 0 is 7; on one GPU it is 2"):
        compared(found, reference)


def _rank(rank: int, folder: str) -> None:
    main(
        shape=["tiny"],
        layers=2,
        preset=["dense", "kivi-4-sink", "eigen-2"],
        mode=["eager"],
        case=["1x600", "3x300"],
        reference=parallel.Path(folder),
        steps=3,
        rounds=1,
        commit="test",
        out=parallel.Path(folder) / "records.jsonl",
    )


@pytest.mark.slow
def test_two_processes_write_one_record_a_case(tmp_path):
    for count in (1, 2):
        assert run_ranks(_rank, count, str(tmp_path), patience=180) == [0] * count
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    single, split = records[:6], records[6:]
    assert len(split) == 6  # one rank writes
    for one, two in zip(single, split, strict=True):
        assert (one["ranks"], two["ranks"]) == (1, 2)
        assert two["rows_equal"] + two["rows_near_tie"] == parallel.TEXT[0]
        assert len(two["nbytes"]) == 2
        assert max(two["nbytes"]) < 0.6 * one["nbytes"][0]
        assert sum(two["weight_bytes"]) >= one["weight_bytes"][0]
        assert two["step_ms"] > 0
