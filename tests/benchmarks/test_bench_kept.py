"""What kept prompts cost, on a tiny model: that the records are there and say what was measured."""

from __future__ import annotations

from bench_runs import records_of

from hf_lowbit_kv.eval.benchmarks import bench_kept


def test_bench_kept(tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--tokens", 600, "--repeats", 1]
    records = records_of(bench_kept.main, tmp_path / "kept.jsonl", *arguments)
    assert [record["kind"] for record in records] == ["fork", "fork", "save", "restore", *["first_token"] * 3]
    cached = {record["source"]: record["cached_tokens"] for record in records if record["kind"] == "first_token"}
    assert cached == {"gpu": 600, "folder": 600, "none": 0}
    restore = records[3]
    assert restore["share"] == restore["raw_seconds"] / restore["seconds"]
    assert restore["in_use"] <= restore["nbytes"] <= 1.1 * restore["in_use"]
