"""Scripts that calibrate and measure rows: their command, and what becomes of their records."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from hf_lowbit_kv.eval import calibrated_rows, calibrated_tables, eigen, vecinfer
from hf_lowbit_kv.eval.results import read_records


class Row(NamedTuple):
    group: str
    keys: str = "some"


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Run a command on three rows; returns what it printed, what `measure` got, and the records."""
    monkeypatch.setattr(calibrated_rows, "load_model", lambda name, dtype, device: ("model", str(device)))
    out, asked = tmp_path / "records.jsonl", []

    def measure(rows, model, tokenizer, backend, context):
        asked.append((rows, model, tokenizer, backend, context))
        yield from (row._asdict() | {"kl": 0.25} for row in rows)

    rows = Row("a"), Row("b", "other"), Row("a", "more")
    columns = {"keys": lambda record: record["keys"], "KL": lambda record: f"{record['kl']:.3f}"}
    app = typer.Typer()
    app.command()(calibrated_rows.command(rows, measure, columns, out))

    def run(*arguments: str) -> tuple[Any, list, list[dict[str, Any]]]:
        return CliRunner().invoke(app, list(arguments)), asked, read_records(out)

    return run


def test_each_row_is_recorded_with_where_it_was_measured(invoke):
    result, asked, records = invoke("--device", "cpu", "--backend", "torch", "--context", "1024", "--commit", "abc")
    assert result.exit_code == 0, result.output
    assert [record["keys"] for record in records] == ["some", "other", "more"]
    assert asked == [([Row("a"), Row("b", "other"), Row("a", "more")], "model", "cpu", "torch", 1024)]
    expected = {"kl": 0.25, "context": 1024, "device": "cpu", "backend": "torch", "dtype": "float32", "commit": "abc"}
    for record in records:
        assert record.items() >= expected.items()
    assert "other" in result.output
    assert "0.250" in result.output


def test_a_group_is_measured_alone_and_one_that_is_unknown_is_refused(invoke):
    result, asked, records = invoke("--group", "a", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert [record["keys"] for record in records] == ["some", "more"]
    assert records[0]["backend"] == "the default"
    assert len(asked) == 1
    result, asked, records = invoke("--group", "a", "--group", "c")
    assert result.exit_code == 2
    assert "--group 'c' is not known; allowed: 'a', 'b'" in " ".join(result.output.replace("│", " ").split())
    assert len(asked) == 1
    assert len(records) == 2


@pytest.mark.parametrize("script", [eigen, vecinfer])
def test_rows_differ_and_have_a_spec(script):
    assert len(set(script.ROWS)) == len(script.ROWS)
    assert all(row.spec.bits_per_value(1 << 20, 64) < 16 for row in script.ROWS)


@pytest.mark.parametrize("script", [eigen, vecinfer])
def test_records_are_of_rows_that_can_be_measured_again(script):
    rows = [row._asdict() for row in script.ROWS]
    for record in read_records(script.OUT):
        assert {name: record[name] for name in rows[0]} in rows
        assert all(isinstance(cell(record), str) for cell in script.COLUMNS.values())


def _record(row, kl, device, date, **changes):
    means = {"bits": 2.0, "kl": kl, "top1": 0.5, "ppl": 20.0, "kl_by_text": {"worked": kl, "popular": kl}}
    return row._asdict() | means | {"context": 4096, "device": device, "date": date} | changes


def _write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_table_shows_the_newest_record_of_a_row_and_where_it_was_measured(tmp_path):
    row = vecinfer.Row("keys alone", values="dense")
    path = _write(
        tmp_path / "x.jsonl",
        _record(row, 0.25, "cpu", "2026-02-02T00:00:00Z"),
        _record(row, 0.5, "NVIDIA H200", "2026-01-01T00:00:00Z"),
        _record(row, 0.75, "cpu", "2026-03-03T00:00:00Z", context=1024),
    )
    *_, line = calibrated_tables.render("vecinfer-sides", path=path).splitlines()
    assert line == "| keys `vq-d4b8`, values `dense` | 2.00 | 0.2500 | 0.2500 | 0.2500 | 0.500 | 20.00 | CPU |"


def test_the_table_of_transforms_names_devices_cell_by_cell_where_a_column_has_several(tmp_path):
    rows = [vecinfer.Row("transform", transform=how) for how in ("none", "smooth")]
    other = vecinfer.Row("no sink", transform="none", sink=0)
    date = "2026-01-01T00:00:00Z"
    known = [_record(rows[0], 0.5, "cpu", date), _record(other, 0.25, "cpu", date)]
    path = _write(tmp_path / "x.jsonl", *known)
    head, _, *lines = calibrated_tables.transforms_table(path=path).splitlines()
    assert head == "| keys mapped by | 2 bits (CPU) | no sink (CPU) |"
    assert lines == ["| `none` | 0.5000 | 0.2500 |"]
    path = _write(tmp_path / "y.jsonl", *known, _record(rows[1], 0.125, "NVIDIA H200", date))
    head, _, *lines = calibrated_tables.transforms_table(path=path).splitlines()
    assert head == "| keys mapped by | 2 bits | no sink (CPU) |"
    assert lines == ["| `none` | 0.5000 (CPU) | 0.2500 |", "| `smooth` | 0.1250 (H200) |  |"]
