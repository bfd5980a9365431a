"""`hf-lowbit-kv demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..presets import DEFAULT_PRESET
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    all_presets,
    load,
    parse_overrides,
    print_json,
    progress,
    ran_on,
    resolve_presets,
)

if TYPE_CHECKING:
    from ..eval.demo import Answer

#: presets of the demo: the default, and a 2-bit one that needs no calibration
PRESETS = (DEFAULT_PRESET, "kitty-pro")
#: answers side by side
COLUMNS = 3


def demo(
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", help="Presets, separated by commas, or 'all'.", show_default=", ".join(PRESETS)),
    ] = None,
    model: ModelOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Message to answer.", show_default="three essays and a question about the last"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 40,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question about a text with and without low-bit caches."""
    every = preset == ["all"]
    names = [] if every else resolve_presets(preset or [",".join(PRESETS)])
    from ..eval.demo import compare, default_prompt

    prompt = default_prompt() if prompt is None else prompt
    loaded, tokenizer = load(model, device, dtype)
    changes = parse_overrides(None, calibration)
    names = names or all_presets(loaded, changes)
    with progress(len(names) + 1) as report:
        reference, rows = compare(names, loaded, tokenizer, prompt, max_new_tokens, report, changes)
    if as_json:
        print_json(rows)
        return
    console = Console()
    question = prompt.strip().splitlines()[-1][-200:]
    console.print(f"{ran_on(loaded, model)}. {reference.prompt_tokens} tokens, which end with:", style="dim")
    console.print(Text(question, style="bold"))
    agreeing = [
        tokenizer.decode(reference.tokens[: row["agreeing_tokens"]], skip_special_tokens=True).lstrip() for row in rows
    ]
    _print_answers(console, reference, rows, agreeing)
    for row, same in zip(rows, agreeing):
        console.print(_in_words(row, same), highlight=False)


def _print_answers(console: Console, reference: Answer, rows: list[dict[str, Any]], agreeing: list[str]) -> None:
    """Print the answers side by side. Text that differs from full precision has another colour.

    Args:
        agreeing: for each row, the beginning of its answer that agrees with full precision.
    """
    answers = [("full precision", Text(reference.text.strip()))]
    for row, same in zip(rows, agreeing):
        answers.append((row["preset"], Text.assemble(same, (row["text"].strip()[len(same) :], "yellow"))))
    for start in range(0, len(answers), COLUMNS):
        names, texts = zip(*answers[start : start + COLUMNS])
        table = Table(*names, box=None, padding=(0, 2, 0, 0), expand=True)
        for column in table.columns:
            column.ratio = 1
        table.add_row(*texts)
        console.print()
        console.print(table)
    console.print()


def _in_words(row: dict[str, Any], same: str) -> str:
    """A line with saved memory and changed text. same: the beginning of its answer that agrees with full precision."""
    ratio = row["kv_bytes_full"] / row["kv_bytes"]
    size = f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"
    megabytes = f"{row['kv_bytes'] / 1e6:.1f} MB, in 16 bits {row['kv_bytes_full'] / 1e6:.1f} MB"
    if row["same_answer"]:
        text = "same answer"
    elif same.strip():
        text = f"the answer differs after {' '.join(same.split()[-3:])!r}"
    else:
        text = "another answer"
    return f"{row['preset']}: cache {size} ({megabytes}), {text}."
