"""The tables in the documentation are those of the committed records; records count only where they are of today's bytes.
`docs/benchmarks.md`: what is written from the records."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import bench_runs
import pytest
import torch

import hf_lowbit_kv as lb
from hf_lowbit_kv import presets
from hf_lowbit_kv.eval import perplexity
from hf_lowbit_kv.eval.benchmarks import measure, tables
from hf_lowbit_kv.eval.benchmarks.page_tables import benchmarks_page
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, read_records
from hf_lowbit_kv.eval.local_models import default_texts, load_model
from hf_lowbit_kv.eval.provenance import RESULTS, append_record


@pytest.fixture
def rows():
    return bench_runs.accuracy_rows()


#: pages that records do not change
WITHOUT_RECORDS = {"docs/what-fits.md"}


def check_pages(rows, names):
    for name in names:
        page = (tables.ROOT / name).read_text(encoding="utf-8")
        assert tables.filled(page, rows) == page, f"{name} is not current: run `make results`"
    page = (tables.ROOT / tables.BENCHMARKS).read_text(encoding="utf-8")
    assert page == tables.benchmarks_page(), f"{tables.BENCHMARKS} is not current: run `make results`"
    for name, digest, _ in tables.pictures(rows):
        assert digest.encode() in (tables.ROOT / name).read_bytes(), f"{name} is not current: run `make results`"


def test_the_pages_are_current(rows):
    check_pages(rows, tables.PAGES)


def test_the_committed_records_are_of_todays_bytes():
    """Otherwise a format has changed, and `make measure` is due."""
    records = current_records(measure.OUT)
    for preset in {record["preset"] for record in records}:
        assert bench_runs.definition(preset) in {
            record["definition"] for record in records if record["preset"] == preset
        }


def test_a_record_speaks_for_its_formats_only(tmp_path):
    """Whatever its preset means today; a preset that is gone has no record."""
    path = tmp_path / "new.jsonl"
    append_record(path, {"preset": "fp8", "ms": 1.0})
    append_record(path, {"cache": "kivi-4-sink", "ms": 2.0})
    append_record(path, {"cache": "DynamicCache", "ms": 3.0})
    assert [(r.get("keys"), r.get("values")) for r in read_records(path)] == [
        ("fp8-centered", "fp8"), ("int4-channel", "int4-token"), (None, None)
    ]  # fmt: skip
    then = [("fp8", "fp8"), ("kv8", "int8-token"), ("kv6", "int6-token")]
    written(tmp_path / "old.jsonl", *({"preset": name, "keys": fmt, "values": fmt} for name, fmt in then))
    assert current_records(path) == read_records(path)
    assert [record["preset"] for record in current_records(tmp_path / "old.jsonl")] == ["kv8"]


def test_a_record_of_formats_that_its_preset_no_longer_has_is_shown_nowhere(rows, monkeypatch, capsys):
    """Behind each record of a preset: a newer one with other formats and other figures. Neither pages and pictures nor the
    notebook of records change, so that notebook's stored text is that of the records too."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    read_text = Path.read_text

    def with_stale_records(path, *args, **options):
        text = read_text(path, *args, **options)
        records = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else []
        stale = [record | {"keys": "static-44422000"} for record in records if "keys" in record]
        return text + "".join(json.dumps({k: _changed(x) for k, x in each.items()}) + "\n" for each in stale)

    monkeypatch.setattr(Path, "read_text", with_stale_records)
    monkeypatch.setattr(measure, "definition", bench_runs.definition)
    assert tables.load() == rows
    check_pages(rows, set(tables.PAGES) - WITHOUT_RECORDS)

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tables.ROOT / "notebooks")
    cells, names = json.loads(read_text(Path("speed_and_memory.ipynb")))["cells"], {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), "speed_and_memory.ipynb", "exec"), names)
        stored = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        assert capsys.readouterr().out == "".join(stored)


def _changed(figure):
    """A figure, doubled; integers that name a measurement (rows, tokens) stay."""
    return 2 * figure if isinstance(figure, float) or (isinstance(figure, int) and figure > 10**6) else figure


def test_committed_records_of_presets_have_formats():
    for path in sorted(RESULTS.glob("*.jsonl")):
        for record in read_records(path):
            name = record.get("preset", record.get("cache"))
            if isinstance(name, str) and presets._derive(name) is not None:
                assert {"keys", "values"} <= set(record), f"{path.name}: {name}"


