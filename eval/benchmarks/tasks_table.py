"""Tables of tasks in docs/results.md, from the records of `model_tasks.py`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hf_lowbit_kv.eval.benchmarks.front_page import HUMANEVAL, SHORT_NAME, TASKS
from hf_lowbit_kv.eval.benchmarks.model_tasks import RULER_ITEMS
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.benchmarks.ruler_tasks import TASKS as RULER
from hf_lowbit_kv.presets import get_preset

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
NONE = "(no record)\n"
#: a task, and the context of RULER's
Key = tuple[str, int | None]
Records = dict[Key, dict[str, Any]]


def newest(path: Path = TASKS) -> dict[str, Records]:
    """For each preset, most bits first, its newest record of each task and context, with all items."""
    found: dict[str, Records] = {}
    for record in current_records(path):
        task = record["task"]
        items = WORKED[task][1] if task in WORKED else RULER_ITEMS
        if record["model"].startswith(SHORT_NAME) and record["items"] >= items:
            found.setdefault(record["preset"], {})[task, record.get("context")] = record
    return dict(sorted(found.items(), key=lambda item: -get_preset(item[0]).spec().bits_per_value(4096, 128)))


def contexts(presets: Collection[Records]) -> list[int]:
    """Contexts at which a preset has all of RULER's tasks."""
    lengths = {length for records in presets for task, length in records if task in RULER and length is not None}
    return sorted(n for n in lengths if any(all((task, n) in records for task in RULER) for records in presets))


def tasks_table(path: Path = TASKS) -> str:
    """Scores of each preset in percent, and the share of the tokens attended to that is packed: solved items of HumanEval
    and GSM8K, and the mean of RULER's tasks at each context."""
    presets = newest(path)
    lengths = contexts(presets.values())
    columns: dict[str, list[Key]] = {shown: [(task, None)] for task, (shown, _) in WORKED.items()}
    columns |= {f"RULER, {length // 1024}k": [(task, length) for task in RULER] for length in lengths}
    rows = [[f"`{name}`", *(_cell(records, keys) for keys in columns.values())] for name, records in presets.items()]
    return markdown_table(["preset", *columns], rows) if rows else NONE


def ruler_table(path: Path = TASKS) -> str:
    """Scores of RULER's tasks in percent, by kind: a row for each context and preset."""
    presets = newest(path)
    rows = [
        [
            f"{length // 1024}k, `{name}`",
            *(
                _cell(records, [(task, length) for task in RULER if task.startswith(begin)], packed=False)
                for begin in KINDS.values()
            ),
        ]
        for length in contexts(presets.values())
        for name, records in presets.items()
        if all((task, length) in records for task in RULER)
    ]
    return markdown_table(["context, preset", *KINDS], rows) if rows else NONE


def _cell(records: Records, keys: list[Key], packed: bool = True) -> str:
    """The mean score in percent, with the packed share in brackets; empty if a task has no record."""
    if not all(key in records for key in keys):
        return ""
    score, share = (100 * sum(records[key][field] for key in keys) / len(keys) for field in ("score", "packed_share"))
    return f"{score:.1f} ({share:.0f} %)" if packed else f"{score:.0f}"
