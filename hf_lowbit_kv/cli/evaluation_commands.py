"""`hf-lowbit-kv eval ...`: measurements of presets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..eval import data_parallel
from ..eval.local_models import default_texts
from ..installation import need
from ..presets import get_preset
from .every_command import add_command
from .shared_options import (
    MEASURING,
    CalibrationOption,
    ChunkOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PresetOption,
    SetOption,
    TextOption,
    all_presets,
    check_device,
    check_dtype,
    device_of_process,
    error_of_kl,
    load,
    parse_overrides,
    print_json,
    print_table,
    progress,
    ran_on,
    refuse_several_processes,
    resolve_presets,
    split_names,
)

if TYPE_CHECKING:
    from ..eval.lm_eval_model import LowBitLM
    from ..eval.texts import Text


def lm_eval(
    context: typer.Context,
    tasks: Annotated[list[str], typer.Option("--tasks", "-t", help="Tasks, separated by commas.")],
    preset: Annotated[list[str], typer.Option("--preset", "-p", help="Presets, separated by commas.")],
    model: ModelOption = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="the model's")] = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    kv_chunk: ChunkOption = 128,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "--batch_size", min=1, help="Rows per batch. It does not change the result."),
    ] = 8,
    full: Annotated[bool, typer.Option(help="Measure full precision too.")] = True,
    allow_unpacked: Annotated[
        bool, typer.Option("--allow-unpacked", help="Accept tasks so short that no packed token is read.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run tasks of lm-eval with full precision and with each preset.

    Offline tasks: hellaswag_100, mmlu_sample, needle. Further options are lm-eval's own, e.g. --limit 20, --num_fewshot 5,
    --gen_kwargs, --output_path; `lm-eval run --help` lists them.
    """
    need("this command", "eval", "lm_eval")
    names = [name for name in split_names(preset) if name != "full"]
    for name in names:
        get_preset(name)
    task_names = split_names(tasks)
    check_dtype(dtype)
    check_device(device_of_process(device))

    from ..eval.chunked_reader import FULL
    from ..eval.lm_eval_model import comparison, evaluate, samples_of

    cache_options = parse_overrides(overrides, calibration)
    lm = _load_for_lm_eval(
        model,
        names,
        task_names,
        context.args,
        cache_options,
        dtype,
        kv_chunk=kv_chunk,
        allow_unpacked=allow_unpacked,
        batch_size=batch_size,
        tokenizer=tokenizer,
        device=device,
    )
    rows = evaluate(lm, [FULL, *names] if full else names, task_names, context.args, **cache_options)
    data_parallel.leave()
    if lm.rank != 0:
        return
    if as_json:
        print_json(rows)
        return
    title = f"lm-eval: {', '.join(task_names)}; {ran_on(lm.model, model)}; n = {samples_of(rows)}, kv_chunk {kv_chunk}"
    print_table(f"{title}; means with standard errors", comparison(rows), numbers_from=2)


def _load_for_lm_eval(
    model: str | None,
    names: list[str],
    task_names: list[str],
    arguments: list[str],
    cache_options: dict[str, Any],
    dtype: str | None,
    **options: Any,
) -> LowBitLM:
    """The model in the form of lm-eval. Wrong options raise before it is loaded, presets that do not fit it before any
    measurement. arguments: options of lm-eval. options: arguments of `LowBitLM`."""
    import torch

    from ..eval.lm_eval_model import LowBitLM, parse_options, quiet

    quiet()
    parse_options(task_names, arguments)
    lm = LowBitLM(model, dtype=getattr(torch, dtype) if dtype else None, **options)
    for name in names:
        lm.use(name, **cache_options)
    return lm


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
    """Measure as papers do: WikiText-2, GSM8K and LongBench. WikiText-2 is read in chunks of 16 tokens.

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
    need("this command", "eval", "lm_eval")
    task_names = protocols.check_kivi(split_names(tasks))
    if dataset is not None:
        for task_name in task_names:
            protocols.local_task(task_name, dataset)  # raises before the model is loaded
    check_dtype(dtype)
    check_device(device)
    from ..eval.lm_eval_model import comparison

    # prompts are read whole, as in the papers, so some answers read no packed token
    lm = _load_for_lm_eval(
        model,
        names,
        task_names,
        context.args,
        changes,
        dtype,
        allow_unpacked=True,
        batch_size=batch_size,
        device=device,
    )
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


def needle(
    preset: PresetOption = None,
    model: ModelOption = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prompt; repeatable.", show_default="512, 1024, 2048")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            help="Relative position of the fact, from 0 to 1; repeatable.", show_default="0, 0.25, 0.5, 0.75, 1"
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Facts per depth and length.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text in which facts are hidden.", exists=True, dir_okay=False, show_default="the essay worked"
        ),
    ] = None,
    kv_chunk: ChunkOption = 128,
    picture: Annotated[Path | None, typer.Option(help="PNG file for the heat maps.")] = None,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether the model finds a fact in a text. It is hidden at several depths and lengths."""
    names = resolve_presets(preset)
    from ..eval import needle as task

    lengths, depths = length or list(task.LENGTHS), depth or list(task.DEPTHS)
    if picture is not None:
        task.check_picture(picture)
    cache_options = parse_overrides(overrides, calibration)
    loaded, tokenizer = load(model, device, dtype)
    names = names or all_presets(loaded, cache_options)
    with progress(task.steps(names, lengths)) as report:
        rows = task.run(
            names, loaded, tokenizer, lengths, depths, trials, text, kv_chunk, report=report, overrides=cache_options
        )
    if picture is not None:
        task.draw(rows, picture)
    if as_json:
        print_json(rows)
        return
    print_table("Needles found, and mean log-probability of the code", task.heat_map(rows), numbers_from=2)


