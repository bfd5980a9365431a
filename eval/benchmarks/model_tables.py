"""Tables and the picture of real models: README's table of size, loss, RULER and speed, the tables of docs/results.md, and
those of docs/transformers-quantized-cache.md, with transformers' own quantized caches beside presets."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from hf_lowbit_kv.eval.benchmarks.model_accuracy import FULL_CACHE, OUT, PEERS, TEXTS_OUT
from hf_lowbit_kv.eval.benchmarks.model_tasks import OUT as TASKS
from hf_lowbit_kv.eval.benchmarks.model_tasks import RULER_ITEMS
from hf_lowbit_kv.eval.benchmarks.result_files import Record, current_records, listed, markdown_table, newest
from hf_lowbit_kv.eval.benchmarks.ruler_tasks import TASKS as RULER
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.planning.cache_memory import FullMemory, PresetMemory, chunk_bytes
from hf_lowbit_kv.planning.fits import CUDA_BYTES, FULL, GB, fits
from hf_lowbit_kv.planning.model_shapes import shape_of, weight_bytes
from hf_lowbit_kv.presets import DEFAULT_PRESET, get_preset, preset_names

#: the measured model: name in the table and in the picture, name in the records (`model_accuracy.py`), and the
#: configuration that determines the size of its cache
SHORT_NAME = "Qwen2.5-Coder-1.5B"
MEASURED = f"{SHORT_NAME}-Instruct, Q4_K_M weights"
#: name in the records of the small model of the same family
SMALL = MEASURED.replace("1.5B", "0.5B")
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
#: number of items of HumanEval; records of fewer do not count
HUMANEVAL = 164
PICTURE = "docs/front.png"


class Point(NamedTuple):
    preset: str
    bits: float
    cache_gb: float
    """size of a preallocated cache for `CONTEXT` tokens of the measured model"""
    kl: float
    """mean KL of the next-token distributions of `MEASURED` from full precision, four texts of 4096 tokens, nats"""
    speed: float | None
    """how many times faster than 16-bit attention a decode step is, storing included"""


@functools.cache
def _cache_gb() -> Mapping[str, float]:
    names = [name for name in (*PLAIN, *CALIBRATED) if name in preset_names()]
    config = AutoConfig.for_model(**CONFIG, dtype="bfloat16")
    return {fit.preset: fit.cache / GB for fit in fits(config, CONTEXT, "24GB", presets=names)}


def _speeds(path: Path) -> dict[str, float]:
    """For each preset, how many times faster than 16-bit attention its newest measured decode step is. The step
    includes storing, and follows another kernel, as in a model."""
    speeds = {}
    for record in current_records(path):
        same = (record.get("shape"), record.get("backend", "cuda")) == (SHAPE, "cuda")
        if not same or (record.get("head_dim", 128), record.get("query_length", 1)) != (128, 1):
            continue
        if "step_behind_ms" in record and "behind_peer_ms" in record:
            speeds[record["preset"]] = record["behind_peer_ms"] / record["step_behind_ms"]
        elif "step_ms" in record:  # older records
            speeds[record["preset"]] = record["peer_ms"] / record["step_ms"]
    return speeds


def by_text(path: Path = OUT) -> dict[tuple[str, int], dict[str, dict[str, Record]]]:
    """Newest accuracy records: of a model and context, of a preset or peer, of a text."""
    found: dict[tuple[str, int], dict[str, dict[str, Record]]] = {}
    for record in current_records(path):
        caches = found.setdefault((record["model"], record["context"]), {})
        caches.setdefault(record["preset"], {})[record["text"]] = record
    return found


def accuracy(context: int, path: Path = OUT) -> dict[str, dict[str, Record]]:
    """The records of `MEASURED` at this length, by preset or peer, and by text."""
    return by_text(path).get((MEASURED, context), {})


def mean(records: Mapping[str, Any], key: str) -> float:
    """The mean over texts."""
    # rounded correctly: since Python 3.12 `sum` has other last digits, which `digest` would contain
    return statistics.fmean(record[key] for record in records.values())


def front_points(group: Sequence[str]) -> list[Point]:
    """Measured presets of a group that no other preset of the group beats, most bits first."""
    measured, speeds = accuracy(4096), _speeds(RESULTS / "decode-nvidia-h100-80gb-hbm3.jsonl")
    points = [
        Point(
            name,
            mean(measured[name], "bits_per_value"),
            _cache_gb()[name],
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


NONE = "(no record)\n"
#: figures of the means over texts
LOSS = {
    "KL": lambda texts: f"{mean(texts, 'kl'):.4f}",
    "99.9th": lambda texts: f"{max(record['kl_p999'] for record in texts.values()):.2f}",
    "same next token": lambda texts: f"{100 * mean(texts, 'top1'):.1f} %",
}
#: contexts beside the shortest
LONG = (16384, 32768)


def models_table(model: str = MEASURED, path: Path = OUT) -> str:
    """Every measured preset on a real model, most bits first. A longer context has a column if presets were measured
    there: the mean of the texts that all of them have read."""
    found = by_text(path)
    short = {name: records for name, records in found.get((model, 4096), {}).items() if name not in PEERS}
    columns, whole = {}, set().union(*short.values())
    for context in LONG:
        measured = found.get((model, context), {})
        if texts := set.intersection(*map(set, measured.values())) if measured else None:
            fewer = "" if texts >= whole else f", {len(texts)} of {len(whole)} texts"
            columns[f"KL, {context // 1024}k{fewer}"] = {
                name: mean({text: records[text] for text in texts}, "kl") for name, records in measured.items()
            }
    rows = []
    for name, records in sorted(short.items(), key=lambda item: -mean(item[1], "bits_per_value")):
        longer = (f"{column[name]:.4f}" if name in column else "" for column in columns.values())
        bits = f"{mean(records, 'bits_per_value'):.2f}"
        rows.append([f"`{name}`", bits, *(figure(records) for figure in LOSS.values()), *longer])
    return markdown_table(("preset", "bits", *LOSS, *columns), rows) if rows else NONE


def humaneval(path: Path = TASKS) -> dict[str, int]:
    """For each preset, how many of `HUMANEVAL` items its newest record solved."""
    return {
        record["preset"]: round(record["score"] * record["items"])
        for record in current_records(path)
        if (record["task"], record["items"]) == ("humaneval", HUMANEVAL) and record["model"].startswith(SHORT_NAME)
    }


#: tokens of the prompts of README's column of RULER
RULER_CONTEXT = 16384


class RulerLoss(NamedTuple):
    """Points lost against 16 bits, mean of all tasks of RULER, and the standard error of the paired difference."""

    points: float
    error: float

    def __str__(self) -> str:
        return f"{self.points:z.1f} ± {self.error:.1f}"


def ruler_losses(context: int, path: Path = TASKS) -> dict[str, RulerLoss]:
    """The loss of each preset with all tasks at this length; empty if 16 bits are not measured."""
    keys = ruler_keys(context)
    measured = {name: records for name, records in newest_tasks(path).items() if records.keys() >= set(keys)}
    if (full := measured.pop("dense", None)) is None:
        return {}
    return {
        name: RulerLoss(_points(full, keys) - _points(records, keys), paired_error(records, full, keys))
        for name, records in measured.items()
    }


def ruler_score(context: int, path: Path = TASKS) -> float:
    """RULER's score of the 16-bit cache at this length, in percent."""
    return _points(newest_tasks(path)["dense"], ruler_keys(context))