@pytest.fixture
def record():
    return {
        "preset": "kivi-2", "keys": "int2-channel", "values": "int2-token", "text": "transcript",
        "definition": measure.definition("kivi-2"), "kl": 0.25, "kl_p99": 2.5,
        "top1": 0.75, "ppl": 9.0, "ppl_full": 8.0, "by_position": [{"from": 512, "to": 4096, "kl": 0.25, "top1": 0.75}],
        **measure.setting(),
    }  # fmt: skip


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_what_counts(record, tmp_path):
    """The newest record of today's bytes and setting; the essays, if both have a record."""
    essays = [record | {"text": text, "kl": kl} for text, kl in (("worked.txt", 0.1), ("popular.txt", 0.3))]
    stale = record | {"definition": "other", "kl": 9.0}
    records = [record | {"kl": 8.0}, record, stale, record | {"context": 1024, "kl": 7.0}]
    (row,) = tables.load(written(tmp_path / "one.jsonl", *records, essays[0]))
    assert row.transcript == record
    assert row.essays is None
    assert row.bits == lb.get_preset("kivi-2").spec().bits_per_value(32768, 64)
    (row,) = tables.load(written(tmp_path / "both.jsonl", *records, *essays))
    assert row.essays["kl"] == pytest.approx(0.2)
    page = "a\n<!-- results: presets -->\nold\n<!-- end of results -->\nb\n"
    assert "| `kivi-2` | 2.43 | 0.2000 | 2.50 | 0.750 | 0.2500 | 2.50 | 0.750 |" in tables.filled(page, [row])


def test_only_what_is_missing_is_measured(record):
    definitions = {"kivi-2": record["definition"], "kv8": "of kv8"}
    found = measure.missing([record], definitions, ["transcript", "worked.txt"])
    assert found == [("transcript", "kv8"), ("worked.txt", "kivi-2"), ("worked.txt", "kv8")]
    changed = measure.missing([record], definitions | {"kivi-2": "other bytes"}, ["transcript"])
    assert changed == [("transcript", "kivi-2"), ("transcript", "kv8")]


# ---- bands ----------------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """Allowed range of KL (nats), and the least top-1 agreement, on the essays by the bundled model in float32. The bands come
    from an independent simulation (fake quantization, no cache). If a figure lies outside its band, better or worse, the
    reason must be found before the figure is published."""

    kl_min: float
    kl_max: float
    top1_min: float = 0.0

    def holds(self, row: dict[str, Any]) -> bool:
        return self.kl_min <= row["kl"] <= self.kl_max and row["top1"] >= self.top1_min


BANDS = {
    "int8": Band(0.0, 0.0006),
    "int6": Band(0.0, 0.0006),
    "kivi-4-sink": Band(0.0, 0.0022, top1_min=0.97),
    "kv4-sink": Band(0.0, 0.006),
    "k4v2-sink": Band(0.014 * 0.8, 0.014 * 1.2),
    "kivi-2-sink": Band(0.256 * 0.85, 0.256 * 1.15),
    "k2v4-sink": Band(0.22 * 0.85, 0.22 * 1.15),
    "kitty": Band(0.065 * 0.85, 0.065 * 1.15),
    "kitty-pro": Band(0.035 * 0.85, 0.035 * 1.15),
    # these bands are wider: only one of the two texts was simulated
    "kivi-2-hadamard-sink": Band(0.123 * 0.8, 0.123 * 1.2),
    "kitty-pro-variance": Band(0.027 * 0.8, 0.027 * 1.2),
    "kitty-random": Band(0.19 * 0.8, 0.19 * 1.2),
}


def test_records_are_within_their_bands(rows):
    essays = {row.preset: row.essays for row in rows}
    assert [preset for preset, band in BANDS.items() if not band.holds(essays[preset])] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_presets_are_within_their_bands():
    model, tokenizer = load_model(None, torch.float32, torch.device("cpu"))
    rows = perplexity.run(
        ["kivi-4-sink", "kitty"], default_texts(), model, tokenizer, context=4096, start=512, chunk=128
    )
    assert all(BANDS[row["preset"]].holds(row) for row in rows)
    assert rows[0]["kl"] < 0.0022 < rows[1]["kl"] < 0.08


# ---- docs/benchmarks.md ---------------------------------------------------------------------------------------------


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
