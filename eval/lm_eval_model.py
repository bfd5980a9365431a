"""The model type `hf-lowbit` for lm-eval: tasks are scored through a KV cache, so that they measure the cache.

lm-eval's own model scores a text in one forward pass without a cache. Most prompts are also shorter than the window
that a packed cache keeps exact. Here a text goes through a fresh cache in chunks (`chunked_reader.py`). Generation gets
a fresh cache for each batch. Every result has `packed_share`: the share of the attended tokens that were read packed.

`python -m hf_lowbit_kv.eval.lm_eval_model run --model hf-lowbit --model_args preset=kivi-2 ...` is lm-eval's own
command with this model type and the project's offline tasks. `hf-lowbit-kv eval lm-eval` compares presets (`evaluate`).
It uses one model and lm-eval's own evaluator, and writes one record for each task and preset.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME, LowBitLayer
from hf_lowbit_kv.cache.preset_cache import cache_of_preset
from hf_lowbit_kv.eval import data_parallel, local_models
from hf_lowbit_kv.eval.chunked_reader import FULL, Reader, Share, Text, packing_specs, packs, tokens_to_pack
from hf_lowbit_kv.eval.local_models import (
    AUTO,
    bundled_model,
    default_device,
    default_dtype,
    without_tokenizer,
)
from hf_lowbit_kv.eval.offline_tasks import OFFLINE_TASKS
from hf_lowbit_kv.folders import try_folder
from hf_lowbit_kv.formats.registered import load_installed
from hf_lowbit_kv.presets import get_preset

#: arguments for transformers' loader. Arguments that neither lm-eval nor the loader knows go to `from_preset`
LOADER_ARGUMENTS = (
    *("cache_dir", "code_revision", "config", "device_map", "force_download", "ignore_mismatched_sizes"),
    *("load_in_4bit", "load_in_8bit", "local_files_only", "low_cpu_mem_usage", "max_memory", "offload_buffers"),
    *("token", "tp_size", "use_safetensors", "variant", "weights_only"),
)
TASKS = Path(__file__).resolve().parent / "tasks"


@register_model("hf-lowbit")
class LowBitLM(HFLM):
    """lm-eval's `HFLM` that reads and writes through a cache.

    Args:
        pretrained: a hub name, a folder, or a loaded model (set to the attention implementation `lowbit_kv`); `None`:
            the bundled model.
        preset: name of a preset, or `"full"` for transformers' own cache in the model's dtype.
        kv_chunk: most tokens of a text in one forward pass. Up to one page (128) the result equals token-by-token
            decoding. With larger chunks the cache looks better than it is.
        allow_unpacked: accept tasks in which nothing is read packed.
        kv_backend: `backend=` of the cache. (lm-eval uses the name `backend` itself.)
        **arguments: arguments of `HFLM` and of transformers' loader (`LOADER_ARGUMENTS`). All others are overrides for
            `from_preset`, e.g. `residual=64`. By default the model is on a GPU in bfloat16 if there is one, else on the
            CPU in float32. `device="auto"` spreads its layers over all GPUs.

    Attributes:
        shares: for each task, counts of tokens that scored positions attended to, over all processes.

    Raises:
        ValueError: an unknown preset, an override out of range, `kv_chunk` below 1 or above the model's context, a
            model without a tokenizer, or `max_cache_len` (caches must grow here).
        TypeError: an unknown override.
    """

    def __init__(
        self,
        pretrained: Any = None,
        preset: str = FULL,
        kv_chunk: int = 128,
        allow_unpacked: bool = False,
        kv_backend: str | None = None,
        **arguments: Any,
    ):
        known = {*inspect.signature(HFLM.__init__).parameters, *LOADER_ARGUMENTS}
        overrides = {name: arguments.pop(name) for name in [*arguments] if name not in known}
        if overrides.pop("attn_implementation", ATTENTION_NAME) != ATTENTION_NAME:
            raise ValueError(
                f"attn_implementation must be {ATTENTION_NAME!r}: other ones do not attend to packed pages"
            )
        self.kv_chunk, self.allow_unpacked = kv_chunk, allow_unpacked
        self.preset, self.overrides = preset, overrides | ({} if kv_backend is None else {"backend": kv_backend})
        if preset != FULL:
            get_preset(preset)  # raises before the model is loaded
        self.shares: dict[str, Share] = defaultdict(Share)
        self._task: str | None = None  # the task whose requests are running
        if pretrained is None:
            pretrained = str(bundled_model())
        if isinstance(pretrained, str):
            device = arguments.get("device") or default_device()
            if (
                device == AUTO
            ):  # lm-eval's name for a device map over all GPUs; without a GPU there is nothing to spread
                device = default_device()
                if device.type != "cpu":
                    arguments |= {"parallelize": True, "device_map": local_models.DEVICE_MAP}
            device = torch.device(device)
            arguments |= {"device": str(device), "dtype": arguments.get("dtype") or default_dtype(device)}
            arguments["attn_implementation"] = ATTENTION_NAME
        else:
            pretrained.set_attn_implementation(ATTENTION_NAME)
            arguments.pop("device", None)
        processes = data_parallel.join()  # HFLM's own accelerator would not join processes on CPUs
        super().__init__(pretrained, **arguments)
        self.new_cache()  # raises if the preset does not work with this model
        if kv_chunk > self.max_length:
            raise ValueError(
                f"kv_chunk={kv_chunk} is larger than the model's context of {self.max_length} tokens: nothing would be read "
                "packed. Take at most half of the context; 128 is the default"
            )
        if getattr(self, "accelerator", None) is not None:
            # HFLM takes the rank within a machine, and splits the work only among GPUs
            self._rank, self._world_size = processes.rank, processes.count

    # ---- the cache ------------------------------------------------------------------------------------------------

    def use(self, preset: str, **overrides: Any) -> None:
        """Switch to another preset on the same model. `shares` is emptied."""
        before = self.preset, self.overrides
        self.preset, self.overrides = preset, overrides
        try:
            self.new_cache()
        except (TypeError, ValueError):
            self.preset, self.overrides = before
            raise
        self.shares = defaultdict(Share)

    def new_cache(self) -> Cache:
        """A fresh, growing cache."""
        if self.preset == FULL:
            return DynamicCache(config=self.model.config)
        return cache_of_preset(self.preset, self.model, **self.overrides)

    @property
    def packed_share(self) -> dict[str, float | None]:
        """For each task: the share of attended tokens that were read packed, or `None` for caches that pack nothing."""
        if not self._packs():
            return dict.fromkeys(self.shares)
        return {task: share.value for task, share in self.shares.items()}

    def _packs(self) -> bool:
        return bool(packing_specs(self.new_cache()))  # nothing is allocated yet

    def get_model_info(self) -> dict:
        """lm-eval writes these fields into the record of a run."""
        info = {"preset": self.preset, "kv_chunk": self.kv_chunk, "packed_share": self.packed_share}
        return super().get_model_info() | info | {"cache_overrides": {k: str(v) for k, v in self.overrides.items()}}

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        except (OSError, ValueError, TypeError, KeyError) as error:
            name = tokenizer or getattr(pretrained, "name_or_path", pretrained)
            raise ValueError(f"{without_tokenizer(name, error)}, or name another one: tokenizer=") from error

    # ---- lm-eval's contract ---------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def _by_task(self, method: Any, requests: list[Instance], disable_tqdm: bool) -> list:
        """Answers of HFLM's method, task by task, because shared beginnings and `packed_share` belong to one task."""
        if not isinstance(self.batch_size, int):
            raise ValueError(f"batch_size={self.batch_size!r} is not allowed with a cache; give a number of rows")
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.task_name or "", []).append(index)
        answers: list = [None] * len(requests)
        of_process: dict[str, Share] = {}
        for self._task, indices in groups.items():
            before, self.shares[self._task] = self.shares.get(self._task, Share()), Share()
            of_task = method([requests[index] for index in indices], disable_tqdm)
            for index, answer in zip(indices, of_task, strict=True):
                answers[index] = answer
            of_process[self._task], self.shares[self._task] = self.shares[self._task], before
        for shares in self._of_all_processes(of_process):
            for task, share in shares.items():
                self.shares[task].add(share.packed, share.attended)
        self._check_shares(of_process)
        return answers

    def _of_all_processes(self, of_process: dict[str, Share]) -> list[dict[str, Share]]:
        if self.world_size == 1:
            return [of_process]
        everyone: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(everyone, of_process)
        return everyone

    def _check_shares(self, tasks: Sequence[str] | dict[str, Share]) -> None:
        if self.allow_unpacked or not self._packs():
            return
        if unpacked := [task for task in tasks if self.shares[task].packed == 0]:
            first = min(map(tokens_to_pack, packing_specs(self.new_cache())))
            raise ValueError(
                f"packed_share=0 for {', '.join(unpacked)}: nothing was read packed, so the result says nothing about preset "
                f"{self.preset!r}, which packs its first page at {first} tokens. Use longer texts (--num_fewshot), or accept "
                "it with allow_unpacked=True (--allow-unpacked)"
            )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        texts = []
        for strings, context, continuation in requests:
            _check_item(strings, context, continuation, self.max_length)
            tokens = (context + continuation)[-(self.max_length + 1) :]  # cut at the front, as HFLM does
            texts.append(Text(tokens, max(len(tokens) - len(continuation), 1)))
        reader = Reader(self.model, self.new_cache, self.kv_chunk, override_bs or self.batch_size)
        dtype = self.mixed_precision_dtype
        with (
            tqdm(total=len(texts), disable=disable_tqdm or self.rank != 0, desc=f"{self._task} {self.preset}") as bar,
            torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None),
        ):
            scores = reader.score(texts, bar.update)
        answers = [(score.logprob, score.greedy) for score in scores]
        self.shares[self._task or ""].add(reader.share.packed, reader.share.attended)
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any):
        cache = self.new_cache()
        out = super()._model_generate(context, max_length, stop, **as_argument(cache), **generation_kwargs)
        mask = generation_kwargs.get("attention_mask")
        columns = context.shape[1]
        real = torch.full((len(context),), columns) if mask is None else mask.sum(1).cpu()
        chunk = generation_kwargs.get("prefill_chunk_size") or columns
        in_last = columns - (columns - 1) // chunk * chunk  # tokens of the prompt's last pass, which reads them exactly
        for prompt, tokens in zip(real.tolist(), out[:, columns:].cpu(), strict=True):
            ended = (tokens == self.eot_token_id).nonzero()[:, 0].tolist()
            count = ended[0] + 1 if ended else len(tokens)
            self._count(cache, max(prompt - in_last, 0), prompt)
            for stored in range(prompt, prompt + count - 1):
                self._count(cache, stored, stored + 1)
        return out

    def _count(self, cache: Cache, stored: int, attended: int) -> None:
        """Note that a position attended to `attended` tokens while the cache held `stored` of them."""
        specs = [layer.spec for layer in cache.layers if isinstance(layer, LowBitLayer)]
        packed = sum(spec.paged_after(stored - spec.sink) for spec in specs if packs(spec))
        self.shares[self._task or ""].add(packed / max(len(specs), 1), attended)


