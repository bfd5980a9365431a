"""README's table and picture: cache sizes of one known model, and how often the next token of a measured model is the
same as in 16 bits. Also the table of that model in docs/results.md."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS, results_path
from hf_lowbit_kv.planning.fits import FULL, GB, fits
from hf_lowbit_kv.presets import DEFAULT_PRESET

#: the example at the top of README
MODEL, CONTEXT, MEMORY = "Qwen/Qwen3-8B", 65536, "24GB"
#: presets that may be shown, without and with calibration. A preset is left out if another of its group has a smaller
#: cache and more equal tokens
PLAIN = ("int8", "int6", "kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-hadamard-sink")
CALIBRATED = ("eigen-4", "eigen-3", "eigen-2")
SHAPE = "gqa_b8_32k"
#: the measured model of README, and its records (`model_accuracy.py`)
MEASURED = "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M weights"
MODELS = results_path("accuracy", "models")
PICTURE = "docs/front.png"


class Point(NamedTuple):
    preset: str
    bits: float
    cache_gb: float
    """size of a preallocated cache for `CONTEXT` tokens of `MODEL`"""
    top1: float
    """share of positions at which the most likely token of `MEASURED` is the same, mean of four texts of 4096 tokens"""
    kl: float
    """mean KL of the next-token distributions from full precision on the same texts, nats"""
    speed: float | None
    """how many times faster than 16-bit attention a decode step is, storing included"""


@functools.cache
def _cache_gb() -> Mapping[str, float]:
    from hf_lowbit_kv.presets import preset_names

    names = [name for name in (*PLAIN, *CALIBRATED) if name in preset_names()]
    return {fit.preset: fit.cache / GB for fit in fits(MODEL, CONTEXT, MEMORY, presets=names)}


def _speeds(path: Path) -> dict[str, float]:
    """For each preset, how many times faster than 16-bit attention its newest measured decode step is. The step
    includes storing, and follows another kernel, as in a model."""
    speeds = {}
    for record in current_records(path):
        if (
            record.get("shape") != SHAPE
            or record.get("backend", "cuda") != "cuda"
            or record.get("head_dim", 128) != 128
        ):
            continue
        if record.get("query_length", 1) == 1 and "step_behind_ms" in record and "behind_peer_ms" in record:
            speeds[record["preset"]] = record["behind_peer_ms"] / record["step_behind_ms"]
        elif record.get("query_length", 1) == 1 and "step_ms" in record:  # older records
            speeds[record["preset"]] = record["peer_ms"] / record["step_ms"]
    return speeds


def accuracy(context: int, path: Path = MODELS) -> dict[str, dict[str, Any]]:
    """For each preset and peer, its newest records of `MEASURED` at this length: by text."""
    found: dict[str, dict[str, Any]] = {}
    for record in current_records(path):
        if (record["model"], record["context"]) == (MEASURED, context):
            found.setdefault(record["preset"], {})[record["text"]] = record
    return found


def mean(records: Mapping[str, Any], key: str) -> float:
    """The mean over texts."""
    return sum(record[key] for record in records.values()) / len(records)


def front_points(group: Sequence[str]) -> list[Point]:
    """Measured presets of a group that no other preset of the group beats, most bits first."""
    measured, speeds = accuracy(4096), _speeds(RESULTS / "decode-nvidia-h200.jsonl")
    points = [
        Point(
            name,
            mean(measured[name], "bits_per_value"),
            _cache_gb()[name],
            mean(measured[name], "top1"),
            mean(measured[name], "kl"),
            speeds.get(name, speeds.get(name.removesuffix("-sink"))),  # the sink is 32 tokens of 32768
        )
        for name in group
        if name in measured and name in _cache_gb()
    ]
    return sorted(
        (
            point
            for point in points
            if not any(
                other is not point and other.cache_gb <= point.cache_gb and other.kl <= point.kl for other in points
            )
        ),
        key=lambda point: -point.bits,
    )


def models_table() -> str:
    """Every measured preset on the real model, most bits first."""
    short, long = accuracy(4096), accuracy(16384)
    rows = []
    for name, records in sorted(short.items(), key=lambda item: -mean(item[1], "bits_per_value")):
        code = {text: record for text, record in long.get(name, {}).items() if text == "code"}
        rows.append(
            [
                f"`{name}`",
                f"{mean(records, 'bits_per_value'):.2f}",
                f"{mean(records, 'kl'):.4f}",
                f"{max(record['kl_p999'] for record in records.values()):.2f}",
                f"{100 * mean(records, 'top1'):.1f} %",
                f"{records['code']['kl']:.4f}",
                f"{mean(code, 'kl'):.4f}" if code else "",
            ]
        )
    head = ("preset", "bits", "KL", "99.9th", "same next token", "KL, code", "KL, code, 16k")
    return markdown_table(head, rows)


def front_table() -> str:
    """README's table: presets without calibration, then those with one."""
    head = (
        "preset",
        "calibrated",
        f"cache of {CONTEXT // 1024}k tokens, {MODEL.split('/')[1]}, GB",
        "KL from 16 bits, Qwen2.5-Coder-1.5B",
        "same next token",
        "attention, times faster, 8B shape",
    )
    full = ["16 bits", "", f"{_cache_gb()[FULL]:.1f}", f"{mean(accuracy(4096)['dense'], 'kl'):.4f}", "", "1.0"]
    body = [
        [
            f"**`{point.preset}`**" if point.preset == DEFAULT_PRESET else f"`{point.preset}`",
            calibrated,
            f"{point.cache_gb:.1f}",
            f"{point.kl:.4f}",
            f"{100 * point.top1:.1f} %",
            "" if point.speed is None else f"{point.speed:.1f}",
        ]
        for group, calibrated in ((PLAIN, "no"), (CALIBRATED, "yes"))
        for point in front_points(group)
    ]
    return markdown_table(head, [full, *body])


def digest() -> str:
    """A hash of the figures in the picture. The picture's metadata contain it."""
    shown = [list(point[:5]) for group in (PLAIN, CALIBRATED) for point in front_points(group)]
    return hashlib.sha256(json.dumps([shown, _cache_gb()[FULL]]).encode()).hexdigest()


def draw(path: Path) -> None:
    """Draw the picture: the share of equal next tokens over the GB of the cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for group, colour, label in ((PLAIN, "C0", "no calibration"), (CALIBRATED, "C1", "calibrated")):
        points = front_points(group)
        axes.plot(
            [point.cache_gb for point in points],
            [100 * point.top1 for point in points],
            "o-",
            color=colour,
            label=label,
        )
        for point in points:
            default = point.preset == DEFAULT_PRESET
            left = group is CALIBRATED
            axes.annotate(
                f"{point.preset} (default)" if default else point.preset,
                (point.cache_gb, 100 * point.top1),
                xytext=(-7, 3) if left else (7, -10),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=9,
                weight="bold" if default else "normal",
                color=colour,
            )
    axes.margins(y=0.12)
    full = _cache_gb()[FULL]
    axes.axvline(full, color="0.4", linestyle="--")
    axes.annotate(
        f"16 bits: {full:.1f} GB",
        (full, axes.get_ylim()[0]),
        xytext=(-6, 8),
        textcoords="offset points",
        ha="right",
        color="0.3",
        fontsize=9,
    )
    axes.set(
        xlabel=f"GB of cache, {MODEL.split('/')[1]} with {CONTEXT // 1024}k tokens",
        ylabel="same next token, %, Qwen2.5-Coder-1.5B",
    )
    axes.set_xlim(0, full * 1.06)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(0.9, 0.12))
    figure.savefig(path, dpi=120, metadata={"Description": digest()})
