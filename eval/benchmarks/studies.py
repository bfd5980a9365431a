"""Measurements for work on formats: `python -m hf_lowbit_kv.eval.benchmarks.studies baselines`, `layers` and `sweep`.

`baselines` compares WUSH-KV and OSCAR with presets. `layers` measures the error of each layer by itself. `sweep`
measures combinations of formats, transforms and windows. Options, errors and output are like those of
`hf-lowbit-kv eval`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_lowbit_kv.calibration.steps_shown import LogLines
from hf_lowbit_kv.cli.application import run
from hf_lowbit_kv.cli.every_command import add_command, need
from hf_lowbit_kv.cli.shared_options import (
    MEASURING,
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PresetOption,
    SetOption,
    TextOption,
    all_presets,
    load,
    parse_overrides,
    print_json,
    print_table,
    progress,
    refuse_several_processes,
    resolve_presets,
)
from hf_lowbit_kv.eval import layer_errors, preset_search
from hf_lowbit_kv.eval.benchmarks import baselines as other_methods
from hf_lowbit_kv.eval.local_models import default_texts, varied_texts
from hf_lowbit_kv.eval.texts import read_text

#: defaults of `sweep`
SWEPT = (
    "int2-channel/int2-token,int4-channel/int2-token,int4-channel/int4-token,int8-token/int8-token,"
    "boosted2-r0.125/int2-token,boosted2-r0.25/int2-token"
)


def layers(
    preset: PresetOption = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file.", exists=True, dir_okay=False, readable=True, show_default="an essay"),
    ] = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of the text to read.")] = 2048,
    start: Annotated[int, typer.Option("--from", min=1, help="First token that counts.")] = 512,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the error of attention in each layer by itself, and how uneven its channels are."""
    names, changes = resolve_presets(preset), parse_overrides(overrides, calibration)
    loaded, tokenizer = load(model, device, dtype)
    names = names or all_presets(loaded, changes)
    source = text or default_texts()[0]
    with progress(loaded.config.get_text_config().num_hidden_layers) as report:
        rows = layer_errors.run(
            names, source, loaded, tokenizer, context, start, changes, lambda layer: report(f"layer {layer}")
        )
    if as_json:
        print_json(rows)
        return
    cells = [
        {"layer": row["layer"]}
        | {name: f"{row[key]:.1f}" for name, key in (("key peak", "key_peak"), ("value peak", "value_peak"))}
        | {"1st key": f"{row['first_key']:.1f}"}
        | {name: f"{error:.4f}" for name, error in row["errors"].items()}
        for row in rows
    ]
    print_table(
        f"Relative error of attention outputs, {source.name}, tokens {start} to {context}", cells, numbers_from=0
    )