def _check_item(strings: Any, context: Sequence[int], continuation: Sequence[int], longest: int) -> None:
    """Raise `ValueError` for an item without a score. strings: context and answer, for the message."""
    if not context or not continuation:
        part = "answer" if context else "context"
        raise ValueError(f"an item has no token in its {part}, so it has no score: {strings!r:.300}")
    if len(continuation) > longest:
        raise ValueError(
            f"an item's answer has {len(continuation)} tokens, and the model reads {longest}: {strings!r:.300}. Raise "
            "max_length if the model allows it, or take the item out"
        )


#: lm-eval's options that this command sets itself, or that have no meaning for several presets. They are refused
OWN_OPTIONS = (
    *("config", "model", "model_args", "batch_size", "max_batch_size", "device", "trust_remote_code"),
    *("use_cache", "cache_requests", "check_integrity", "show_config", "verbosity"),
    *("wandb_args", "wandb_config_args", "trackio_args", "hf_hub_log_args"),
)


def parse_options(tasks: Sequence[str], options: Sequence[str]) -> EvaluatorConfig:
    """lm-eval's configuration from the options of its command, e.g. `--limit 10 --num_fewshot 5`. lm-eval's own parser
    reads them.

    Raises:
        ValueError: an option that lm-eval does not know, or that is not offered here.
        OSError: `--output_path` cannot be written.
    """
    arguments = ["run", "--tasks", ",".join(tasks), *options]
    parser = HarnessCLI()._parser
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(f"{unknown[0]!r} is an option neither of this command nor of lm-eval (`lm-eval run --help`)")
    defaults = parser.parse_args(["run"])
    if refused := [name for name in OWN_OPTIONS if getattr(namespace, name, None) != getattr(defaults, name, None)]:
        raise ValueError(
            f"--{refused[0]} is not offered here; use lm-eval's own command (`python -m {LowBitLM.__module__}`)"
        )
    config = EvaluatorConfig.from_cli(namespace)
    if config.output_path:
        try_folder(Path(config.output_path))  # lm-eval itself would leave its files out silently
    return config


