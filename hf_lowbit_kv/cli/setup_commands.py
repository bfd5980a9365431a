"""`hf-lowbit-kv doctor`, `calibrate`, `share` and `fits`: commands that set up a machine and a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..eval.local_models import calibration_texts, model_name
from ..eval.texts import read_text
from ..planning.weight_kinds import WEIGHT_KINDS
from ..presets import preset_names
from .shared_options import (
    DeviceOption,
    DtypeOption,
    JsonObjectOption,
    JsonOption,
    ModelOption,
    PresetOption,
    check_model,
    console_for,
    load,
    print_json,
    progress,
    resolve_presets,
)


def doctor(
    device: Annotated[
        str | None, typer.Option(help="E.g. cpu, cuda:1.", show_default="the GPU, if there is one")
    ] = None,
    as_json: JsonObjectOption = False,
) -> None:
    """Show what runs on this machine, and what is missing. The exit code is 1 if nothing runs."""
    from ..diagnosis import doctor as examine

    diagnosis = examine(device)
    print(json.dumps(diagnosis, indent=2) if as_json else diagnosis, end="\n" if as_json else "")
    if not diagnosis.ok:
        raise typer.Exit(1)


def calibrate(
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", help="Presets, separated by commas.", show_default="eigen-2"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file; repeatable.",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default="bundled essays",
        ),
    ] = None,
    model: ModelOption = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Number of windows.", show_default="32768 tokens on a CPU, 131072 on a GPU"),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per window.", show_default="512, or 4096 for eigen-*")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    per_head: Annotated[
        bool | None,
        typer.Option(
            "--per-head/--per-layer",
            help="One codebook per KV head, or one per layer.",
            show_default="per layer",
        ),
    ] = None,
    gradients: Annotated[bool, typer.Option(help="For eigen-*: weight errors by gradients.")] = True,
    attention: Annotated[bool, typer.Option(help="For eigen-*: weight keys by their attention.")] = True,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Use less GPU memory, and take longer."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="File to write.", show_default="the user's cache folder, where caches find it"
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonObjectOption = False,
) -> None:
    """Calibrate presets such as eigen-2 for a model, from texts.

    If the file exists, the command adds to it, and keeps calibrations of other presets.
    """
    names = resolve_presets(preset or ["eigen-2"])
    paths = text or calibration_texts()
    texts = [read_text(path).content for path in paths]
    from ..cache.packed_layers import packed_sizes
    from ..calibration.calibrate import calibrate as run
    from ..calibration.calibration_target import add_to_file, try_file, try_user_files
    from ..calibration.progress import LogLines
    from ..calibration_files.calibration_lookup import user_file
    from ..calibration_files.model_description import describe_model

    if out is None:
        try_user_files(model_name(model))
    else:
        try_file(out, f"--out {str(out)!r}")
    loaded, tokenizer = load(model, device, dtype)
    description = describe_model(loaded, packed_sizes(loaded))
    path = user_file(description) if out is None else out
    if (existing := try_file(path, repr(str(path)))) is not None:
        existing.check(description)
    console = Console(stderr=True)
    sampling = {"samples": samples, "length": length, "seed": seed}
    options: dict[str, Any] = {
        **sampling,
        "per_head": per_head,
        "gradients": gradients,
        "attention": attention,
        "offload": offload,
    }
    options["text_names"] = [path.name for path in paths]
    progress_report = True if console.is_terminal else LogLines()
    calibration = run(loaded, tokenizer, texts, names, progress=progress_report, **options)
    calibration = add_to_file(calibration, path)
    console.print(f"{path}: {', '.join(calibration.contents())}", markup=False, soft_wrap=True)
    if as_json:
        print_json(
            {
                "file": str(path),
                "model": description["name"],
                "presets": names,
                "contents": list(calibration.contents()),
            }
        )


def share(
    calibration: Annotated[
        Path, typer.Argument(help="File that `hf-lowbit-kv calibrate` made.", exists=True, dir_okay=False)
    ],
    repo_id: Annotated[str, typer.Argument(help="Hub repository, org/name.")],
    measured: Annotated[
        Path | None,
        typer.Option(
            help="Results for the card: output of `eval perplexity --json` on a text not used for calibration.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    as_json: JsonObjectOption = False,
) -> None:
    """Upload a calibration to the hub. Its card names the model and the texts."""
    rows = []
    if measured is not None:
        rows = json.loads(read_text(measured).content)
    from ..calibration_files.calibration_file import Calibration

    loaded = Calibration.load(calibration)
    try:
        address = loaded.push_to_hub(repo_id, measured=rows, private=private or None)
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # httpx or httpx2: the hub's client passes their errors on
            raise
        raise OSError(f"{repo_id!r} cannot be uploaded, the hub is not reached: {error}") from error
    if as_json:
        print_json({"repo_id": repo_id, "url": str(address)})
    else:
        print(address)


def fits(
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens per row, e.g. 65536 or 64k (1k is 1024).")],
    model: Annotated[
        str,
        typer.Option(
            help="Hub name or folder; names of common models work offline. Weights are not loaded.",
            callback=check_model,
        ),
    ] = "Qwen/Qwen3-8B",
    memory: Annotated[str, typer.Option(help="Memory of the GPU, e.g. 24GB (10^9 bytes) or 24GiB.")] = "24GB",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(help=f"Weights: {', '.join(WEIGHT_KINDS)}, or a size such as 5.7GB.", show_default="as published"),
    ] = None,
    preset: PresetOption = None,
    every: Annotated[bool, typer.Option("--all", help="Print all presets, not only the recommended ones.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the GPU memory of a model and its cache with each preset.

    The count includes weights, cache, prefill, and CUDA. With --json the list always has all presets.
    """
    names = resolve_presets(preset) or None
    from ..planning.fits import fits as memory_fits

    count = len(names or preset_names())
    with progress(count, after=2.0) as begin:  # the slow part makes a cache of each preset on the meta device
        table = memory_fits(
            model, context, memory, rows=rows, weights=weights, presets=names, report=lambda name, *_: begin(name)
        )
    if as_json:
        print_json([fit.as_dict() | {"recommended": fit is table.recommended} for fit in table])
        return
    shown = table.whole if every else table
    shown.print_to(console_for(shown.table()))
