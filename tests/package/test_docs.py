"""Figures of README and pages are those of the records, and the README's code runs."""

import functools
import re
import statistics
from collections.abc import Collection
from pathlib import Path

import bench_runs
import pytest
import torch
from cases import tiny_config
from tiny_hub import TinyHub

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import model_tables
from hf_lowbit_kv.eval.benchmarks.model_tables import accuracy, mean
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, read_records
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


def ratio(name: str, other: str, key: str, digits: int = 0, model: str = model_tables.MEASURED) -> str:
    """Of two presets' figures on a real model, texts of 4,096 tokens."""
    records = model_tables.by_text()[model, 4096]
    return f"{mean(records[name], key) / mean(records[other], key):.{digits}f}"


def small_ratios(name: str, other: str, digits: int = 0) -> tuple[str, ...]:
    """Of KL on SmolLM2, for the essays and the transcript; the smaller one first."""
    rows = {row.preset: row for row in bench_runs.accuracy_rows()}
    pairs = [(row.essays["kl"], row.transcript["kl"]) for row in (rows[name], rows[other])]
    return tuple(f"{x:.{digits}f}" for x in sorted(a / b for a, b in zip(*pairs, strict=True)))


def kept(names: Collection[str], *models: str, contexts: Collection[int] = (2048, 4096, 16384, 32768)) -> list[float]:
    """Next tokens of 100 that stay those of 16 bits, on real models."""
    found = model_tables.by_text()
    caches = [found[key] for key in found if key[1] in contexts and (not models or key[0] in models)]
    return [100 * mean(each[name], "top1") for each in caches for name in names if name in each]


def ends(figures: Collection[float]) -> tuple[str, str]:
    return f"{min(figures):.0f}", f"{max(figures):.0f}"


def shrinks() -> tuple[str, str]:
    """By which factor presets of README's table shrink the cache."""
    sizes = dict(model_tables._cache_gb())
    full = sizes.pop("16-bit")
    return ends([full / size for size in sizes.values()])


def fits_of_choose() -> tuple[str, str]:
    _, fit = lb.fits("Qwen/Qwen3-8B", 65536, "24GB", presets=["int8"])
    return f"{fit.total / 1e9:.1f}", f"{fit.longest_context // 1000}"


def on_24_gb() -> tuple[str, ...]:
    """GB that PyTorch reserved for `kivi-4-sink`; the longest text in 16 bits by the count, and one that did not fit."""
    records = [
        record for record in read_records(RESULTS / "fits-nvidia-h200.jsonl") if record.get("memory") == 24 * 10**9
    ]
    (packed,) = (record for record in records if record["preset"] == "kivi-4-sink")
    (full,) = (record for record in records if record["preset"] == "dense")
    assert (packed["fit"], full["fit"]) == (True, False)
    assert packed["context"] - packed["new_tokens"] == 131072
    return f"{packed['reserved'] / 1e9:.1f}", *(f"{full[tokens]:,}" for tokens in ("longest", "context"))


def gemma() -> tuple[str]:
    full, packed = lb.fits("google/gemma-3-27b-it", 131072, "80GB", presets=["kivi-4-sink"])
    return (f"{full.cache / packed.cache:.1f}",)


def humaneval_errors() -> tuple[str, str]:
    """Of differences to 16 bits, in items, for listed presets."""
    measured, key = model_tables.newest_tasks(), model_tables.Key("humaneval", None, 164)
    full, *others = (measured[name] for name in model_tables.LISTED)
    return ends([1.64 * model_tables.paired_error(records, full, [key]) for records in others])


def calibrations() -> tuple[str, ...]:
    """Seconds and GB, of records of today's formats."""
    records = [record for path in RESULTS.glob("calibrate-*.jsonl") for record in current_records(path)]
    by_size = {(record["preset"], record["samples"], record.get("offload", False)): record for record in records}
    usual, codebooks = by_size["eigen-2", 8, False], by_size["vecinfer-2", 256, False]
    passes = usual["parts"]["reading"] + usual["parts"]["gradients"], usual["parts"]["fitting"]
    seconds = codebooks["seconds"], usual["seconds"], *passes
    growth = usual, by_size["eigen-2", 2, True], by_size["eigen-2", 2, False]
    return *(f"{x:.0f}" for x in seconds), *(f"{record['growth'] / 1e9:.1f}" for record in growth)