def evaluate(
    lm: LowBitLM, presets: Sequence[str], tasks: Sequence[str], options: Sequence[str] = (), **overrides: Any
) -> list[dict[str, Any]]:
    """Evaluate presets on tasks.

    Args:
        lm: the model.
        presets: names of presets, or `"full"`.
        tasks: names of lm-eval's tasks or of the offline tasks.
        options: options of lm-eval's own command.
        **overrides: further arguments of `from_preset`, for every preset.

    Returns:
        One dict for each task and preset: `task`, `preset`, `metrics` (for each metric `value`, and `stderr` or
        `None`), `packed_share` (`None` if the cache packs nothing), `samples`, `kv_chunk`, `batch_size`, `seconds` (of
        the preset, all tasks together). Processes other than the first return an empty list.

    Raises:
        ValueError: an unknown task or preset, or a task in which nothing is read packed.
    """
    config = parse_options(tasks, options)
    # some tasks (ruler) measure their texts with the model's tokenizer
    config.metadata = {"tokenizer": lm.tokenizer.name_or_path} | config.metadata
    manager = _task_manager(config, tasks)
    for preset in presets if config.output_path else ():
        try_folder(Path(config.output_path) / preset)
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
    if not set(tasks) <= set(manager.all_tasks):  # lm-eval needs seconds to read the files of all its tasks
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
    with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the caller
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
    if tracker is not None and results is not None:
        samples = results.pop("samples", None)
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in samples or {}:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    return results


