"""`docs/benchmarks.md` is what its command writes from the records."""

from __future__ import annotations

import json

import pytest
import typer

from hf_lowbit_kv.eval import render_benchmarks


def test_the_page_is_current():
    render_benchmarks.main(check=True)


def test_two_gpus_stand_side_by_side_and_the_last_record_counts(tmp_path):
    common = {"dtype": "float16", "head_dim": 128, "byte_limit_ratio": 3.7, "shape": "gqa_b8_32k", "preset": "kivi-4"}
    for gpu, ratios in (("NVIDIA H100", [3.31]), ("NVIDIA H200", [2.0, 3.25])):
        lines = [common | {"gpu": gpu, "backend": "cuda", "ratio": ratio, "commit": f"{ratio}"} for ratio in ratios]
        name = gpu.lower().replace(" ", "-")
        (tmp_path / f"decode-{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    others = [common | {"gpu": "NVIDIA H200", "backend": "cuda", "commit": "own"} for _ in range(2)]
    others[0] |= {"preset": "a cache of others", "ratio": 1.75}
    others[1] |= {"per_head": True, "ratio": 2.0}  # not what users get who ask for nothing
    with (tmp_path / "decode-nvidia-h200.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in others)
    text = render_benchmarks.render(tmp_path)
    assert "| `a cache of others` |  | 1.75" in text
    assert "| preset | batch 8, 32k tokens, H100 | batch 8, 32k tokens, H200 |" in text
    assert "| `kivi-4` | 3.31 /  (3.7) | 3.25 /  (3.7) |" in text
    assert "2.00" not in text
    assert "## Memory" not in text


def test_a_page_that_is_not_current_is_noticed(tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    monkeypatch.setattr(render_benchmarks, "PAGE", page)
    render_benchmarks.main(check=False)
    render_benchmarks.main(check=True)
    page.write_text(page.read_text() + "3.3 times faster\n")
    with pytest.raises(typer.Exit):
        render_benchmarks.main(check=True)
