"""What pages of the documentation state, compared with records and sources.

Tables that recommend presets follow the picture: no row has more bits and more error than another. A preset that needs a
calibration may beat one that needs none; it must not be beaten by any.
"""

import functools
import importlib.util
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import bench_runs
import pytest
import torch
from cases import tiny_config
from tiny_hub import TinyHub

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import model_tables
from hf_lowbit_kv.eval.benchmarks.model_tables import accuracy, mean
from hf_lowbit_kv.eval.benchmarks.result_files import read_records
from hf_lowbit_kv.eval.local_models import MissingPackageError
from hf_lowbit_kv.eval.provenance import RESULTS, append_record
from hf_lowbit_kv.presets import DEFAULT_PRESET, PAPER_PRESETS

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def bits(preset: str) -> float:
    return lb.get_preset(preset).spec().bits_per_value(32768, 128)


def test_what_presets_reach_on_the_real_model_is_in_the_records():
    rows = re.findall(
        r"^\| `([\w-]+)`[^|]*\|[^|]*\|[^|]*\|[^|]*\| \.(\d{4}) \| \.(\d{4}) \|$", page("docs/dev/own-formats.md"), re.M
    )
    assert {"int8", "int6", "int5", "fp8", "eigen-4", "eigen-3", "eigen-2"} == {name for name, *_ in rows}
    for name, *figures in rows:
        for context, figure in zip((4096, 16384), figures, strict=True):
            records = accuracy(context)[name]
            assert len(records) == 4
            assert figure == f"{mean(records, 'kl'):.4f}".removeprefix("0."), (name, context)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{name}.md" for name in ("choose", "dev/recording"))])
def test_every_preset_that_a_page_names_is_listed(document):
    """A preset is any word that `get_preset` knows: suffixes make names that are not listed."""
    named = {word for word in re.findall(r"\w[\w.-]*\w", page(document)) if is_preset(word)}
    assert DEFAULT_PRESET in named
    known = {*lb.preset_names(), *(PAPER_PRESETS if document == "docs/choose.md" else ())}
    assert sorted(named - known) == []


def is_preset(word: str) -> bool:
    try:
        lb.get_preset(word)
    except ValueError:
        return False
    return True


SHORT_ANSWER = {
    wanted: (preset, float(stored), same)
    for wanted, preset, stored, same in re.findall(
        r"^\| ([^|`]+) \| `([\w.-]+)` \| ([\d.]+) \| ([\d.]+) of 100", page("docs/choose.md"), re.MULTILINE
    )
}


@pytest.mark.parametrize("wanted", SHORT_ANSWER)
def test_the_short_answer_gives_the_records_figures(wanted):
    preset, stored, same = SHORT_ANSWER[wanted]
    (row,) = (row for row in bench_runs.accuracy_rows() if row.preset == preset)
    assert stored == pytest.approx(bits(preset), abs=0.051)
    digits = len(same.partition(".")[2])
    assert float(same) == pytest.approx(100 * row.essays["top1"], abs=0.501 * 10**-digits)


def test_the_short_answer_names_the_smallest():
    """Of all presets, and of those that need no calibration; `dense` and latents aside, and with sinks."""
    assert len(SHORT_ANSWER) >= 6
    presets = [name for row in bench_runs.accuracy_rows() if lb.get_preset(name := row.preset).spec().sink]
    presets = [name for name in presets if name not in PAPER_PRESETS]
    plain = [name for name in presets if not lb.get_preset(name).spec().parameters(128, 128, 8)]
    assert bits(SHORT_ANSWER["the least memory of all, with one calibration run"][0]) == min(map(bits, presets))
    assert bits(SHORT_ANSWER["the least memory without calibration"][0]) == min(map(bits, plain))


