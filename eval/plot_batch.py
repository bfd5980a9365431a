"""A picture of `bench_batch`'s records: `python -m hf_lowbit_kv.eval.plot_batch RECORDS.jsonl`.

Throughput by cache, with the rows that fit, and what a step at the end is made of. Of repeated measurements the last counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_lowbit_kv.eval.results import run_command


def main(
    records: Annotated[Path, typer.Argument(help="JSON lines of bench_batch.")],
    out: Annotated[Path | None, typer.Option(help="Picture [default: beside the records, .png].")] = None,
) -> None:
    """Draw the records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {}
    for line in records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[f"{record['cache']}\n{record['mode']}, {record['rows']} rows"] = record
    names, rows = list(found), list(found.values())
    figure, (left, right) = plt.subplots(1, 2, figsize=(max(3.4 * len(names), 6), 4), layout="constrained")
    bars = left.bar(names, [r["throughput"] for r in rows], width=0.6)
    left.bar_label(bars, fmt="%.0f", fontsize=8)
    left.set_ylabel("tokens a second")
    kinds = list(dict.fromkeys(kind for r in rows for kind in r["attribution_ms"]))
    bottom = [0.0] * len(rows)
    for kind in kinds:
        heights = [r["attribution_ms"].get(kind, 0.0) for r in rows]
        right.bar(names, heights, width=0.6, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    right.set_ylabel("a step at the end, ms")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(y=0.08)
    last = rows[-1]
    figure.suptitle(
        f"{last['model']}, {last['gpu']}, {last['budget'] / 1e9:.0f} GB, {last['new_tokens']} tokens written",
        fontsize=9,
    )
    figure.savefig(out or records.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    run_command(main)