def front_table(tasks: Path = TASKS) -> str:
    """README's table: presets without calibration, then those with one. RULER's cell is empty without a record."""
    lost = ruler_losses(RULER_CONTEXT, tasks)
    full = Point(FULL, 16, _cache_gb()[FULL], mean(accuracy(4096)["dense"], "kl"), 1.0)
    rows = [(full, "")]
    rows += [(point, "no") for point in front_points(PLAIN)] + [(point, "yes") for point in front_points(CALIBRATED)]

    def name(point: Point) -> str:
        shown = "16 bits" if point is full else f"`{point.preset}`"
        return f"**{shown}**" if point.preset == DEFAULT_PRESET else shown

    columns: dict[str, Any] = {
        "preset": lambda row: name(row[0]),
        "calibrated": lambda row: row[1],
        f"cache of {CONTEXT:,} tokens, GB": lambda row: f"{row[0].cache_gb:.3f}",
        "KL from 16 bits": lambda row: f"{row[0].kl:.4f}",
        f"RULER at {RULER_CONTEXT // 1024}k, points lost of {ruler_score(RULER_CONTEXT):.0f}": lambda row: (
            "0" if row[0] is full else str(lost.get(row[0].preset, ""))
        ),
        "attention, times faster (H100)": lambda row: "" if row[0].speed is None else f"{row[0].speed:.1f}",
    }
    return listed(rows, columns)


