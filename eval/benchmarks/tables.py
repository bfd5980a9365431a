"""Makes tables and pictures from the records: `python -m hf_lowbit_kv.eval.benchmarks.tables` (`make results`), in
seconds.

`benchmarks_page` writes `docs/benchmarks.md`. Other pages under `docs/` and the README have marks for tables:

    <!-- results: presets -->
    (replaced)
    <!-- end of results -->

A record counts only if its preset still has the record's formats (`result_files.current_records`), and an accuracy
record only if its preset still stores the same bytes (`measure.definition`). The newest such record is used. The
figures of the two essays come from `accuracy-smollm2.jsonl`. Presets without records there use
`perplexity-smollm2.jsonl`, which has no percentiles.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval import bootstrap
from hf_lowbit_kv.eval.benchmarks import (
    baselines,
    bench_batch,
    front_page,
    measure,
    page_tables,
    parallel,
    peers_table,
    tasks_table,
)
from hf_lowbit_kv.eval.benchmarks.benchmarks_page import BENCHMARKS, benchmarks_page
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.preset_search import plot
from hf_lowbit_kv.eval.provenance import RESULTS, results_path, run_command

ROOT = RESULTS.parents[1]
PAGES = (
    "docs/results.md",
    "docs/results-smollm2.md",
    "docs/dev/calibrated-presets.md",
    "docs/dev/batch.md",
    "docs/protocols.md",
    "docs/quantized-weights.md",
    "docs/several-gpus.md",
    "docs/transformers-quantized-cache.md",
    "docs/what-fits.md",
    "README.md",
)
PICTURE = "docs/pareto.png"
#: records of `eval.accuracy`
EARLIER = results_path("perplexity", "smollm2")
ESSAYS = ("worked.txt", "popular.txt")
TRANSCRIPT, JARGON = "transcript", "jargon"
#: number of tokens at which bits are computed, with a 16-bit window and the bundled model's heads
BITS_AT, HEAD_DIM = 32768, 64
TITLE = f"SmolLM2-135M-Instruct, a transcript of 4096 tokens; bits at {BITS_AT} tokens"
#: fields that every record has
FIELDS = ("preset", "text", "definition", "kl", "kl_p99", "top1", "ppl", "ppl_full", "by_position", "context", "start")
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


class PresetRow(NamedTuple):
    """Figures of a preset: its bits, and its newest record of each text. `essays` has the means of both essays."""

    preset: str
    bits: float
    essays: dict[str, Any] | None
    transcript: dict[str, Any] | None
    jargon: dict[str, Any] | None = None


def load(accuracy: Path = measure.OUT, earlier: Path = EARLIER) -> list[PresetRow]:
    """Every preset that has records, in the order of bits.

    Raises:
        ValueError: a record lacks a field, because another version wrote it. The message names file, record and field.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    current: dict[str, str] = {}
    same = measure.setting()
    for number, record in enumerate(current_records(accuracy), 1):
        if lacking := [field for field in FIELDS if field not in record]:
            raise ValueError(
                f"{accuracy.name}, record {number}, lacks {lacking[0]!r}: another version of the project wrote it; "
                "remove it and run `make measure`"
            )
        preset = record["preset"]
        if preset not in current:
            current[preset] = measure.definition(preset)
        if record["definition"] == current[preset] and all(record.get(key) == value for key, value in same.items()):
            newest[preset, record["text"]] = record
    before = {
        record["preset"]: record
        for record in current_records(earlier)
        if record["texts"] == list(ESSAYS) and all(record.get(key) == value for key, value in same.items())
    }
    names = dict.fromkeys([*(preset for preset, _ in newest), *before])
    rows = [
        PresetRow(
            name,
            bits(name),
            _essays(name, newest) or before.get(name),
            newest.get((name, TRANSCRIPT)),
            newest.get((name, JARGON)),
        )
        for name in names
    ]
    return sorted(rows, key=lambda row: (row.bits, row.preset))


def bits(preset: str) -> float:
    """Bits per number at `BITS_AT` tokens, including metadata, window and parameters."""
    return lb.get_preset(preset).spec().bits_per_value(BITS_AT, HEAD_DIM)


def _essays(preset: str, newest: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any] | None:
    records = [newest[preset, text] for text in ESSAYS if (preset, text) in newest]
    if len(records) < len(ESSAYS):
        return None
    keys = ("kl", "kl_p99", "top1", "ppl", "ppl_full")
    means: dict[str, Any] = {key: sum(record[key] for record in records) / len(records) for key in keys}
    if all(record.get("kl_error") is not None for record in records):  # texts are independent
        means["kl_error"] = sum(record["kl_error"] ** 2 for record in records) ** 0.5 / len(records)
    if all("kl_blocks" in record for record in records):
        means["kl_blocks"] = [record["kl_blocks"] for record in records]
    buckets = zip(*(record["by_position"] for record in records))
    return means | {
        "by_position": [{key: sum(b[key] for b in same) / len(same) for key in same[0]} for same in buckets]
    }


