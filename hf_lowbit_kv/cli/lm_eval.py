"""`hf-lowbit-kv eval lm-eval`."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import torch
import typer

from ..eval.chunked_reader import FULL
from ..presets import get_preset
from .shared_options import (
    DTYPES,
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SetOption,
    check_device,
    parse_overrides,
    print_json,
    print_table,
)


def lm_eval(
    context: typer.Context,
    tasks: Annotated[list[str], typer.Option("--tasks", "-t", help="Tasks, separated by commas.")],
    preset: Annotated[list[str], typer.Option("--preset", "-p", help="Presets, separated by commas.")],
    model: ModelOption = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="the model's")] = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    kv_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens read at a time; more than a page flatters the cache.")
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--batch_size", min=1, help="Rows read at a time; changes no result.")
    ] = 8,
    full: Annotated[bool, typer.Option(help="Measure full precision too.")] = True,
    allow_unpacked: Annotated[
        bool, typer.Option("--allow-unpacked", help="Accept tasks in which nothing is read packed.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """lm-eval's tasks with the cache in the loop: one table over presets, full precision beside them.

    Offline tasks: hellaswag_100, mmlu_sample, needle. Further options are lm-eval's own, e.g. --limit 20, --num_fewshot 5,
    --gen_kwargs, --output_path; `lm-eval run --help` lists them.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("this command needs lm-eval: pip install 'hf-lowbit-kv[eval]'")
    names = [name for name in _options_of_lm_eval(preset) if name != FULL]
    for name in names:
        get_preset(name)
    if not (chosen := _options_of_lm_eval(tasks)):
        raise ValueError("--tasks is empty; offline tasks: hellaswag_100, mmlu_sample, needle")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is not offered; allowed: {', '.join(DTYPES)}")
    check_device(device)
    presets = [FULL, *names] if full else names
    if not presets:
        raise ValueError("--preset is empty; see `hf-lowbit-kv presets`")

    from ..eval.lm_eval_model import LowBitLM, comparison, evaluate, parse_options, quiet

    given = parse_overrides(overrides, calibration)
    quiet()
    parse_options(chosen, context.args)  # before the model is loaded
    lm = LowBitLM(
        model,
        kv_chunk=kv_chunk,
        allow_unpacked=allow_unpacked,
        batch_size=batch_size,
        tokenizer=tokenizer,
        device=device,
        dtype=getattr(torch, dtype) if dtype else None,
    )
    for name in names:
        lm.use(name, **given)  # raises for what a preset cannot do, before anything is measured
    rows = evaluate(lm, presets, chosen, context.args, **given)
    if lm.rank != 0:
        return
    if as_json:
        print_json(rows)
        return
    print_table(f"lm-eval: {', '.join(chosen)}; means with standard errors", comparison(rows), numbers_from=2)


def _options_of_lm_eval(options: list[str]) -> list[str]:
    """Names from repeated and comma-separated options, each once."""
    return list(dict.fromkeys(name.strip() for option in options for name in option.split(",") if name.strip()))
