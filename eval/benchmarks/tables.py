"""Makes tables and pictures from the records: `python -m hf_lowbit_kv.eval.benchmarks.tables` (`make results`), in
seconds.

`page_tables` writes `docs/benchmarks.md`. Other pages under `docs/` and the README have marks for tables:

    <!-- results: presets -->
    (replaced)
    <!-- end of results -->

A record counts only if its preset still has the record's formats (`result_files.current_records`), and an accuracy
record only if its preset still stores the same bytes (`measure.definition`). The newest such record is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval import bootstrap
from hf_lowbit_kv.eval.benchmarks import bench_memory, measure, model_tables, page_tables
from hf_lowbit_kv.eval.benchmarks.page_tables import BENCHMARKS, benchmarks_page
from hf_lowbit_kv.eval.benchmarks.result_files import Record, current_records, listed, markdown_table, newest
from hf_lowbit_kv.eval.perplexity import mean_of
from hf_lowbit_kv.eval.preset_search import plot
from hf_lowbit_kv.eval.provenance import RESULTS, run_command

ROOT = RESULTS.parents[1]
PAGES = (
    "docs/results.md",
    "docs/results-smollm2.md",
    "docs/choose.md",
    "docs/calibrate.md",
    "docs/dev/calibrated-presets.md",
    "docs/quantized-weights.md",
    "docs/several-gpus.md",
    "docs/transformers-quantized-cache.md",
    "docs/what-fits.md",
    "README.md",
)
PICTURE = "docs/pareto.png"
ESSAYS = ("worked.txt", "popular.txt")
TRANSCRIPT, JARGON = "transcript", "jargon"
#: number of tokens at which bits are computed, with a 16-bit window and the bundled model's heads
BITS_AT, HEAD_DIM = 32768, 64
TITLE = f"SmolLM2-135M-Instruct, a transcript of 4096 tokens; bits at {BITS_AT} tokens"
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


class PresetRow(NamedTuple):
    """Figures of a preset: its bits, and its newest record of each text. `essays` has the means of both essays."""

    preset: str
    bits: float
    essays: Record | None
    transcript: Record | None
    jargon: Record | None = None


def load(accuracy: Path = measure.OUT) -> list[PresetRow]:
    """Every preset that has records, in the order of bits."""
    last: dict[tuple[str, str], Record] = {}
    current: dict[str, str] = {}
    same = measure.setting().items()
    for record in current_records(accuracy):
        preset = record["preset"]
        if preset not in current:
            current[preset] = measure.definition(preset)
        if record["definition"] == current[preset] and all(record.get(key) == value for key, value in same):
            last[preset, record["text"]] = record
    rows = [
        PresetRow(name, bits(name), _essays(name, last), last.get((name, TRANSCRIPT)), last.get((name, JARGON)))
        for name in dict.fromkeys(preset for preset, _ in last)
    ]
    return sorted(rows, key=lambda row: (row.bits, row.preset))


def bits(preset: str) -> float:
    """Bits per value at `BITS_AT` tokens, including metadata, window and parameters."""
    return lb.get_preset(preset).spec().bits_per_value(BITS_AT, HEAD_DIM)


def _essays(preset: str, last: dict[tuple[str, str], Record]) -> Record | None:
    records = [last[preset, text] for text in ESSAYS if (preset, text) in last]
    if len(records) < len(ESSAYS):
        return None
    return mean_of(records, ("kl", "kl_p99", "top1", "ppl", "ppl_full"))


# ---- tables ---------------------------------------------------------------------------------------------------------

_DIGITS = {"top1": 3, "ppl": 2, "ppl_full": 2, "kl_p99": 2}


def _figure(text: str, key: str) -> Callable[[PresetRow], str]:
    """A cell: a figure of a preset's record of the text. `kl±` has the standard error too, if the record has one."""

    def cell(row: PresetRow) -> str:
        record = getattr(row, text)
        return _with_error(record) if key == "kl±" else _number(record, key)

    return cell


def _number(record: Record | None, key: str) -> str:
    if record is None or key not in record:
        return ""
    x = record[key]
    return f"{x:.{_DIGITS[key]}f}" if key in _DIGITS else f"{x:.4f}" if x >= 0.001 else f"{x:.5f}"


def _with_error(record: Record | None) -> str:
    kl = _number(record, "kl")
    error = None if record is None else record.get("kl_error")
    return kl if error is None else f"{kl} ± {error:.{len(kl.partition('.')[2])}f}"


def _columns(keys: Mapping[str, str], *texts: str) -> list[tuple[str, Callable[[PresetRow], str]]]:
    """Head and cell of columns with the figures `keys` (head -> field) of each text."""
    return [
        (f"{text}: {head}" if index == 0 else head, _figure(text, key))
        for text in texts
        for index, (head, key) in enumerate(keys.items())
    ]


