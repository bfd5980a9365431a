"""Evaluations that papers of this field report, so that our results can be compared with theirs.

- `wikitext`: perplexity on the test part of WikiText-2 (OSCAR, WUSH-KV and others). Windows of 2048 tokens are read 16
  tokens at a time. The first 16 tokens stay in 16 bits. The newest tokens stay in 16 bits too: at least 0, or at least
  128 of them.
- `kivi`: GSM8K and eight tasks of LongBench through lm-eval, the sets of KIVI's tables.

The data come from the hub, or from local files.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.eval.chunked_reader import FULL
from hf_lowbit_kv.eval.perplexity import as_rows, score
from hf_lowbit_kv.eval.texts import Text, dataset_text
from hf_lowbit_kv.installation import need

NAMES = ("wikitext", "kivi")
#: protocol `wikitext`: tokens of a window, of a chunk and of the sink, and numbers of newest tokens in 16 bits
CONTEXT, CHUNK, SINK, RESIDUALS = 2048, 16, 16, (0, 128)
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
#: more tokens than the text has
EVERYTHING = 10**7
#: protocol `kivi`: lm-eval's tasks, and lm-eval's files that describe them
KIVI_TASKS = {
    "gsm8k": "gsm8k/gsm8k.yaml",
    "longbench_qasper": "longbench/qasper.yaml",
    "longbench_qmsum": "longbench/qmsum.yaml",
    "longbench_multi_news": "longbench/multi_news.yaml",
    "longbench_trec": "longbench/trec.yaml",
    "longbench_triviaqa": "longbench/triviaqa.yaml",
    "longbench_samsum": "longbench/samsum.yaml",
    "longbench_lcc": "longbench/lcc.yaml",
    "longbench_repobench-p": "longbench/repobench-p.yaml",
}
#: packages that LongBench's metrics need
LONGBENCH_PACKAGES = ("jieba", "fuzzywuzzy", "rouge")


def wikitext_text(dataset: str | None = None) -> Text:
    """The text of the protocol `wikitext`: documents joined by blank lines. dataset: a file to use instead of the hub's
    data.

    Raises:
        OSError: the hub or the file cannot be read.
    """
    name, config, split = WIKITEXT if dataset is None else (dataset, None, "test")
    return dataset_text(name, config, split, tokens=EVERYTHING)


def wikitext(
    presets: Sequence[str],
    text: Text,
    model: Any,
    tokenizer: Any,
    windows: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Perplexity of presets on a text by the protocol `wikitext`. All tokens of a window except the first are scored.

    Args:
        windows: windows to read; 0: as many as the text has.
        batch_size: windows that go through a cache together.
        **overrides: further arguments of `from_preset`, e.g. `calibration`. `sink` and `residual` are not allowed,
            because the protocol sets them.

    Returns:
        The full-precision cache first, then one dict for each preset and residual: `protocol`, `preset`, `sink`,
        `residual`, `ppl`, `ppl_full`, `kl`, `kl_error`, `top1`, `bits_per_value` (at 2048 tokens, everything counted,
        the window in 16 bits; see `sizes`), `windows`, `text`.

    Raises:
        ValueError: an unknown preset, or a text or a model's context that is too short.
    """
    settings = {
        f"{preset} {residual}": (preset, residual) for preset in dict.fromkeys(presets) for residual in RESIDUALS
    }
    factories = {
        name: functools.partial(from_preset, preset, model, sink=SINK, residual=residual, **overrides)
        for name, (preset, residual) in settings.items()
    }
    measured = score(factories, [text], model, tokenizer, CONTEXT, 0, CHUNK, windows, progress, batch=batch_size)
    rows: list[dict[str, Any]] = []
    for row in as_rows(measured, factories, model, CONTEXT, 0):
        preset, residual = settings[row["preset"]]
        count = row["positions"] // (CONTEXT - 1)
        shown = {"protocol": "wikitext", "text": text.name, "windows": count, "sink": SINK}
        if not rows:
            full = {"ppl": row["ppl_full"], "ppl_full": row["ppl_full"], "kl": 0.0, "kl_error": 0.0, "top1": 1.0}
            rows.append({**shown, "preset": FULL, "sink": None, "residual": None, "bits_per_value": 16.0} | full)
        kept = ("bits_per_value", "ppl", "ppl_full", "kl", "kl_error", "top1")
        rows.append({**shown, "preset": preset, "residual": residual} | {key: row[key] for key in kept})
    return rows


def kivi(
    lm: Any,
    presets: Sequence[str],
    tasks: Sequence[str] | None = None,
    dataset: Path | None = None,
    options: Sequence[str] = (),
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Run the tasks of KIVI's tables with full precision, then with each preset. Returns rows like
    `lm_eval_model.evaluate`.

    Args:
        lm: a `LowBitLM`.
        tasks: some of `KIVI_TASKS`; `None`: all.
        dataset: a folder that has, for each task, a file `<task>.jsonl` or a folder `<task>` with a file for each split
            (`train.jsonl`, `test.jsonl`); `None`: the hub's data.
        options: options of lm-eval's own command, e.g. `["--limit", "200"]`.

    Raises:
        ValueError: a task that is not in `KIVI_TASKS`, or a task without a file.
        ImportError: a package that LongBench's metrics need is missing.
    """
    from hf_lowbit_kv.eval.lm_eval_model import evaluate

    chosen = check_kivi(tasks)
    names = [FULL, *(name for name in dict.fromkeys(presets) if name != FULL)]
    if dataset is None:
        return evaluate(lm, names, chosen, options, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        for task in chosen:
            (Path(folder) / f"{task}.yaml").write_text(local_task(task, dataset), encoding="utf-8")
        return evaluate(lm, names, chosen, ["--include_path", folder, *options], **overrides)


def check_kivi(tasks: Sequence[str] | None) -> list[str]:
    """The tasks without repetitions. Raises if one of them cannot run (see `kivi`)."""
    chosen = list(dict.fromkeys(tasks or KIVI_TASKS))
    if other := [task for task in chosen if task not in KIVI_TASKS]:
        raise ValueError(f"task {other[0]!r} does not belong to the protocol kivi; allowed: {', '.join(KIVI_TASKS)}")
    if any(task.startswith("longbench") for task in chosen):
        need("LongBench", "eval", *LONGBENCH_PACKAGES)
    return chosen


def local_task(task: str, dataset: Path) -> str:
    """YAML for lm-eval that describes one of `KIVI_TASKS` with local data.

    Raises:
        ValueError: the folder has no file for the task.
    """
    import json

    import lm_eval.tasks

    single = dataset / f"{task}.jsonl"
    files = {"test": single, "train": single} if single.is_file() else {}
    for split in ("train", "test") if not files else ():
        if (path := dataset / task / f"{split}.jsonl").is_file():
            files[split] = path
    if "test" not in files:
        raise ValueError(f"{str(dataset)!r} has neither {task}.jsonl nor {task}/test.jsonl, the data of task {task}")
    original = Path(lm_eval.tasks.__file__).parent / KIVI_TASKS[task]
    data = {name: str(path.resolve()) for name, path in files.items()}
    return "\n".join(
        (
            f"include: {json.dumps(str(original))}",
            f"task: {task}",
            "dataset_path: json",
            "dataset_name: null",
            f"dataset_kwargs: {json.dumps({'data_files': data})}",
            "",
        )
    )
