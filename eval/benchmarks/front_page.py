"""README's table and picture of one model: size of the cache, loss, tasks, speed. Also the table of that model in
docs/results.md."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from hf_lowbit_kv.eval.benchmarks.model_accuracy import PEERS
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS, results_path
from hf_lowbit_kv.planning.fits import FULL, GB, fits
from hf_lowbit_kv.presets import DEFAULT_PRESET

#: the measured model: name in the table and in the picture, name in the records (`model_accuracy.py`), and the
#: configuration that determines the size of its cache
SHORT_NAME = "Qwen2.5-Coder-1.5B"
MEASURED = f"{SHORT_NAME}-Instruct, Q4_K_M weights"
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
#: tokens of the cache: the model's whole context
CONTEXT = 32768
#: presets that may be shown, without and with calibration. A preset is left out if another of its group has a smaller
#: cache and a smaller KL
PLAIN = ("int8", "int6", "kivi-4-sink", "k4v2-sink", "kitty-pro", "kitty", "kivi-2-hadamard-sink")
CALIBRATED = ("eigen-4", "eigen-3", "eigen-2")
#: shape of the decode steps whose speed is shown
SHAPE = "gqa_b8_32k"
MODELS = results_path("accuracy", "models")
TASKS = results_path("tasks", "models")
#: number of items of HumanEval; records of fewer do not count
HUMANEVAL = 164
PICTURE = "docs/front.png"


class Point(NamedTuple):
    preset: str
    bits: float
    cache_gb: float
    """size of a preallocated cache for `CONTEXT` tokens of the measured model"""
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
    config = AutoConfig.for_model(**CONFIG, dtype="bfloat16")
    return {fit.preset: fit.cache / GB for fit in fits(config, CONTEXT, "24GB", presets=names)}


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
    by_preset: dict[str, dict[str, Any]] = {}
    for record in current_records(path):
        if (record["model"], record["context"]) == (MEASURED, context):
            by_preset.setdefault(record["preset"], {})[record["text"]] = record
    return by_preset


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


#: contexts, and the texts that were read at each of them
LONG_TEXTS = (
    (4096, ("prose", "transcript", "code")),
    (16384, ("prose", "transcript", "code")),
    (32768, ("prose",)),
)


def models_table() -> str:
    """Every measured preset on the real model, most bits first."""
    by_context = {context: accuracy(context) for context in (4096, 16384, 32768)}
    short = {name: records for name, records in by_context[4096].items() if name not in PEERS}
    rows = []
    for name, records in sorted(short.items(), key=lambda item: -mean(item[1], "bits_per_value")):
        row = [
            f"`{name}`",
            f"{mean(records, 'bits_per_value'):.2f}",
            f"{mean(records, 'kl'):.4f}",
            f"{max(record['kl_p999'] for record in records.values()):.2f}",
            f"{100 * mean(records, 'top1'):.1f} %",
        ]
        for context, texts in LONG_TEXTS:
            measured = by_context[context].get(name, {})
            complete = all(text in measured for text in texts)
            row.append(f"{mean({text: measured[text] for text in texts}, 'kl'):.4f}" if complete else "")
        rows.append(row)
    longer = (f"KL, {context // 1024}k ({', '.join(texts)})" for context, texts in LONG_TEXTS)
    head = ("preset", "bits", "KL", "99.9th", "same next token", *longer)
    return markdown_table(head, rows)


def humaneval(path: Path = TASKS) -> dict[str, int]:
    """For each preset, how many of `HUMANEVAL` items its newest record solved."""
    return {
        record["preset"]: round(record["score"] * record["items"])
        for record in current_records(path)
        if (record["task"], record["items"]) == ("humaneval", HUMANEVAL) and record["model"].startswith(SHORT_NAME)
    }


def front_table(tasks: Path = TASKS) -> str:
    """README's table: presets without calibration, then those with one. HumanEval has a column if the default
    preset has a record."""
    solved = humaneval(tasks)
    columns = [
        "preset",
        "calibrated",
        f"cache of {CONTEXT:,} tokens, GB",
        "KL from 16 bits",
        f"HumanEval, of {HUMANEVAL}",
        "attention, times faster",
    ]
    body = [
        ["16 bits", "", f"{_cache_gb()[FULL]:.3f}", f"{mean(accuracy(4096)['dense'], 'kl'):.4f}", "dense", "1.0"],
        *(
            [
                f"**`{point.preset}`**" if point.preset == DEFAULT_PRESET else f"`{point.preset}`",
                calibrated,
                f"{point.cache_gb:.3f}",
                f"{point.kl:.4f}",
                point.preset,
                "" if point.speed is None else f"{point.speed:.1f}",
            ]
            for group, calibrated in ((PLAIN, "no"), (CALIBRATED, "yes"))
            for point in front_points(group)
        ),
    ]
    for row in body:
        row[4] = str(solved.get(row[4], ""))
    if DEFAULT_PRESET not in solved:
        for row in (columns, *body):
            del row[4]
    return markdown_table(columns, body)


def _full_point() -> tuple[float, float]:
    """The 16-bit cache: GB, and the share of equal next tokens. Rounding of bfloat16 keeps it below 1."""
    return _cache_gb()[FULL], mean(accuracy(4096)["dense"], "top1")


def digest() -> str:
    """A hash of the figures in the picture. The picture's metadata contain it."""
    shown = [list(point[:5]) for group in (PLAIN, CALIBRATED) for point in front_points(group)]
    return hashlib.sha256(json.dumps([shown, _full_point()]).encode()).hexdigest()


def draw(path: Path) -> None:
    """Draw the picture: the share of equal next tokens over the GB of the cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for group, colour, label in ((PLAIN, "C0", "no calibration"), (CALIBRATED, "C1", "calibrated once")):
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
    full, same = _full_point()
    axes.plot([full], [100 * same], "s", color="0.3")
    axes.annotate(
        f"16 bits: {full:.2f} GB",
        (full, 100 * same),
        xytext=(0, -15),
        textcoords="offset points",
        ha="center",
        color="0.3",
        fontsize=9,
    )
    axes.set(
        title=SHORT_NAME,
        xlabel=f"KV cache of {CONTEXT:,} tokens (GB)",
        ylabel="same next token as in 16 bits (%)",
    )
    axes.margins(y=0.12)
    axes.set_xlim(0, full * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120, metadata={"Description": digest()})