def test_every_file_says_what_it_is_for():
    for folder in ("hf_lowbit_kv", "triton_kernels", "eval"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not text.strip() or re.match(r'r?"""\S[^"]{10,}', text), (
                f"{path} does not begin with a sentence on itself"
            )


def test_what_the_default_keeps_on_every_measured_model_is_in_the_records():
    kept = [
        mean(caches["kivi-4-sink"], "top1") for caches in model_tables.by_text().values() if "kivi-4-sink" in caches
    ]
    shown = re.findall(r"keep (\d+) to (\d+) of 100 next tokens\. Two things decide", page("docs/choose.md"))
    assert shown == [tuple(f"{100 * x:.0f}" for x in (min(kept), max(kept)))]


@pytest.mark.parametrize("document", ["docs/dev/recording.md"])
def test_a_compiled_step_stands_beside_one_of_the_same_run(document):
    """With `dense` pages in place of packed ones. An eager step of another cache would show Python's time as well."""
    found = re.findall(
        r"([\d.]+) ms with `kivi-2` and ([\d.]+) ms with `dense`.*?`(\w{7})`", " ".join(page(document).split())
    )
    assert found
    for packed, dense, commit in found:
        for cache, stated in (("kivi-2", packed), ("dense", dense)):
            measured = [
                record["step_ms"]
                for record in read_records(RESULTS / "generate-nvidia-h200.jsonl")
                if record["commit"].startswith(commit)
                and (record["cache"], record["mode"], record["batch"], record["tokens"]) == (cache, "tuned", 1, 131072)
            ]
            assert float(stated) == pytest.approx(measured[-1], abs=0.051)


PAGES = [
    path
    for pattern in ("*.md", "Makefile", "docs/**/*.md", "eval/**/*.md", "notebooks/*.ipynb", "tests/data/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def has(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_modules_that_pages_and_notebooks_run_and_import_exist():
    """`python -m ...` and `from ... import ...`; names that are imported too."""
    commands, imports = set[str](), set[tuple[str, str]]()
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\n", "\n").replace('\\"', '"')
        commands |= set(re.findall(r"-m[\s\",]+(hf_lowbit_kv(?:[\w.]*\w)?)", text))
        for module, names in re.findall(r"from (hf_lowbit_kv[\w.]*) import ([\w, ]+)", text):
            imports |= {(module, name.split(" as ")[0].strip()) for name in names.split(",")}
    assert {"hf_lowbit_kv", "hf_lowbit_kv.eval.benchmarks.bench_decode"} <= commands
    assert ("hf_lowbit_kv.eval.local_models", "load_model") in imports
    assert [name for name in sorted(commands) if importlib.util.find_spec(name) is None] == []
    assert [f"from {module} import {name}" for module, name in sorted(imports) if not has(module, name)] == []


class Point(NamedTuple):
    preset: str
    bits: float
    error: float

    @property
    def calibrated(self) -> bool:
        return bool(lb.get_preset(self.preset).spec().parameters(64, 64, 1))


def beaten(points: list[Point]) -> list[str]:
    """Rows that another one beats: fewer bits and less error, one of them strictly."""
    return [
        f"{point.preset} by {other.preset}"
        for point in points
        for other in points
        if (point.calibrated or not other.calibrated)
        and other.bits <= point.bits
        and other.error <= point.error
        and (other.bits, other.error) != (point.bits, point.error)
    ]


def cells(text: str) -> list[list[str]]:
    """The cells of the first table with presets, a list for each preset."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "`" in line]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]


def in_readme() -> list[Point]:
    block = re.search(r"<!-- results: front -->(.*?)<!-- end of results -->", page("README.md"), re.DOTALL)
    rows = cells(block[1])
    return [Point(row[0].strip("`"), float(row[2]), float(row[3])) for row in rows]


def in_choose() -> list[Point]:
    """The presets that the short answer names, with bits and KL of the records."""
    answer = page("docs/choose.md").split("## Short answer")[1].split("##")[0]
    names = dict.fromkeys(name for row in cells(answer) for name in re.findall(r"`([\w.-]+)`", "|".join(row)))
    known = {row.preset: row for row in bench_runs.accuracy_rows() if row.essays is not None}
    return [Point(name, known[name].bits, known[name].essays["kl"]) for name in names if name in known]


@pytest.mark.parametrize("points", [in_readme, in_choose])
def test_no_row_is_beaten(points):
    rows = points()
    assert len(rows) >= 6
    assert beaten(rows) == []


def test_a_beaten_row_is_noticed():
    rows = [Point("int8", 8.3, 0.1), Point("int6", 6.3, 0.1), Point("kivi-4", 4.3, 0.2)]
    assert beaten(rows) == ["int8 by int6"]
    assert beaten([Point("kivi-2", 2.4, 0.3), Point("eigen-2", 2.2, 0.1)]) == []
    assert beaten([Point("kivi-2", 2.2, 0.1), Point("eigen-2", 2.4, 0.3)]) == ["eigen-2 by kivi-2"]


# ---- README: its code runs, and its figures are those of the records ------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs_and_prints_the_table_of_the_page(tmp_path, monkeypatch, capsys):
    """Unchanged, with a tiny model under the name of the real one."""
    monkeypatch.chdir(tmp_path)
    try:
        TinyHub(tmp_path / "hub").link(TEXT, tmp_path)
    except MissingPackageError as error:
        pytest.skip(str(error))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (table,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines() if line.startswith(("preset", "16-bit", "kivi"))] == (
        table.splitlines()
    )
    assert "LowBitCache kivi-4-sink" in printed
    assert "lowbit_kv (reads packed pages)" in printed
    cache, config, tokens = names["output"].cache, names["model"].config, names["inputs"].input_ids.numel()
    full = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * names["model"].dtype.itemsize
    assert cache.nbytes < tokens * full / 2
    lb.disable(names["model"])


def test_the_decode_step_is_that_of_the_newest_records():
    """Compressed and not compressed in the same loop, and eager transformers."""
    newest = {
        (r["cache"], r["mode"]): r["step_ms"]
        for r in read_records(RESULTS / "generate-nvidia-h200.jsonl")
        if (r["batch"], r["tokens"]) == (8, 32768)
    }
    sentence = r"takes ([\d.]+) ms with `kivi-4-sink`, ([\d.]+) ms without compression, and ([\d.]+) ms in eager"
    shown = re.search(sentence, " ".join(TEXT.split()))
    for figure, key in zip(
        shown.groups(), [("kivi-4-sink", "recorded"), ("dense", "recorded"), ("DynamicCache", "eager")], strict=True
    ):
        assert float(figure) == pytest.approx(newest[key], abs=0.051)


def test_the_first_case_is_what_fits_counts():
    full, packed = lb.fits("meta-llama/Llama-3.1-8B", 131072, "24GB", presets=["kivi-4-sink"])
    assert (full.fits, packed.fits) == (False, True)
    assert f"{full.longest_context:,} tokens fit with a 16-bit cache" in TEXT
    assert f"whole context of 131,072 tokens fits, in {packed.total / 1e9:.1f} GB" in " ".join(TEXT.split())


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 95


def test_rulers_column_has_points_lost_and_their_paired_error(tmp_path):
    """In closed form. Only records of the measured model, of this length and with all tasks and items count."""
    records = tmp_path / "tasks.jsonl"
    base = {"model": model_tables.MEASURED, "items": 25, "context": 16384, "packed_share": 1.0}
    lost = {"dense": [0.0], "int8": [0.5, 0.0, 0.25], "int6": [0.0, 1.0]}
    for preset, scores in lost.items():
        for task in model_tables.RULER:
            failed = {str(item): 1 - x for item, x in enumerate(scores)}
            if (preset, task) != ("int6", "vt"):  # a task is missing
                record = {"preset": preset, "task": task, "score": 1 - sum(scores) / 25, "failed": failed}
                append_record(records, base | record)
                append_record(records, base | record | {"context": 4096, "score": 0.0})
                append_record(records, base | record | {"items": 5, "score": 0.0})
    # 13 tasks with the same differences
    error = (statistics.variance(lost["int8"] + [0.0] * 22) / 25 / 13) ** 0.5
    table = model_tables.front_table(records)
    assert "| RULER at 16k, points lost of" in table
    assert re.search(r"^\| 16 bits \|.* \| 0 \| 1.0 \|$", table, re.MULTILINE)
    assert f" | {100 * 0.75 / 25:.1f} ± {100 * error:.1f} | " in re.search(r"^\| `int8` .*$", table, re.MULTILINE)[0]
    for name in ("int6", "kivi-4-sink"):
        assert re.search(rf"^\| \**`{name}`\** \|.* \|  \| [\d.]+ \|$", table, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a configuration:UserWarning")
@pytest.mark.parametrize("document", ["README.md", "docs/start.md", "docs/faq.md"])
def test_pages_agree_below_which_length_nothing_is_saved(document):
    shown = re.findall(r"[Bb]elow about (\d+) tokens \(`int8`: (\d+)\)", " ".join(page(document).split()))
    assert shown == [tuple(str(50 * round(longest_larger(name) / 50)) for name in (DEFAULT_PRESET, "int8"))]


@functools.cache
def longest_larger(preset: str) -> int:
    """The longest text of which a growing cache allocates more bytes than its keys and values have in 16 bits."""
    config = tiny_config("llama", head_dim=128, num_hidden_layers=1)
    cache, longest = lb.from_preset(preset, config, backend="cpu"), 0
    tokens = torch.randn(1, config.num_key_value_heads, 16, 128, dtype=torch.bfloat16)
    for length in range(16, 1600, 16):
        cache.update(tokens, tokens, 0)
        if cache.nbytes >= length * config.num_key_value_heads * 2 * 128 * 2:
            longest = length
    return longest


def test_notebooks_that_take_another_model_ask_no_configuration_for_head_dim():
    """Many have none, e.g. that of Qwen2.5."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert "config.head_dim" not in path.read_text(encoding="utf-8"), path.name