# ---- tables ---------------------------------------------------------------------------------------------------------


def _cells(record: dict[str, Any] | None, *keys: str) -> list[str]:
    """Figures of a record; empty text for missing ones."""
    digits = {"top1": 3, "ppl": 2, "ppl_full": 2, "kl_p99": 2}
    return ["" if record is None or key not in record else _number(record[key], digits.get(key)) for key in keys]


def _number(x: float, digits: int | None) -> str:
    if digits is not None:
        return f"{x:.{digits}f}"
    return f"{x:.4f}" if x >= 0.001 else f"{x:.5f}"


def presets_table(rows: list[PresetRow]) -> str:
    head = "preset", "bits", "essays: KL", "99th", "top-1", "transcript: KL", "99th", "top-1"
    body = (
        [f"`{row.preset}`", f"{row.bits:.2f}", *(x for of in row[2:4] for x in _cells(of, "kl", "kl_p99", "top1"))]
        for row in rows
    )
    return markdown_table(head, body)


#: our own presets, and other presets of about the same size
OWN = (
    *("int6", "kivi-4-sink", "eigen-4", "k4v2-sink", "eigen-3"),
    *("kitty-pro-variance", "kitty-pro", "kivi-2-sink", "eigen-2", "eigen-2-trellis"),
)


def own_table(rows: list[PresetRow]) -> str:
    by_preset = {row.preset: row for row in rows}
    head = "preset", "bits of a page", "essays: KL", "top-1", "transcript: KL", "top-1", "jargon: KL", "top-1"
    body = (
        [f"`{name}`", f"{_bits_of_page(name):.2f}"]
        + [x for of in by_preset[name][2:] for x in (_with_error(of), *_cells(of, "top1"))]
        for name in OWN
        if name in by_preset
    )
    return markdown_table(head, body)


def _bits_of_page(preset: str, head_dim: int = HEAD_DIM) -> float:
    return lb.get_preset(preset).spec().bits_per_value(10**9, head_dim)


def _with_error(record: dict[str, Any] | None) -> str:
    """KL, and its standard error if the record has one."""
    (kl,) = _cells(record, "kl")
    error = None if record is None else record.get("kl_error")
    return kl if error is None else f"{kl} ± {error:.{len(kl.partition('.')[2])}f}"


#: pairs of compared presets, ours first
PAIRS = (
    *(("eigen-4", "kivi-4-sink"), ("eigen-3", "k4v2-sink"), ("eigen-2", "kitty-pro")),
    *(("eigen-2", "kitty-pro-variance"), ("eigen-2", "kivi-2-sink"), ("eigen-2-trellis", "eigen-2")),
    ("int6", "kivi-4-sink"),
)


def ratios_table(rows: list[PresetRow], accuracy: Path = measure.OUT) -> str:
    """KL of presets divided by that of other presets, on the same tokens."""
    newest = {(record["preset"], record["text"]): record for record in current_records(accuracy)}
    known = {row.preset for row in rows}
    body = (
        [
            f"`{ours}` / `{theirs}`",
            f"{_bits_of_page(ours):.2f} / {_bits_of_page(theirs):.2f}",
            *(_ratio(newest.get((ours, text)), newest.get((theirs, text))) for text in RATIO_TEXTS),
        ]
        for ours, theirs in PAIRS
        if {ours, theirs} <= known
    )
    return markdown_table(("KL of", "bits of a page", *RATIO_TEXTS.values()), body)


def _ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    """The ratio and its standard error; empty if a record has no blocks."""
    pair = [record.get("kl_blocks") for record in (ours, theirs) if record is not None]
    if len(pair) < 2 or not all(pair):
        return ""
    return "{:.2f} ± {:.2f}".format(*bootstrap.ratio([pair[0]], [pair[1]]))


#: texts in the table of ratios, and the names of their columns
RATIO_TEXTS = {
    "worked.txt": "essay `worked`",
    "popular.txt": "essay `popular`",
    TRANSCRIPT: "transcript",
    JARGON: "jargon",
}
#: the same for the table of baselines
COLUMN_TEXTS = {text: column for text, column in RATIO_TEXTS.items() if text != "popular.txt"}


def baselines_table(rows: list[PresetRow], path: Path = baselines.OUT, accuracy: Path = measure.OUT) -> str:
    """KL of other methods, as implemented here, and of our own presets with the same bits for each code."""
    newest = {(record["baseline"], record["text"]): record for record in current_records(path)}
    own = {(record["preset"], record["text"]): record for record in current_records(accuracy)}
    body = []
    for nbits in baselines.BITS:
        for name in (name for name in baselines.BASELINES if name.endswith(f"-{nbits}")):
            if any((name, text) in newest for text in COLUMN_TEXTS):
                page = [
                    sum(fmt.bits_per_value(dim) for fmt in baselines.BASELINES[name][1:]) / 2 for dim in (HEAD_DIM, 128)
                ]
                found = [_with_error(newest.get((name, text))) for text in COLUMN_TEXTS]
                body.append([f"{name}, as implemented here", *(f"{x:.2f}" for x in page), *found])
        if (preset := f"eigen-{nbits}") in {row.preset for row in rows}:
            shown = [f"{_bits_of_page(preset, head_dim):.2f}" for head_dim in (HEAD_DIM, 128)]
            body.append([f"`{preset}`", *shown, *(_with_error(own.get((preset, text))) for text in COLUMN_TEXTS)])
    head = "method", f"bits, head_dim {HEAD_DIM}", "128", *(f"{shown}: KL" for shown in COLUMN_TEXTS.values())
    return markdown_table(head, body)