LARGE_BIASES = model_tables.MEASURED, model_tables.SMALL
BIASES_KEPT = "int8", "int6", "kivi-4-sink", "k4v2-sink", "eigen-2", "eigen-3", "eigen-4"
#: sentences with figures outside of the tables that `make results` writes, and what computes these figures
SENTENCES = [
    ("README.md", r"by a factor of (\d) to (\d)", shrinks),
    ("docs/index.md", r"by a factor of (\d) to (\d)", shrinks),
    (
        "README.md",
        r"reserved at most ([\d.]+) GB\. In 16 bits at most ([\d,]+) tokens are counted to fit, and a run with ([\d,]+) failed",
        on_24_gb,
    ),
    ("docs/choose.md", r"takes ([\d.]+) GB in all, and up to (\d+)k tokens would fit", fits_of_choose),
    ("docs/choose.md", r"keep (\d+) to (\d+) of 100 next tokens\. Two things", lambda: ends(kept(["kivi-4-sink"]))),
    (
        "docs/choose.md",
        r"(\d+) of 100 next tokens as with 16 bits \(Qwen2.5-Coder-1.5B\), (\d+) \(0.5B\)",
        lambda: tuple(f"{kept(['kivi-4-sink'], model, contexts=[4096])[0]:.0f}" for model in LARGE_BIASES),
    ),
    (
        "docs/choose.md",
        r"(\d+) of 100 with SmolLM2-135M in float32, (\d+) in bfloat16, where 16 bits have ([\d.]+)",
        lambda: (
            next(
                f"{100 * row.essays['top1']:.0f}" for row in bench_runs.accuracy_rows() if row.preset == "kivi-4-sink"
            ),
            f"{kept(['kivi-4-sink'], 'SmolLM2-135M-Instruct, Q4_1 weights')[0]:.0f}",
            f"{kept(['dense'], 'SmolLM2-135M-Instruct, Q4_1 weights')[0]:.1f}",
        ),
    ),
    ("docs/choose.md", r"131,072 tokens is ([\d.]+) times smaller", gemma),
    (
        "docs/choose.md",
        r"keep (\d+) to (\d+) of 100 next tokens of both Qwen models",
        lambda: ends(kept(BIASES_KEPT, *LARGE_BIASES, contexts=[4096])),
    ),
    ("docs/choose.md", r"HumanEval to 16 bits has a standard error of (\d+) to (\d+) items", humaneval_errors),
    (
        "docs/choose.md",
        r"has (\d+) times the KL of `kivi-2-sink` there, and `kitty-hadamard` (\d+) times",
        lambda: (
            ratio("kivi-2-hadamard-sink", "kivi-2-sink", "kl", model=model_tables.SMALL),
            ratio("kitty-hadamard", "kitty", "kl", model=model_tables.SMALL),
        ),
    ),
    (
        "docs/choose.md",
        r"`kivi-2-sink` has ([\d.]+) to ([\d.]+) times the KL divergence of `kivi-2` on the three",
        lambda: (
            ratio("kivi-2-sink", "kivi-2", "kl", 1),
            ratio("kivi-2-sink", "kivi-2", "kl", 1, model_tables.SMALL),
        ),
    ),
    (
        "docs/choose.md",
        r"times smaller: (\d+) on Qwen2.5-Coder-1.5B, (\d+) on 0.5B, (\d+) to (\d+) on SmolLM2",
        lambda: (
            ratio("k2v4-sink", "k4v2-sink", "kl"),
            ratio("k2v4-sink", "k4v2-sink", "kl", model=model_tables.SMALL),
            *small_ratios("k2v4-sink", "k4v2-sink"),
        ),
    ),
    (
        "docs/choose.md",
        r"has ([\d.]+) times the KL divergence of `kivi-2-sink` on Qwen2.5-Coder-1.5B, and ([\d.]+) to ([\d.]+) times on",
        lambda: (
            ratio("kivi-2-hadamard-sink", "kivi-2-sink", "kl", 1),
            *small_ratios("kivi-2-hadamard-sink", "kivi-2-sink", 1),
        ),
    ),
    (
        "docs/calibrate.md",
        r"took (\d+) seconds for `vecinfer-2`, and an H100 (\d+) seconds .*: (\d+) for forward and backward passes, (\d+) for"
        r" .* needed ([\d.]+) GB .* needed ([\d.]+) GB .* instead of ([\d.]+) GB",
        calibrations,
    ),
]


@pytest.mark.parametrize(("document", "sentence", "figures"), SENTENCES, ids=[f"{x[0]}-{x[1][:24]}" for x in SENTENCES])
def test_the_figures_of_a_sentence_are_those_of_records_and_code(document, sentence, figures):
    (shown,) = re.findall(sentence, " ".join(page(document).split()))
    assert (shown if isinstance(shown, tuple) else (shown,)) == figures()


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
                for record in current_records(RESULTS / "generate-nvidia-h200.jsonl")
                if record["commit"].startswith(commit)
                and (record["cache"], record["mode"], record["batch"], record["tokens"]) == (cache, "tuned", 1, 131072)
            ]
            assert float(stated) == pytest.approx(measured[-1], abs=0.051)


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
        for r in current_records(RESULTS / "generate-nvidia-h200.jsonl")
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
    assert f"at most {full.longest_context:,} tokens are counted to fit" in TEXT
    assert f"{packed.total / 1e9:.1f} GB are\ncounted" in page("docs/what-fits.md")


def test_rulers_column_has_points_lost_and_their_paired_error(tmp_path):
    """In closed form. Only records of the measured model, of this length and with all tasks and items count."""
    records = tmp_path / "tasks.jsonl"
    base = {"model": model_tables.MEASURED, "items": 25, "context": 16384, "packed_share": 1.0}
    lost = {"dense": [0.0], "int8": [0.5, 0.0, 0.25], "int6": [0.0, 1.0]}
    for preset, scores in lost.items():
        for task in model_tables.RULER:
            found = {str(item): 1 - x for item, x in enumerate(scores + [0.0] * (25 - len(scores)))}
            if (preset, task) != ("int6", "vt"):  # a task is missing
                record = {"preset": preset, "task": task, "score": 1 - sum(scores) / 25, "scores": found}
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