def _name(row: PresetRow) -> str:
    return f"`{row.preset}`"


def _bits(row: PresetRow) -> str:
    return f"{row.bits:.2f}"


def _bits_of_page(preset: str, head_dim: int = HEAD_DIM) -> float:
    return lb.get_preset(preset).spec().bits_per_value(10**9, head_dim)


def _only(rows: list[PresetRow], names: Iterable[str]) -> list[PresetRow]:
    """The rows of these presets, in this order."""
    by_preset = {row.preset: row for row in rows}
    return [by_preset[name] for name in names if name in by_preset]


def presets_table(rows: list[PresetRow]) -> str:
    keys = {"KL": "kl", "99th": "kl_p99", "top-1": "top1"}
    return listed(rows, [("preset", _name), ("bits", _bits), *_columns(keys, "essays", "transcript")])


#: our own presets, and other presets of about the same size
OWN = (
    *("int6", "kivi-4-sink", "eigen-4", "k4v2-sink", "eigen-3"),
    *("kitty-pro-variance", "kitty-pro", "kivi-2-sink", "eigen-2"),
)


def own_table(rows: list[PresetRow]) -> str:
    figures = _columns({"KL": "kl±", "top-1": "top1"}, "essays", "transcript", "jargon")
    page = "bits of a page", lambda row: f"{_bits_of_page(row.preset):.2f}"
    return listed(_only(rows, OWN), [("preset", _name), page, *figures])


#: pairs of compared presets, ours first
PAIRS = (
    *(("eigen-4", "kivi-4-sink"), ("eigen-3", "k4v2-sink"), ("eigen-2", "kitty-pro")),
    *(("eigen-2", "kitty-pro-variance"), ("eigen-2", "kivi-2-sink")),
    ("int6", "kivi-4-sink"),
)
#: texts in the table of ratios, and the names of their columns
RATIO_TEXTS = {
    "worked.txt": "essay `worked`",
    "popular.txt": "essay `popular`",
    TRANSCRIPT: "transcript",
    JARGON: "jargon",
}


def ratios_table(rows: list[PresetRow], accuracy: Path = measure.OUT) -> str:
    """KL of presets divided by that of other presets, on the same tokens."""
    last = newest(current_records(accuracy), "preset", "text")
    known = {row.preset for row in rows}

    def ratio(pair: tuple[str, str], text: str) -> str:
        """The ratio and its standard error; empty if a record has no blocks."""
        blocks = [last.get((preset, text), {}).get("kl_blocks") for preset in pair]
        return "{:.2f} ± {:.2f}".format(*bootstrap.ratio([blocks[0]], [blocks[1]])) if all(blocks) else ""

    columns: dict[str, Callable[[Any], str]] = {
        "KL of": lambda pair: " / ".join(f"`{preset}`" for preset in pair),
        "bits of a page": lambda pair: " / ".join(f"{_bits_of_page(preset):.2f}" for preset in pair),
    }
    columns |= {head: functools.partial(ratio, text=text) for text, head in RATIO_TEXTS.items()}
    return listed((pair for pair in PAIRS if {*pair} <= known), columns)


#: the steps of Kitty's table 4, and the points of accuracy that Qwen3-8B gained with each step there
KITTY_STEPS = {
    "kivi-2": ("KIVI, 2 bits", ""),
    "kivi-2-sink": ("+ sinks in 16 bits", "+8.41"),
    "kitty": ("+ 12.5 % of the channels in 4 bits", "+5.17"),
    "kitty-pro": ("+ another 12.5 %", "+1.21"),
}


def kitty_table(rows: list[PresetRow]) -> str:
    before = [("step", lambda row: KITTY_STEPS[row.preset][0]), ("preset", _name), ("bits", _bits)]
    figures = _columns({"KL": "kl", "top-1": "top1"}, "essays", "transcript")
    paper = "Kitty, table 4 (Qwen3-8B)", lambda row: KITTY_STEPS[row.preset][1]
    return listed(_only(rows, KITTY_STEPS), [*before, *figures, paper])


CHOICES = (("kivi-2", "none"), ("kitty", "12.5 %"), ("kitty-pro", "25 %"))
SCORES = (("", "magnitude"), ("-variance", "variance"), ("-random", "random"), ("-hadamard", "magnitude, keys rotated"))


def boost_table(rows: list[PresetRow]) -> str:
    """KL on the essays, by the number of boosted channels and the way to choose them."""
    by_preset = {row.preset: row for row in rows}
    names = {"": {"kivi-2": "kivi-2-sink"}, "-hadamard": {"kivi-2": "kivi-2-hadamard-sink"}}

    def cell(preset: str, suffix: str) -> str:
        name = names.get(suffix, {}).get(preset, preset + suffix)
        return _number(by_preset[name].essays, "kl") if name in by_preset else ""

    head = ["boosted channels", *(shown for _, shown in SCORES)]
    return markdown_table(head, ([shown, *(cell(preset, suffix) for suffix, _ in SCORES)] for preset, shown in CHOICES))


