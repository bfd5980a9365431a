"""`hf-lowbit-kv eval protocol`: the evaluations of papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .every_command import need
from .shared_options import (
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    check_device,
    check_dtype,
    load,
    parse_overrides,
    print_json,
    print_table,
    resolve_presets,
)


def protocol(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="wikitext (perplexity) or kivi (GSM8K and LongBench).")],
    preset: Annotated[list[str], typer.Option("--preset", "-p", help="Presets, separated by commas.")],
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="Local data. wikitext: a file (.txt, .jsonl, ...). kivi: a folder with <task>.jsonl.",
            exists=True,
            show_default="from the hub",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "-t", help="Tasks of kivi, separated by commas.", show_default="all nine"),
    ] = None,
    windows: Annotated[int, typer.Option(min=0, help="Largest number of windows of wikitext; 0: all.")] = 0,
    model: ModelOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch. It does not change the result.")] = 1,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the evaluations of papers: perplexity of WikiText-2 in chunks of 16 tokens, or GSM8K and LongBench.

    With --name kivi, all other options go to lm-eval, e.g. --limit 200.
    """
    names, changes = resolve_presets(preset), parse_overrides(None, calibration)
    from ..eval import protocols

    if name not in protocols.NAMES:
        raise ValueError(f"--name {name!r} is not offered; allowed: {', '.join(protocols.NAMES)}")
    if name == "wikitext":
        if tasks or context.args:
            raise ValueError(f"{(['--tasks'] if tasks else context.args)[0]} is not allowed with --name wikitext")
        text = protocols.wikitext_text(None if dataset is None else str(dataset))
        loaded, tokenizer = load(model, device, dtype)
        rows = protocols.wikitext(names, text, loaded, tokenizer, windows, batch_size, **changes)
        if as_json:
            print_json(rows)
            return
        title = f"{text.name}: {rows[0]['windows']} windows of {protocols.CONTEXT} tokens, chunks of {protocols.CHUNK}"
        print_table(title, [_wikitext_cells(row) for row in rows], numbers_from=1)
        return
    if windows:
        raise ValueError("--windows is not allowed with --name kivi")
    need("eval", "lm_eval")
    if dataset is not None and not dataset.is_dir():
        raise ValueError(f"--dataset {str(dataset)!r} is not allowed; for --name kivi it must be a folder")
    task_names = protocols.check_kivi(
        [part.strip() for option in tasks or [] for part in option.split(",") if part.strip()]
    )
    if dataset is not None:
        for task_name in task_names:
            protocols.local_task(task_name, dataset)  # raises before the model is loaded
    check_dtype(dtype)
    check_device(device)
    import torch

    from ..eval.lm_eval_model import LowBitLM, comparison, parse_options, quiet

    quiet()
    parse_options(task_names, context.args)
    # prompts are read whole, as in the papers, so some answers read no packed token
    lm = LowBitLM(
        model,
        allow_unpacked=True,
        batch_size=batch_size,
        device=device,
        dtype=getattr(torch, dtype) if dtype else None,
    )
    for each in names:
        lm.use(each, **changes)
    rows = protocols.kivi(lm, names, task_names, dataset, context.args, **changes)
    if as_json:
        print_json(rows)
        return
    print_table("KIVI's tasks; means with standard errors", comparison(rows), numbers_from=2)


def _wikitext_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "preset": row["preset"],
        "newest": "all" if row["residual"] is None else str(row["residual"]),
        "bits": f"{row['bits_per_value']:.2f}",
        "ppl": f"{row['ppl']:.3f}",
        "KL": f"{row['kl']:.5f}",
        "top-1": f"{row['top1']:.4f}",
    }