def perplexity(
    preset: PresetOption = None,
    text: TextOption = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead of --text: a data set from the hub, or a local file.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "test",
    column: Annotated[str, typer.Option(help="Column of the data set with the documents.")] = "text",
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=3, help="Tokens per window.")] = 4096,
    start: Annotated[int, typer.Option("--from", min=1, help="First token of a window that counts.")] = 512,
    windows: Annotated[int, typer.Option(min=0, help="Largest number of windows per text; 0: all.")] = 1,
    by_position: Annotated[bool, typer.Option(help="Also print KL and top-1 by position.")] = False,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity, KL divergence and top-1 agreement."""
    names = resolve_presets(preset)
    if start >= context - 1:
        raise ValueError(
            f"--from {start} with --context {context} leaves no token to measure; at most {context - 2} is allowed"
        )
    if text and dataset:
        raise ValueError("--text and --dataset exclude each other; give one of them")
    changes = parse_overrides(overrides, calibration)
    device = device_of_process(device)
    processes = data_parallel.join()
    texts: list[Path | Text] = [*(text or default_texts())]
    if dataset:
        from ..eval.texts import dataset_text

        texts = [dataset_text(dataset, config, split, column, context * (windows or 10_000))]
    loaded, tokenizer = load(model, device, dtype)
    from ..eval.perplexity import CHUNK, run

    names = names or all_presets(loaded, changes)
    rows = run(
        names,
        texts,
        loaded,
        tokenizer,
        context=context,
        start=start,
        windows=windows,
        overrides=changes,
        processes=processes,
    )
    data_parallel.leave()
    if not processes.is_first:
        return
    if as_json:
        print_json(rows)
        return
    text_names = ", ".join(each.name for each in texts)
    title = f"{ran_on(loaded, model)}: tokens {start} to {context} of {text_names}; n = {rows[0]['positions']} tokens"
    title += f", kv_chunk {CHUNK}"
    print_table(title, [_cells_of_scores(row) for row in rows], numbers_from=1)
    print(f"bits: at {context} tokens; bits 32k: at 32768. Everything counted, also the 16-bit window.")
    print("full: perplexity in full precision. +-: standard error of KL. 99th: percentile of KL over positions.")
    if by_position:
        _print_positions(rows)


def _cells_of_scores(row: dict[str, Any]) -> dict[str, str]:
    """The row of a preset, for a table of 80 columns."""
    return {
        "preset": row["preset"],
        "bits": f"{row['bits_per_value']:.2f}",
        "bits 32k": f"{row['bits_per_value_32k']:.2f}",
        "ppl": f"{row['ppl']:.2f}",
        "full": f"{row['ppl_full']:.2f}",
        "KL": f"{row['kl']:.3g}",
        "+-": error_of_kl(row),
        "99th": f"{row['kl_p99']:.3g}",
        "top-1": f"{row['top1']:.3f}",
    }


def _print_positions(rows: list[dict[str, Any]]) -> None:
    """Print a row per preset with a column per range of positions."""
    for metric in ("kl", "top1"):
        cells = [
            {"preset": row["preset"]}
            | {f"{bucket['from']:.0f} to {bucket['to']:.0f}": bucket[metric] for bucket in row["by_position"]}
            for row in rows
        ]
        print_table(f"{metric} by position", cells)


eval_app = typer.Typer(
    help="Compare presets with the full-precision cache.", no_args_is_help=True, rich_markup_mode=None
)
#: commands that can run in several processes
SHARED = ("perplexity", "lm-eval")


@eval_app.callback()
def _check_processes(context: typer.Context) -> None:
    if context.invoked_subcommand not in SHARED:
        refuse_several_processes(f"eval {context.invoked_subcommand}")


add_command(eval_app, "perplexity", perplexity, extra="eval", extra_for=f"{MEASURING}, --dataset, several processes")
add_command(eval_app, "needle", needle, extra="eval", extra_for=f"{MEASURING}, and --picture")
# unknown options of these commands are passed to lm-eval
TO_LM_EVAL: Any = {"allow_extra_args": True, "ignore_unknown_options": True}
add_command(eval_app, "protocol", protocol, extra="eval", extra_for="always", context_settings=TO_LM_EVAL)
add_command(eval_app, "lm-eval", lm_eval, extra="eval", extra_for="always", context_settings=TO_LM_EVAL)