#: items of variable tracking, in which calibrations differ most
VT_ITEMS = 100
#: calibrated presets, and those of about their size that need no calibration
WORTH = ("kivi-4-sink", "eigen-4", "k4v2-sink", "eigen-3", "kivi-2-hadamard-sink", "eigen-2")


def worth_table() -> str:
    """What a calibration gains: sizes with the matrices of the calibration, and losses, at two lengths."""
    contexts, lost = (4096, CONTEXT), {context: ruler_losses(context) for context in (RULER_CONTEXT, CONTEXT)}
    columns: dict[str, Any] = {"preset": lambda name: f"`{name}`"}
    for head, key, digits in (("bits per value", "bits_per_value", 2), ("KL", "kl", 4)):
        for n in contexts:
            columns[f"{head}, {n // 1024}k"] = lambda name, n=n, key=key, digits=digits: (
                f"{mean(accuracy(n)[name], key):.{digits}f}"
            )
    for n in lost:
        columns[f"RULER, {n // 1024}k: points lost"] = lambda name, n=n: str(lost[n].get(name, ""))
    return listed(WORTH, columns)


def draws_table(path: Path = TASKS) -> str:
    """Points lost against 16 bits: the mean over calibrations that differ in their seed, with the standard error of the paired
    difference of items, and each of them in brackets. VT counts with `VT_ITEMS` at `CONTEXT`."""
    files = {record["calibration"] for record in current_records(path) if "calibration" in record}
    draws = [newest_tasks(path, file) for file in (None, *sorted(files))]
    full = draws[0].get("dense", {})
    vt = Key("vt", CONTEXT, VT_ITEMS)
    columns = {
        f"RULER, {RULER_CONTEXT // 1024}k": ruler_keys(RULER_CONTEXT),
        f"RULER, {CONTEXT // 1024}k": [vt if key.task == "vt" else key for key in ruler_keys(CONTEXT)],
        f"VT, {CONTEXT // 1024}k": [vt],
    }

    def cell(name: str, keys: list[Key]) -> str:
        measured = [draw[name] for draw in draws if draw.get(name, {}).keys() >= set(keys)]
        if not measured or not full.keys() >= set(keys):
            return ""
        mean = {key: _mean_record([records[key] for records in measured]) for key in keys}
        loss = RulerLoss(_points(full, keys) - _points(mean, keys), paired_error(mean, full, keys))
        each = ", ".join(f"{_points(full, keys) - _points(records, keys):z.1f}" for records in measured)
        return f"{loss} ({each})" if name in CALIBRATED else str(loss)

    rows = [[f"`{name}`", *(cell(name, keys) for keys in columns.values())] for name in (DEFAULT_PRESET, *CALIBRATED)]
    return markdown_table(["preset", *columns], rows) if full else NONE


def _mean_record(records: Sequence[Record]) -> Record:
    scores = [item_scores(record) for record in records]
    items = {
        name: statistics.fmean(each.get(name, 1.0) for each in scores)
        for name in {name for each in scores for name in each}
    }
    return {"score": statistics.fmean(record["score"] for record in records), "scores": items}


