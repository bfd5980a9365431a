"""`docs/benchmarks.md`: what is written from the records. That it is current: `test_report`."""

import json

from hf_lowbit_kv.eval.benchmarks import packed_layer
from hf_lowbit_kv.eval.benchmarks.page_tables import benchmarks_page


def test_each_gpu_has_a_table_without_empty_columns_and_the_last_record_counts(tmp_path):
    common = {"dtype": "float16", "head_dim": 128, "byte_limit_ratio": 3.7, "shape": "gqa_b8_32k", "preset": "kivi-4"}
    common["ms"] = 0.0751
    for gpu, ratios in (("NVIDIA H100", [3.31]), ("NVIDIA H200", [2.0, 3.25])):
        lines = [common | {"gpu": gpu, "backend": "cuda", "ratio": ratio, "commit": f"{ratio}"} for ratio in ratios]
        name = gpu.lower().replace(" ", "-")
        (tmp_path / f"decode-{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    others = [common | {"gpu": "NVIDIA H200", "backend": "cuda", "commit": "own"} for _ in range(2)]
    others[0] |= {"preset": "a cache of others", "ratio": 1.75}
    others[1] |= {"per_head": True, "ratio": 2.0}  # not what users get who ask for nothing
    with (tmp_path / "decode-nvidia-h200.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in others)
    with (tmp_path / "decode-nvidia-h100.jsonl").open("a") as file:  # one more shape, and fewer presets
        file.write(
            json.dumps(common | {"gpu": "NVIDIA H100", "backend": "triton", "ratio": 1.5, "commit": "more"}) + "\n"
        )
    text = benchmarks_page(tmp_path)
    first, second = text[text.index("### H200") :].split("### H100")  # the one with more presets first
    assert "| preset | batch 8, 32k tokens |" in first
    assert "| preset | batch 8, 32k tokens |" in second
    assert "| `a cache of others` | 1.75 /" in first
    assert "| `kivi-4` | 3.25 /  (3.7), 75 /  us |" in first
    assert "| `kivi-4` | 3.31 / 1.50 (3.7), 75 / 75 us |" in second
    assert "a cache of others" not in second
    assert "2.00" not in text
    assert "## Memory" not in text


def test_steps_of_all_shapes_have_a_table(tmp_path):
    """Of records that have them; older ones do not."""
    common = {
        "dtype": "float16",
        "head_dim": 256,
        "byte_limit_ratio": 8.0,
        "ratio": 4.0,
        "ms": 0.03,
        "gpu": "NVIDIA H200",
    }
    common |= {"backend": "cuda", "commit": "abc", "preset": "kivi-2"}
    steps = {"shape": "dim256_b4_32k", "step_behind_ratio": 3.217, "step_behind_ms": 0.0437}
    usual = common | {"shape": "gqa_b8_32k", "head_dim": 128}
    path = tmp_path / "decode-nvidia-h200.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (usual, common | steps)))
    text = benchmarks_page(tmp_path).split("### Decode steps")[1]
    assert "#### H200" in text
    assert "| other shapes | `kivi-2` |" in text
    assert "| batch 4, 32k tokens, 2 query heads for each KV head, head_dim 256 | 3.22, 44 us |" in text


def test_shapes_in_words():
    words = {name: shape.words() for name, shape in packed_layer.SHAPES.items()}
    assert len(set(words.values())) == len(words)
    assert words["gqa_b1_128k"] == "batch 1, 128k tokens"
    assert words["ragged_b64_512_8k"] == "batch 64, 512 to 8k tokens"
    assert words["dim96_b8_32k"] == "batch 8, 32k tokens, head_dim 96"


def test_no_column_of_the_page_is_mostly_empty():
    """Of the tables of decode attention, whose columns are shapes: a second GPU has a few records."""
    section = benchmarks_page().split("## Decode attention")[1].split("\n## ")[0]
    tables = [part.splitlines() for part in section.split("\n\n") if part.startswith("| preset")]
    assert len(tables) >= 2
    for table in tables:
        heads, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table)
        assert all(len(row) == len(heads) for row in rows)
        for column in zip(*rows, strict=True):
            assert sum(bool(cell) for cell in column) >= len(rows) / 2


def test_what_runs_in_the_largest_batch_is_named():
    """Throughput of a compiled step is not that of an eager one."""
    section = benchmarks_page().split("## Largest batch")[1].split("\n## ")[0]
    assert "| `DynamicCache` | eager |" in section
    assert "| `kivi-2-sink` | compiled |" in section
