"""Tables and pictures of the accuracy records: `python -m hf_lowbit_kv.eval.benchmarks.tables` (`make results`), in seconds.

Pages under `docs/` and the README mark where a table goes:

    <!-- results: presets -->
    (replaced)
    <!-- end of results -->

Only records of today's stored bytes count (`measure.definition`), of those the newest. The figures of the two essays come from
`accuracy-smollm2.jsonl`, or, for presets that it does not hold yet, from `perplexity-smollm2.jsonl`, which has no percentiles.
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
from hf_lowbit_kv.eval.benchmarks import bench_batch, measure
from hf_lowbit_kv.eval.benchmarks.result_files import markdown_table, read_records
from hf_lowbit_kv.eval.preset_search import plot
from hf_lowbit_kv.eval.provenance import RESULTS, results_path, run_command

ROOT = RESULTS.parents[1]
PAGES = (
    "docs/results.md",
    "docs/accuracy.md",
    "docs/own-formats.md",
    "README.md",
)
PICTURE = "docs/pareto.png"
#: what `eval.accuracy` writes
EARLIER = results_path("perplexity", "smollm2")
ESSAYS = ("worked.txt", "popular.txt")
TRANSCRIPT, JARGON = "transcript", "jargon"
#: length at which bits are stated, with a 16-bit window and the bundled model's heads
BITS_AT, HEAD_DIM = 32768, 64
TITLE = f"SmolLM2-135M-Instruct, a transcript of 4096 tokens; bits at {BITS_AT} tokens"
#: fields that every record has
FIELDS = ("preset", "text", "definition", "kl", "kl_p99", "top1", "ppl", "ppl_full", "by_position", "context", "start")
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


class Row(NamedTuple):
    """What is known of a preset: its bits, and its newest record of each text; `essays`: means of both."""

    preset: str
    bits: float
    essays: dict[str, Any] | None
    transcript: dict[str, Any] | None
    jargon: dict[str, Any] | None = None


def load(accuracy: Path = measure.OUT, earlier: Path = EARLIER) -> list[Row]:
    """Every preset of which something is known, in the order of bits.

    Raises:
        ValueError: a record lacks a field, because another version wrote it; the message names file, record and field.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    current: dict[str, str] = {}
    same = measure.setting()
    for number, record in enumerate(read_records(accuracy), 1):
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
        for record in read_records(earlier)
        if record["texts"] == list(ESSAYS) and all(record.get(key) == value for key, value in same.items())
    }
    names = dict.fromkeys([*(preset for preset, _ in newest), *before])
    rows = [
        Row(
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
    """Bits per number at `BITS_AT` tokens, everything counted."""
    return lb.get_preset(preset).spec().bits_per_value(BITS_AT, HEAD_DIM)


def _essays(preset: str, newest: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any] | None:
    records = [newest[preset, text] for text in ESSAYS if (preset, text) in newest]
    if len(records) < len(ESSAYS):
        return None
    keys = ("kl", "kl_p99", "top1", "ppl", "ppl_full")
    means = {key: sum(record[key] for record in records) / len(records) for key in keys}
    buckets = zip(*(record["by_position"] for record in records))
    return means | {
        "by_position": [{key: sum(b[key] for b in same) / len(same) for key in same[0]} for same in buckets]
    }


# ---- tables ---------------------------------------------------------------------------------------------------------


def _cells(record: dict[str, Any] | None, *keys: str) -> list[str]:
    """Figures of a record; nothing for what is not known."""
    digits = {"top1": 3, "ppl": 2, "ppl_full": 2, "kl_p99": 2}
    return ["" if record is None or key not in record else _number(record[key], digits.get(key)) for key in keys]


def _number(x: float, digits: int | None) -> str:
    if digits is not None:
        return f"{x:.{digits}f}"
    return f"{x:.4f}" if x >= 0.001 else f"{x:.5f}"


def presets_table(rows: list[Row]) -> str:
    head = "preset", "bits", "essays: KL", "99th", "top-1", "transcript: KL", "99th", "top-1"
    body = (
        [f"`{row.preset}`", f"{row.bits:.2f}", *(x for of in row[2:4] for x in _cells(of, "kl", "kl_p99", "top1"))]
        for row in rows
    )
    return markdown_table(head, body)


#: presets of the short table, one for each purpose
SHORT = ("kv8", "kivi-4-sink", "k4v2-sink", "eigen-3", "kitty-pro", "kitty", "kivi-2-sink", "kivi-2", "eigen-2")


def short_table(rows: list[Row]) -> str:
    found = {row.preset: row for row in rows}
    head = "preset", "bits", "smaller", "KL", "top-1"
    body = (
        [
            f"`{name}`",
            f"{found[name].bits:.2f}",
            f"{16 / found[name].bits:.1f}x",
            *_cells(found[name].essays, "kl", "top1"),
        ]
        for name in SHORT
    )
    return markdown_table(head, body)


#: own presets, and those of about their size
OWN = ("eigen-3", "k4v2-sink", "eigen-2", "kitty-pro-variance", "kitty-pro")


def own_table(rows: list[Row]) -> str:
    found = {row.preset: row for row in rows}
    head = "preset", "bits of a page", "essays: KL", "top-1", "transcript: KL", "top-1", "jargon: KL", "top-1"
    body = (
        [f"`{name}`", f"{lb.get_preset(name).spec().bits_per_value(10**9, HEAD_DIM):.2f}"]
        + [x for of in found[name][2:] for x in _cells(of, "kl", "top1")]
        for name in OWN
        if name in found
    )
    return markdown_table(head, body)


#: the steps of Kitty's table 4, and the points of accuracy that each gained Qwen3-8B there
KITTY_STEPS = (
    ("KIVI, 2 bits", "kivi-2", ""),
    ("+ sinks in 16 bits", "kivi-2-sink", "+8.41"),
    ("+ 12.5 % of the channels in 4 bits", "kitty", "+5.17"),
    ("+ another 12.5 %", "kitty-pro", "+1.21"),
)


def kitty_table(rows: list[Row]) -> str:
    found = {row.preset: row for row in rows}
    head = "step", "preset", "bits", "essays: KL", "top-1", "transcript: KL", "top-1", "Kitty, table 4 (Qwen3-8B)"
    body = (
        [
            step,
            f"`{name}`",
            f"{found[name].bits:.2f}",
            *(x for of in found[name][2:4] for x in _cells(of, "kl", "top1")),
            paper,
        ]
        for step, name, paper in KITTY_STEPS
    )
    return markdown_table(head, body)


CHOICES = (("kivi-2", "none"), ("kitty", "12.5 %"), ("kitty-pro", "25 %"))
SCORES = (("", "magnitude"), ("-variance", "variance"), ("-random", "random"), ("-hadamard", "magnitude, keys rotated"))


def boost_table(rows: list[Row]) -> str:
    """KL on the essays by how many channels are boosted, and how they are chosen."""
    found = {row.preset: row for row in rows}
    names = {"": {"kivi-2": "kivi-2-sink"}, "-hadamard": {"kivi-2": "kivi-2-hadamard-sink"}}

    def cell(preset: str, suffix: str) -> str:
        name = names.get(suffix, {}).get(preset, preset + suffix)
        return "".join(_cells(found[name].essays, "kl")) if name in found else ""

    head = ["boosted channels", *(shown for _, shown in SCORES)]
    return markdown_table(head, ([shown, *(cell(preset, suffix) for suffix, _ in SCORES)] for preset, shown in CHOICES))


POSITIONS = ("kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-sink", "kivi-2")


def positions_table(rows: list[Row]) -> str:
    found = {row.preset: row.transcript for row in rows if row.transcript is not None}
    names = [name for name in POSITIONS if name in found]
    if not names:
        return "(no record)\n"
    edges = [f"{bucket['from']:.0f} to {bucket['to']:.0f}" for bucket in found[names[0]]["by_position"]]
    body = ([f"`{name}`", *(_number(b["kl"], None) for b in found[name]["by_position"])] for name in names)
    return markdown_table(["tokens", *edges], body)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "presets": presets_table,
    "short": short_table,
    "kitty": kitty_table,
    "boost": boost_table,
    "positions": positions_table,
    "own": own_table,
    "own-rows": lambda rows: bench_batch.rows_table(),
}


# ---- pages ----------------------------------------------------------------------------------------------------------


def filled(page: str, rows: list[Row]) -> str:
    """A page's text with its tables as the records have them. Raises `ValueError` for a table that does not exist."""

    def block(match: re.Match[str]) -> str:
        if (name := match[2]) not in TABLES:
            raise ValueError(f"table {name!r} is not known; allowed: {', '.join(TABLES)}")
        return match[1] + TABLES[name](rows) + match[4]

    return _BLOCK.sub(block, page)


def points(rows: list[Row]) -> list[dict[str, Any]]:
    """What the picture shows: presets with a record of the transcript, but for ablations of Kitty other than by variance, which
    a table of their own has; presets that store the same once."""
    shown: dict[tuple[float, float], dict[str, Any]] = {}
    listed = {
        name: place for place, name in enumerate(lb.preset_names())
    }  # of presets that store the same, the first listed
    for row in sorted(rows, key=lambda row: listed.get(row.preset, len(listed))):
        ablation = row.preset.startswith("kitty") and row.preset.endswith(("-random", "-range", "-hadamard-variance"))
        if row.transcript is not None and row.bits < 16 and not ablation:
            kl = row.transcript["kl"]
            shown.setdefault((row.bits, kl), {"preset": row.preset, "bits_per_value": row.bits, "kl": kl})
    return list(shown.values())


def digest(rows: list[Row]) -> str:
    """Of what the picture shows; the picture carries it."""
    return hashlib.sha256(json.dumps(points(rows)).encode()).hexdigest()


def draw(rows: list[Row], path: Path) -> None:
    """The Pareto picture."""
    plot(points(rows), path, TITLE, metadata={"Description": digest(rows)})


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where a page is not current.")
    ] = False,
) -> None:
    """Write the tables of the accuracy records into the pages, and draw the picture."""
    rows, stale = load(), list[str]()
    for name in PAGES:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        if (current := filled(page, rows)) != page:
            stale.append(name)
            if not check:
                path.write_text(current, encoding="utf-8")
    picture = ROOT / PICTURE
    if not picture.is_file() or digest(rows).encode() not in picture.read_bytes():
        stale.append(PICTURE)
        if not check:
            draw(rows, picture)
    print(f"{'not current' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