#: the picture's left half: a model, a GPU's memory, lengths and caches
GPU_MODEL, GPU_MEMORY, LENGTHS = "meta-llama/Llama-3.1-8B", 24 * GB, tuple(range(0, 131073, 16384))
DRAWN = (FULL, DEFAULT_PRESET, "eigen-2")


@functools.cache
def _gpu_bytes() -> dict[str, list[int]]:
    """For each drawn cache, the bytes of weights, cache, prefill and CUDA at each of `LENGTHS`, as `fits` computes them."""
    shape = shape_of(GPU_MODEL)
    rest = weight_bytes(shape, "bfloat16") + CUDA_BYTES
    caches = {name: FullMemory(shape) if name == FULL else PresetMemory(shape, name) for name in DRAWN}
    return {
        name: [rest + chunk_bytes(shape, packed=name != FULL) + (n and cache.nbytes(n)) for n in LENGTHS]
        for name, cache in caches.items()
    }


def _loss_points(group: Sequence[str]) -> list[tuple[str, float, RulerLoss]]:
    """The picture's right half: name, GB of the cache, and loss of each preset in README's table."""
    lost = ruler_losses(RULER_CONTEXT)
    return [(p.preset, p.cache_gb, lost[p.preset]) for p in front_points(group) if p.preset in lost]


def digest() -> str:
    """A hash of the figures in the picture. The picture's metadata contain it."""
    shown = [_gpu_bytes(), [_loss_points(group) for group in (PLAIN, CALIBRATED)], _cache_gb()[FULL]]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(path: Path) -> None:
    """Draw the picture: GB of a GPU over tokens, and points lost on RULER over GB of the cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 3.8), layout="constrained")
    memory, loss = figure.subplots(1, 2)
    colours = dict(zip(DRAWN, ("0.3", "C0", "C1"), strict=True))
    for name, sizes in _gpu_bytes().items():
        memory.plot([n / 1024 for n in LENGTHS], [size / GB for size in sizes], color=colours[name])
        shown = "16 bits" if name == FULL else name
        memory.annotate(
            f"{shown}\n{sizes[-1] / GB:.1f} GB",
            (LENGTHS[-1] / 1024, sizes[-1] / GB),
            xytext=(4, 2 if name == DEFAULT_PRESET else -4 if name == FULL else -11),
            textcoords="offset points",
            va="center",
            color=colours[name],
            fontsize=9,
            weight="bold" if name == DEFAULT_PRESET else "normal",
        )
    memory.axhline(GPU_MEMORY / GB, color="C3", linestyle="--", linewidth=1)
    memory.annotate(f"a {GPU_MEMORY // GB} GB GPU", (0, GPU_MEMORY / GB), xytext=(3, 3), textcoords="offset points",
                    color="C3", fontsize=9)  # fmt: skip
    memory.set(title=f"{GPU_MODEL.partition('/')[2]}, computed with fits", xlabel="tokens in the cache",
               ylabel="GPU memory, weights included (GB)", xlim=(0, LENGTHS[-1] / 1024), ylim=(0, 38))  # fmt: skip
    memory.set_xticks(range(0, 129, 32), [f"{n}k" for n in range(0, 129, 32)])

    for group, colour, label in ((PLAIN, "C0", "no calibration"), (CALIBRATED, "C1", "calibrated once")):
        points = _loss_points(group)
        loss.errorbar([gb for _, gb, _ in points], [lost.points for *_, lost in points],
                      [lost.error for *_, lost in points], fmt="o-", color=colour, label=label, capsize=2)  # fmt: skip
        for name, gb, lost in points:
            side, down = {"eigen-4": ("center", -26), "eigen-3": ("right", -12), "eigen-2": ("right", -12)}.get(
                name, ("left", 3)
            )
            loss.annotate(
                name,
                (gb, lost.points),
                xytext=({"left": 6, "center": 0, "right": -6}[side], down),
                textcoords="offset points",
                ha=side,
                fontsize=8,
                color=colour,
                weight="bold" if name == DEFAULT_PRESET else "normal",
            )
    full = _cache_gb()[FULL]
    loss.plot([full], [0], "s", color="0.3")
    loss.annotate("16 bits", (full, 0), xytext=(0, 7), textcoords="offset points", ha="center", color="0.3", fontsize=8)
    loss.set(title=f"{SHORT_NAME}, measured: lower is better", xlabel=f"KV cache of {CONTEXT // 1024}k tokens (GB)",
             ylabel=f"points lost on RULER, {RULER_CONTEXT // 1024}k", xlim=(0, full * 1.06))  # fmt: skip
    loss.legend(frameon=False, loc="upper right")
    for axes in (memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120, metadata={"Description": digest()})


# ---- tasks ------------------------------------------------------------------------------------------------------------

#: tasks with worked examples, and the number of their items; records of fewer do not count
WORKED = {"humaneval": ("HumanEval", HUMANEVAL), "gsm8k": ("GSM8K", 100)}
#: columns of RULER's tasks: beginnings of names
KINDS = {
    "NIAH single": "niah_single",
    "NIAH multikey": "niah_multikey",
    "NIAH multivalue": "niah_multivalue",
    "NIAH multiquery": "niah_multiquery",
    "VT": "vt",
    "CWE": "cwe",
    "FWE": "fwe",
    "QA": "qa",
}
Records = dict["Key", Record]


class Key(NamedTuple):
    """What records are compared by: they have answered the same items."""

    task: str
    context: int | None
    """of RULER's tasks"""
    items: int