POSITIONS = ("kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink", "kivi-2")


def positions_table(rows: list[PresetRow]) -> str:
    measured = {row.preset: row.transcript["by_position"] for row in _only(rows, POSITIONS) if row.transcript}
    if not measured:
        return "(no record)\n"
    edges = [f"{bucket['from']:.0f} to {bucket['to']:.0f}" for bucket in next(iter(measured.values()))]
    body = ([f"`{name}`", *(_number(bucket, "kl") for bucket in buckets)] for name, buckets in measured.items())
    return markdown_table(["tokens", *edges], body)


TABLES: dict[str, Callable[[list[PresetRow]], str]] = {
    "presets": presets_table,
    "kitty": kitty_table,
    "boost": boost_table,
    "positions": positions_table,
    "own": own_table,
    "ratios": ratios_table,
    "front": lambda rows: model_tables.front_table(),
    "worth": lambda rows: model_tables.worth_table(),
    "draws": lambda rows: model_tables.draws_table(),
    "models": lambda rows: model_tables.models_table(),
    "small-model": lambda rows: model_tables.models_table(model_tables.SMALL),
    "tasks": lambda rows: model_tables.tasks_table(),
    "ruler": lambda rows: model_tables.ruler_table(),
    "biases": lambda rows: model_tables.biases_table(),
    "losses": lambda rows: model_tables.losses_list(),
    "peers": lambda rows: model_tables.peers_table(),
    "peer-texts": lambda rows: model_tables.texts_table(),
    "parallel": lambda rows: page_tables.parallel_table(),
    "own-rows": lambda rows: bench_memory.rows_table(),
    "weights-accuracy": lambda rows: page_tables.weights_accuracy_table(),
    "weights-steps": lambda rows: page_tables.weights_steps_table(),
    "fits-24": lambda rows: page_tables.fits_table(24),
    "fits-48": lambda rows: page_tables.fits_table(48),
    "fits-80": lambda rows: page_tables.fits_table(80),
}


# ---- pages ----------------------------------------------------------------------------------------------------------


def filled(page: str, rows: list[PresetRow]) -> str:
    """A page's text with tables from the records. Raises `ValueError` for an unknown table."""

    def block(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]](rows) + match[4]

    return _BLOCK.sub(block, page)


def points(rows: list[PresetRow]) -> list[Record]:
    """Points of the picture: presets with a record of the transcript. Presets that store the same are shown once.
    Kitty's ablations other than by variance are left out, because they have their own table."""
    shown: dict[tuple[float, float], Record] = {}
    names = lb.preset_names()  # if several presets store the same, the first listed one is shown
    for row in sorted(rows, key=lambda row: names.index(row.preset) if row.preset in names else len(names)):
        ablation = row.preset.startswith("kitty") and row.preset.endswith(("-random", "-range", "-hadamard-variance"))
        if row.transcript is not None and row.bits < 16 and not ablation:
            kl = row.transcript["kl"]
            shown.setdefault((row.bits, kl), {"preset": row.preset, "bits_per_value": row.bits, "kl": kl})
    return list(shown.values())


def digest(rows: list[PresetRow]) -> str:
    """A hash of the points in the picture. The picture's metadata contain it."""
    return hashlib.sha256(json.dumps(points(rows)).encode()).hexdigest()


def draw(rows: list[PresetRow], path: Path) -> None:
    """Draw the Pareto picture."""
    plot(points(rows), path, TITLE, metadata={"Description": digest(rows)})


def pictures(rows: list[PresetRow]) -> list[tuple[str, str, Callable[[list[PresetRow], Path], None]]]:
    """For each picture: its file, the digest that an up-to-date picture contains, and the function that draws it."""
    return [
        (PICTURE, digest(rows), draw),
        (model_tables.PICTURE, model_tables.digest(), lambda rows, path: model_tables.draw(path)),
    ]


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where a page is not current.")
    ] = False,
) -> None:
    """Write the tables of the records into the pages, and draw the picture."""
    rows, stale = load(), list[str]()
    pages = {name: filled((ROOT / name).read_text(encoding="utf-8"), rows) for name in PAGES}
    for name, current in (pages | {BENCHMARKS: benchmarks_page()}).items():
        if (ROOT / name).read_text(encoding="utf-8") != current:
            stale.append(name)
            if not check:
                (ROOT / name).write_text(current, encoding="utf-8")
    for name, expected, drawing in pictures(rows):
        picture = ROOT / name
        if not picture.is_file() or expected.encode() not in picture.read_bytes():
            stale.append(name)
            if not check:
                drawing(rows, picture)
    print(f"{'not current' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