def _rows(results: Any, lm: LowBitLM, preset: str, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for task, scores in results["results"].items():
        metrics = {}
        for key, value in scores.items():
            name, _, flt = key.partition(",")
            if not flt or name.endswith("_stderr") or isinstance(value, str):
                continue
            error = scores.get(f"{name}_stderr,{flt}")
            label = name if flt == "none" else f"{name} ({flt})"
            metrics[label] = {"value": float(value), "stderr": _number(error)}
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        row = {"task": task, "preset": preset, "metrics": metrics, "packed_share": lm.packed_share.get(task)}
        row |= {"samples": samples, "kv_chunk": lm.kv_chunk, "batch_size": lm.batch_size}
        rows.append(row | {"seconds": round(seconds, 1)})
    return rows


def _number(value: Any) -> float | None:
    """The number, or `None` for lm-eval's "N/A" (no standard error)."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def samples_of(rows: Sequence[dict[str, Any]]) -> str:
    """The number of samples, or one for each task if they differ."""
    by_task = {row["task"]: row["samples"] for row in rows}
    if len(set(by_task.values())) == 1:
        return f"{next(iter(by_task.values()))} samples" + (" a task" if len(by_task) > 1 else "")
    return ", ".join(f"{count} samples of {task}" for task, count in by_task.items())


def comparison(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The results as one table: a row for each task and metric, a column for each preset, in the order of `rows`."""
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
    """Let lm-eval log only errors, unless `LMEVAL_LOG_LEVEL` is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "LMEVAL_LOG_LEVEL" not in os.environ:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
            logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """lm-eval's own command, with `hf-lowbit` and the offline tasks."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    if "--include_path" not in sys.argv and "--tasks" in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    load_installed()
    cli_evaluate()


if __name__ == "__main__":
    main()