def ruler_keys(context: int) -> list[Key]:
    """All of RULER's tasks at this length."""
    return [Key(task, context, RULER_ITEMS) for task in RULER]


def newest_tasks(path: Path = TASKS, calibration: str | None = None) -> dict[str, Records]:
    """For each preset, most bits first, its newest records with all items or more.

    Args:
        calibration: the file that records name, another draw of the same kind; `None`: the model's own.
    """
    found: dict[str, Records] = {}
    for record in current_records(path):
        key = Key(record["task"], record.get("context"), record["items"])
        least = WORKED[key.task][1] if key.task in WORKED else RULER_ITEMS
        same = record.get("calibration") == calibration
        if same and record["model"].startswith(SHORT_NAME) and key.items >= least:
            found.setdefault(record["preset"], {})[key] = record
    return dict(sorted(found.items(), key=lambda item: -get_preset(item[0]).spec().bits_per_value(4096, 128)))


def contexts(presets: Collection[Records]) -> list[int]:
    """Contexts at which a preset has all of RULER's tasks."""
    lengths = {key.context for records in presets for key in records if key.context is not None}
    return sorted(n for n in lengths if any(records.keys() >= set(ruler_keys(n)) for records in presets))


def tasks_table(path: Path = TASKS) -> str:
    """Scores of each preset in percent, and the share of the tokens attended to that is packed: solved items of HumanEval
    and GSM8K, the mean of RULER's tasks at each context, and single tasks of RULER with more items."""
    presets = newest_tasks(path)
    columns = _columns(presets)
    rows = [[f"`{name}`", *(_cell(records, keys) for keys in columns.values())] for name, records in presets.items()]
    return markdown_table(["preset", *columns], rows) if rows else NONE


def ruler_table(path: Path = TASKS) -> str:
    """Scores of RULER's tasks in percent, by kind: a row for each context and preset."""
    presets = newest_tasks(path)
    rows = [
        [
            f"{length // 1024}k, `{name}`",
            *(
                _cell(records, [key for key in ruler_keys(length) if key.task.startswith(begin)], packed=False)
                for begin in KINDS.values()
            ),
        ]
        for length in contexts(presets.values())
        for name, records in presets.items()
        if records.keys() >= set(ruler_keys(length))
    ]
    return markdown_table(["context, preset", *KINDS], rows) if rows else NONE