def baselines(
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "-b",
            help="Several by commas: wush-N, wush-clipped-N, oscar-N, with N = 2, 3 or 4 bits.",
            show_default="wush-2, oscar-2",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", help="Presets to compare.", show_default="the eigen-* that serve the model"),
    ] = None,
    text: TextOption = None,
    calibration_text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file to calibrate both methods on; repeatable.",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default="manual, conversations and code, as the bundled calibration of eigen-*",
        ),
    ] = None,
    model: ModelOption = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Windows to calibrate on.", show_default="as `calibrate` takes")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 4096,
    start: Annotated[int, typer.Option("--from", min=1, help="First token of a window that counts.")] = 512,
    windows: Annotated[int, typer.Option(min=0, help="Windows of each text, at most; 0: as many as it has.")] = 1,
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare WUSH-KV and OSCAR with the presets, on the same texts.

    Both follow their papers (arXiv 2609.38121, 2605.17757); neither is the authors' code. The command calibrates them first.
    """
    chosen = other_methods.check_names(_split(",".join(baseline or other_methods.DEFAULT)))
    if not chosen:
        raise ValueError(f"--baseline is empty; allowed: {', '.join(other_methods.BASELINES)}")
    names, changes = resolve_presets(preset), parse_overrides(overrides, calibration)
    texts: list[Path] = text or default_texts()
    paths = calibration_text or varied_texts()
    if same := {path.resolve() for path in paths} & {path.resolve() for path in texts}:
        raise ValueError(f"{str(min(same))!r} is calibrated on and measured; give different texts")
    loaded, tokenizer = load(model, device, dtype)
    if not names:
        fitting = preset_search.fitting_presets(loaded, changes)[0]
        names = [name for name in fitting if name.startswith("eigen-")]
    rows = other_methods.run(
        chosen,
        names,
        [*texts],
        [read_text(path).content for path in paths],
        loaded,
        tokenizer,
        context,
        start,
        windows,
        samples,
        True if Console(stderr=True).is_terminal else LogLines(),
        changes,
    )
    if as_json:
        print_json(rows)
        return
    shown = ", ".join(each.name for each in texts)
    cells = [
        {"preset": row["preset"], "bits of a page": f"{row['bits_of_page']:.2f}", "KL": f"{row['kl']:.4f}"}
        | {"+-": f"{row['kl_error']:.4f}", "99th": f"{row['kl_p99']:.3f}", "top-1": f"{row['top1']:.3f}"}
        | {"ppl": f"{row['ppl']:.2f}"}
        for row in rows
    ]
    print_table(
        f"Tokens {start} to {context} of {shown}; wush-* and oscar-* as implemented here", cells, numbers_from=1
    )


def sweep(
    formats: Annotated[str, typer.Option(help="Pairs KEYS/VALUES, separated by commas.")] = SWEPT,
    transform: Annotated[str, typer.Option(help="Transforms, separated by commas.")] = "none,hadamard",
    sink: Annotated[str, typer.Option(help="Sink tokens, separated by commas.")] = "0,32",
    residual: Annotated[str, typer.Option(help="Newest tokens in 16 bits, separated by commas.")] = "128",
    text: TextOption = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each text to read.")] = 2048,
    start: Annotated[int, typer.Option("--from", min=1, help="First token that counts.")] = 512,
    bits_at: Annotated[int, typer.Option(min=1, help="Tokens of a row, for counting bits.")] = 32768,
    out: Annotated[Path | None, typer.Option(help="Picture to write, .png or .svg.")] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure bits and KL of every combination of formats, transforms and windows."""
    pairs = [preset_search.parse_pair(each) for each in _split(formats)]
    numbers = [_numbers(name, value) for name, value in (("--sink", sink), ("--residual", residual))]
    if out is not None:
        need("eval", "matplotlib")
    if out is not None and (out.suffix not in (".png", ".svg") or not out.parent.is_dir()):
        raise ValueError(f"--out {str(out)!r} is not allowed; it must be a .png or .svg in a folder that exists")
    cache_options = parse_overrides(None, calibration)
    texts = text or default_texts()[:1]
    loaded, tokenizer = load(model, device, dtype)
    rows = preset_search.sweep(
        pairs, texts, loaded, tokenizer, _split(transform), *numbers, context, start, bits_at, **cache_options
    )
    if out is not None:
        preset_search.plot(
            rows, out, f"{', '.join(each.name for each in texts)}, tokens {start} to {context}", label="name"
        )
        Console(stderr=True).print(f"picture: {out}", markup=False, soft_wrap=True)
    if as_json:
        print_json(rows)
        return
    cells = [
        {"formats, transform, window": row["name"], "bits": f"{row['bits_per_value']:.2f}", "KL": f"{row['kl']:.4f}"}
        | {"top-1": f"{row['top1']:.3f}", "front": "*" if row["pareto"] else ""}
        for row in rows
    ]
    print_table(f"Bits at {bits_at} tokens; *: no other has both fewer bits and less KL", cells, numbers_from=1)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _split(text)]
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is not allowed; it must be numbers separated by commas") from error


app = typer.Typer(
    help="Measurements for work on formats.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _check_processes(context: typer.Context) -> None:
    refuse_several_processes(f"studies {context.invoked_subcommand}")


add_command(app, "baselines", baselines, extra="eval", extra_for=MEASURING)
add_command(app, "layers", layers, extra="eval", extra_for=MEASURING)
add_command(app, "sweep", sweep, extra="eval", extra_for=f"{MEASURING}, and --out")


def main(args: list[str] | None = None) -> None:
    """Run the command and exit, as `hf-lowbit-kv` does."""
    run(args, app, "python -m hf_lowbit_kv.eval.benchmarks.studies")


if __name__ == "__main__":
    main()
