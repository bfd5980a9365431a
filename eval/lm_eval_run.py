"""lm-eval over several presets: one model, lm-eval's own evaluator, one record for each task and preset."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval._cli.harness import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from hf_lowbit_kv.eval.chunked_reader import FULL
from hf_lowbit_kv.eval.lm_eval_model import TASKS, LowBitLM
from hf_lowbit_kv.eval.offline_tasks import OFFLINE_TASKS

#: lm-eval's options that belong to this command, or that have no meaning for several presets: refused, not ignored
OWN_OPTIONS = (
    *("config", "model", "model_args", "batch_size", "max_batch_size", "device", "trust_remote_code"),
    *("use_cache", "cache_requests", "check_integrity", "show_config", "verbosity"),
    *("wandb_args", "wandb_config_args", "trackio_args", "hf_hub_log_args"),
)


def parse_options(tasks: Sequence[str], options: Sequence[str]) -> EvaluatorConfig:
    """lm-eval's configuration from its own command's options, `--limit 10 --num_fewshot 5 ...`, read by its own parser.

    Raises:
        ValueError: an option that lm-eval does not know, or that is not offered here.
    """
    arguments = ["run", "--tasks", ",".join(tasks), *options]
    parser = HarnessCLI()._parser
    try:
        namespace, unknown = parser.parse_known_args(arguments)
    except SystemExit as error:  # argparse has printed what is wrong
        raise ValueError(f"lm-eval does not take {' '.join(options)!r}") from error
    if unknown:
        raise ValueError(f"{unknown[0]!r} is an option neither of this command nor of lm-eval (`lm-eval run --help`)")
    defaults = parser.parse_args(["run"])
    if given := [name for name in OWN_OPTIONS if getattr(namespace, name, None) != getattr(defaults, name, None)]:
        raise ValueError(
            f"--{given[0]} is not offered here; use lm-eval's own command (`python -m {LowBitLM.__module__}`)"
        )
    return EvaluatorConfig.from_cli(namespace)


def evaluate(
    lm: LowBitLM, presets: Sequence[str], tasks: Sequence[str], options: Sequence[str] = (), **overrides: Any
) -> list[dict[str, Any]]:
    """Evaluate presets on tasks.

    Args:
        lm: the model. presets: names, or `"full"`. tasks: names of lm-eval's, or of the offline ones.
        options: of lm-eval's own command. **overrides: for `from_preset`, for every preset.

    Returns:
        One dict for each task and preset (an empty list in processes other than the first): `task`, `preset`, `metrics`
        (by name: `value`, `stderr` or `None`), `packed_share` (`None` where nothing is to be packed), `samples`,
        `kv_chunk`, `batch_size`, `seconds` (of the preset, all tasks together).

    Raises:
        ValueError: an unknown task or preset, tasks in which nothing is read packed, data that cannot be fetched.
    """
    config = parse_options(tasks, options)
    # some tasks (ruler) measure their texts with the model's tokenizer
    config.metadata = {"tokenizer": lm.tokenizer.name_or_path} | config.metadata
    manager = _task_manager(config, tasks)
    rows = []
    for preset in presets:
        lm.use(preset, **(overrides if preset != FULL else {}))
        begin = time.perf_counter()
        results = _simple_evaluate(lm, config, manager, preset)
        if results is not None:
            rows += _rows(results, lm, preset, time.perf_counter() - begin)
    return rows


def _task_manager(config: EvaluatorConfig, tasks: Sequence[str]) -> TaskManager:
    include = [str(TASKS), *([config.include_path] if config.include_path else [])]
    manager = TaskManager(include_path=include, metadata=config.metadata, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):  # reading the files of all its tasks takes lm-eval seconds
        manager = TaskManager(include_path=include, metadata=config.metadata)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known and not manager.match_tasks([task])]:
        offline = ", ".join(OFFLINE_TASKS)
        raise ValueError(f"task {unknown[0]!r} is not known; offline tasks: {offline}; all: `lm-eval ls tasks`")
    return manager


def _simple_evaluate(lm: LowBitLM, config: EvaluatorConfig, manager: TaskManager, preset: str) -> Any:
    seeds = config.seed if isinstance(config.seed, list) else [config.seed] * 4
    tracker = None
    if config.output_path:
        tracker = EvaluationTracker(output_path=str(Path(config.output_path) / preset))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the caller's
            results = lm_eval.simple_evaluate(
                model=lm,
                model_args={"preset": preset, "kv_chunk": lm.kv_chunk} | config.model_args,
                tasks=manager.match_tasks(config.tasks),
                task_manager=manager,
                evaluation_tracker=tracker,
                batch_size=lm.batch_size,
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                samples=config.samples,
                gen_kwargs=config.gen_kwargs,
                log_samples=config.log_samples,
                write_out=config.write_out,
                system_instruction=config.system_instruction,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
                predict_only=config.predict_only,
                confirm_run_unsafe_code=config.confirm_run_unsafe_code,
                random_seed=seeds[0],
                numpy_random_seed=seeds[1],
                torch_random_seed=seeds[2],
                fewshot_random_seed=seeds[3],
            )
    except (ConnectionError, datasets.exceptions.DatasetsError, OSError) as error:
        if not _is_of_the_hub(error):
            raise
        raise ValueError(
            f"the data of {', '.join(config.tasks)} could not be fetched from the hub "
            f"({str(error).splitlines()[0]}). Offline tasks: {', '.join(OFFLINE_TASKS)}"
        ) from error
    if tracker is not None and results is not None:
        samples = results.pop("samples", None)
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in samples or {}:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    return results


def _is_of_the_hub(error: BaseException) -> bool:
    """Whether an error says that the hub cannot be reached: of several libraries, each wraps the one before."""
    seen: list[str] = []
    step: BaseException | None = error
    while step is not None:
        seen += [type(step).__name__, type(step).__module__.partition(".")[0]]
        step = step.__cause__ or step.__context__
    return any(
        name in seen for name in ("ConnectionError", "OfflineModeIsEnabled", "huggingface_hub", "datasets", "httpx")
    )


def _rows(results: Any, lm: LowBitLM, preset: str, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for task, found in results["results"].items():
        metrics = {}
        for key, value in found.items():
            name, _, flt = key.partition(",")
            if not flt or name.endswith("_stderr") or isinstance(value, str):
                continue
            error = found.get(f"{name}_stderr,{flt}")
            label = name if flt == "none" else f"{name} ({flt})"
            metrics[label] = {"value": float(value), "stderr": _number(error)}
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        row = {"task": task, "preset": preset, "metrics": metrics, "packed_share": lm.packed_share.get(task)}
        row |= {"samples": samples, "kv_chunk": lm.kv_chunk, "batch_size": lm.batch_size}
        rows.append(row | {"seconds": round(seconds, 1)})
    return rows


def _number(value: Any) -> float | None:
    """lm-eval says "N/A" where there is no standard error."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def comparison(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows of one table: a line for each task and metric, a column for each preset, full precision first."""
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    by_place = {(row["task"], row["preset"]): row for row in rows}
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = {preset: by_place[task, preset] for preset in presets}
        for metric in next(iter(cells.values()))["metrics"]:
            shown = {preset: _cell(**row["metrics"][metric]) for preset, row in cells.items()}
            lines.append({"task": task, "metric": metric} | shown)
        shares = {preset: row["packed_share"] for preset, row in cells.items()}
        shown = {preset: "" if share is None else f"{share:.2f}" for preset, share in shares.items()}
        lines.append({"task": task, "metric": "packed_share"} | shown)
    seconds = {row["preset"]: f"{row['seconds']:.0f}" for row in rows}
    return [*lines, {"task": "all", "metric": "seconds"} | seconds]


def _cell(value: float, stderr: float | None) -> str:
    return f"{value:.3g}" if stderr is None else f"{value:.3g} ± {stderr:.2g}"


def quiet() -> None:
    """Let lm-eval say errors alone, unless `LMEVAL_LOG_LEVEL` asks for more."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "LMEVAL_LOG_LEVEL" not in os.environ:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
            logging.getLogger(name).setLevel(logging.ERROR)