def losses_list(path: Path = TASKS) -> str:
    """A line for each column of `tasks_table`: how far the presets are from 16 bits, in points, with the standard error of the
    difference. A preset that is further away than two of them is named apart, with the kinds of tasks that lose most."""
    presets = newest_tasks(path)
    lines = []
    for column, keys in _columns(presets).items():
        scored = {name: _points(records, keys) for name, records in presets.items() if records.keys() >= set(keys)}
        full = scored.pop("dense", None)
        if not scored:
            continue
        if full is None:
            lines.append(f"- **{column}**: 16 bits are not measured, so this column shows no loss.\n")
            continue
        near, far = [], []
        for name, x in scored.items():
            error = paired_error(presets[name], presets["dense"], keys)
            away = f"`{name}` {x - full:+z.1f} ± {error:.1f}"
            if abs(x - full) <= 2 * error:
                near.append(away)
            else:
                far.append(away + _most_lost(presets[name], presets["dense"], keys))
        paragraphs = [f"- **{column}**: 16 bits have {full:.1f}. Within two errors: {', '.join(near) or 'no preset'}."]
        paragraphs += [f"  Further away: {', '.join(far)}."] if far else []
        lines += [
            textwrap.fill(each, 150, subsequent_indent="  ", break_on_hyphens=False) + "\n" for each in paragraphs
        ]
    return "".join(lines) or NONE


def paired_error(records: Records, others: Records, keys: list[Key]) -> float:
    """The standard error of a difference of mean scores, in points. Both presets answered the same items, so the error is
    that of the differences of items (`item_scores`)."""
    variances = []
    for key in keys:
        ours, theirs = item_scores(records[key]), item_scores(others[key])
        differences = [ours.get(name, 1.0) - theirs.get(name, 1.0) for name in {**ours, **theirs}]
        mean = sum(differences) / key.items
        squares = sum((x - mean) ** 2 for x in differences) + (key.items - len(differences)) * mean**2
        variances.append(squares / max(key.items - 1, 1) / key.items)
    return 100 * sum(variances) ** 0.5 / len(keys)


def item_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Scores by item. An item that is missing has the full score: older records only name the others (`failed`). Each of
    these gets the mean of theirs, which is exact where a score is 0 or 1."""
    if "scores" in record:
        return dict(record["scores"])
    failed = record["failed"]
    rest = record["score"] * record["items"] - (record["items"] - len(failed))
    return dict.fromkeys(failed, rest / max(len(failed), 1))


def _points(records: Records, keys: list[Key]) -> float:
    """The mean score in percent."""
    return 100 * sum(records[key]["score"] for key in keys) / len(keys)


def _most_lost(records: Records, full: Records, keys: list[Key]) -> str:
    """In brackets, the two kinds of RULER's tasks that lose most of the mean; empty for other tasks."""
    kinds = {}
    for kind, begin in KINDS.items():
        of_kind = [key for key in keys if key.task.startswith(begin)]
        if of_kind and (after := _points(records, of_kind)) < (before := _points(full, of_kind)):
            kinds[f"{kind} {after:.0f} instead of {before:.0f}"] = (before - after) * len(of_kind)
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:2]
    return f" ({', '.join(most)})" if most else ""


def _columns(presets: Mapping[str, Records]) -> dict[str, list[Key]]:
    """The columns of the tables of tasks, and the records that each is the mean of."""
    columns = {shown: [Key(task, None, items)] for task, (shown, items) in WORKED.items()}
    columns |= {f"RULER, {length // 1024}k": ruler_keys(length) for length in contexts(presets.values())}
    more = {key for records in presets.values() for key in records if key.context and key.items > RULER_ITEMS}
    return columns | {f"{key.task}, {(key.context or 0) // 1024}k, {key.items} items": [key] for key in sorted(more)}


