"""A picture of `bench_generate`'s records: `python -m hf_lowbit_kv.eval.plot_generate RECORDS.jsonl`.

One group of bars for each batch and length, a bar for each cache, a line across each bar at its limit: weights and stored
bytes, read once. Of repeated measurements the last counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_lowbit_kv.eval.results import run_command


def latest(path: Path) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """The last record of each cache, by (batch, tokens), shortest and smallest first."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        name = f"{record['cache']}, {record['mode']}" + (f" ({record['backend']})" if record["backend"] else "")
        if options := record.get("compile_options"):
            name += f" {options}"
        found.setdefault((record["batch"], record["tokens"]), {})[name] = record
    return dict(sorted(found.items()))


def _count(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else f"{tokens // 1024}k"


def main(
    records: Annotated[Path, typer.Argument(help="JSON lines of bench_generate.")],
    out: Annotated[Path | None, typer.Option(help="Picture [default: beside the records, .png].")] = None,
) -> None:
    """Draw the records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = latest(records)
    names = sorted({name for group in groups.values() for name in group})
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    figure, axes = plt.subplots(figsize=(max(2.2 * len(groups), 5), 4), layout="constrained")
    width = 0.8 / max(len(names), 1)
    for place, group in enumerate(groups.values()):
        for index, (name, record) in enumerate(sorted(group.items(), key=lambda item: item[1]["step_ms"])):
            x = place + (index - (len(group) - 1) / 2) * width
            axes.bar(x, record["step_ms"], 0.92 * width, color=colours[name])
            axes.plot([x - width / 2, x + width / 2], 2 * [record["limit_ms"]], color="black", linewidth=1)
            axes.text(x, record["step_ms"], f"{record['step_ms']:.1f}", ha="center", va="bottom", fontsize=8)
    labels = [f"batch {batch}\n{_count(tokens)} tokens" for batch, tokens in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("a step of generate, ms")
    gpus = {record["gpu"] for group in groups.values() for record in group.values()}
    axes.set_title(f"8B Llama 3.1 shape, {', '.join(sorted(gpus))}; line: weights and cache read once", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(handles, names, fontsize=8, frameon=False)
    figure.savefig(out or records.with_suffix(".png"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run_command(main)