#: the steps of Kitty's table 4, and the points of accuracy that Qwen3-8B gained with each step there
KITTY_STEPS = (
    ("KIVI, 2 bits", "kivi-2", ""),
    ("+ sinks in 16 bits", "kivi-2-sink", "+8.41"),
    ("+ 12.5 % of the channels in 4 bits", "kitty", "+5.17"),
    ("+ another 12.5 %", "kitty-pro", "+1.21"),
)


def kitty_table(rows: list[PresetRow]) -> str:
    by_preset = {row.preset: row for row in rows}
    head = "step", "preset", "bits", "essays: KL", "top-1", "transcript: KL", "top-1", "Kitty, table 4 (Qwen3-8B)"
    body = (
        [
            step,
            f"`{name}`",
            f"{by_preset[name].bits:.2f}",
            *(x for of in by_preset[name][2:4] for x in _cells(of, "kl", "top1")),
            paper,
        ]
        for step, name, paper in KITTY_STEPS
    )
    return markdown_table(head, body)


CHOICES = (("kivi-2", "none"), ("kitty", "12.5 %"), ("kitty-pro", "25 %"))
SCORES = (("", "magnitude"), ("-variance", "variance"), ("-random", "random"), ("-hadamard", "magnitude, keys rotated"))


def boost_table(rows: list[PresetRow]) -> str:
    """KL on the essays, by the number of boosted channels and the way to choose them."""
    by_preset = {row.preset: row for row in rows}
    names = {"": {"kivi-2": "kivi-2-sink"}, "-hadamard": {"kivi-2": "kivi-2-hadamard-sink"}}

    def cell(preset: str, suffix: str) -> str:
        name = names.get(suffix, {}).get(preset, preset + suffix)
        return "".join(_cells(by_preset[name].essays, "kl")) if name in by_preset else ""

    head = ["boosted channels", *(shown for _, shown in SCORES)]
    return markdown_table(head, ([shown, *(cell(preset, suffix) for suffix, _ in SCORES)] for preset, shown in CHOICES))


POSITIONS = ("kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink", "kivi-2")


def positions_table(rows: list[PresetRow]) -> str:
    by_preset = {row.preset: row.transcript for row in rows if row.transcript is not None}
    names = [name for name in POSITIONS if name in by_preset]
    if not names:
        return "(no record)\n"
    edges = [f"{bucket['from']:.0f} to {bucket['to']:.0f}" for bucket in by_preset[names[0]]["by_position"]]
    body = ([f"`{name}`", *(_number(b["kl"], None) for b in by_preset[name]["by_position"])] for name in names)
    return markdown_table(["tokens", *edges], body)


TABLES: dict[str, Callable[[list[PresetRow]], str]] = {
    "presets": presets_table,
    "kitty": kitty_table,
    "boost": boost_table,
    "positions": positions_table,
    "own": own_table,
    "ratios": ratios_table,
    "baselines": baselines_table,
    "front": lambda rows: front_page.front_table(),
    "models": lambda rows: front_page.models_table(),
    "tasks": lambda rows: tasks_table.tasks_table(),
    "ruler": lambda rows: tasks_table.ruler_table(),
    "parallel": lambda rows: parallel.page_table(),
    "peers": lambda rows: peers_table.peers_table(),
    "peer-texts": lambda rows: peers_table.texts_table(),
    "own-rows": lambda rows: bench_batch.rows_table(),
    "protocols": lambda rows: page_tables.paper_table(),
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
        if (name := match[2]) not in TABLES:
            raise ValueError(f"table {name!r} is not known; allowed: {', '.join(TABLES)}")
        return match[1] + TABLES[name](rows) + match[4]

    return _BLOCK.sub(block, page)


def points(rows: list[PresetRow]) -> list[dict[str, Any]]:
    """Points of the picture: presets with a record of the transcript. Presets that store the same are shown once.
    Kitty's ablations other than by variance are left out, because they have their own table."""
    shown: dict[tuple[float, float], dict[str, Any]] = {}
    listed = {
        name: place for place, name in enumerate(lb.preset_names())
    }  # if several presets store the same, the first listed one is shown
    for row in sorted(rows, key=lambda row: listed.get(row.preset, len(listed))):
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
        (front_page.PICTURE, front_page.digest(), lambda rows, path: front_page.draw(path)),
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