def _cell(records: Records, keys: list[Key], packed: bool = True) -> str:
    """The mean score in percent, with the packed share in brackets; empty if a task has no record."""
    if not records.keys() >= set(keys):
        return ""
    score = _points(records, keys)
    share = 100 * sum(records[key]["packed_share"] for key in keys) / len(keys)
    return f"{score:.1f} ({share:.0f} %)" if packed else f"{score:.0f}"


# ---- transformers' quantized caches -----------------------------------------------------------------------------------

#: presets that are shown beside the peers
SHOWN = ("dense", "int8", "kivi-4-sink", "k4v2-sink")
#: what a peer stores beside its codes: a scale and a shift of 16 bits for 64 numbers
METADATA_BITS = 32 / 64
#: how a table names caches that are no presets
NAMES = {
    "quanto-4": "quanto, 4 bits",
    "quanto-4-channel": "quanto, 4 bits, `axis_key=-1`",
    "quanto-2": "quanto, 2 bits",
    "hqq-4": "HQQ, 4 bits",
    FULL_CACHE: "`DynamicCache`",
}


def peers_table(path: Path = OUT) -> str:
    """KL of both kinds, for each model at its longest measured context: means of the texts that all peers have read."""
    measured = by_text(path)
    rows = []
    for model, context in {model: context for model, context in sorted(measured)
                           if PEERS.keys() & measured[model, context].keys()}.items():  # fmt: skip
        caches = measured[model, context]
        texts = set.intersection(*(set(caches[name]) for name in caches if name in PEERS))
        shown = f"{model.partition(',')[0]}, {len(texts)} text{'s' * (len(texts) > 1)} of {context:,} tokens"
        for name in (*SHOWN, *PEERS):
            if name in caches and texts <= set(caches[name]):
                records = {text: caches[name][text] for text in texts}
                bits = PEERS[name][1] + METADATA_BITS if name in PEERS else mean(records, "bits_per_value")
                figures = (figure(records) for figure in LOSS.values())
                rows.append([shown, NAMES.get(name, f"`{name}`"), f"{bits:.2f}", *figures])
                shown = ""
    return markdown_table(("model", "cache", "bits", *LOSS), rows)


#: caches in the table of a model with key biases (docs/choose.md): listed presets, and caches with a range per token of keys
LISTED = (
    "dense",
    "int8",
    "int6",
    "kivi-4-sink",
    "k4v2-sink",
    "kitty-pro",
    "kivi-2-hadamard-sink",
    "eigen-3",
    "eigen-2",
)
PER_TOKEN = ("kv4", "quanto-4", "hqq-4")
#: transformers' cache with a range per channel
PER_CHANNEL = ("quanto-4-channel",)


def biases_table() -> str:
    """Listed presets, and caches that key biases spoil, on a model with key biases."""
    measured, solved = accuracy(4096), humaneval()
    rows = []
    for name in (*LISTED, *PER_CHANNEL, *PER_TOKEN):
        if (records := measured.get(name)) is None:
            continue
        shown = "16 bits" if name == "dense" else f"transformers, {NAMES[name]}" if name in NAMES else f"`{name}`"
        keys = "" if name == "dense" else "per token" if name in PER_TOKEN else "per channel"
        rows.append([shown, keys, LOSS["KL"](records), LOSS["same next token"](records), str(solved.get(name, ""))])
    return markdown_table(
        ("cache", "range of keys", "KL from 16 bits", "same next token", f"HumanEval, of {HUMANEVAL}"), rows
    )


def texts_table(path: Path = TEXTS_OUT) -> str:
    """The newest answers of each model and cache."""
    columns = {
        "model": lambda r: r["model"].partition(",")[0],
        "cache": lambda r: NAMES.get(r["cache"], f"`{r['cache']}`"),
        "MB": lambda r: f"{r['cache_bytes'] / 1e6:.1f}",
        "answer": lambda r: " ".join(r["text"].split()).replace("|", "\\|").replace("`", "'"),
    }
    answers = newest(current_records(path), "model", "cache").values()
    return listed(answers, columns).replace("---:|\n", "---|\n", 1)
