"""Calibration: a model reads texts, and `calibrators` compute the parameters of presets from keys and values."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cache.packed_layers import packed_sizes
from ..cache.served_models import check_in_memory
from ..calibration_files.calibration_file import Calibration
from ..calibration_files.model_description import describe_model
from ..presets import PresetName, get_preset
from ..storage.layer_spec import LayerSpec
from . import gradients as differentiation
from .calibration_plan import CalibrationPlan, KeptPages, jobs_of
from .calibration_windows import Tokens, announcement, first_positions, longest_window
from .calibrators import ALIKE, POWER, StaticCalibrator
from .progress import Report, reporting, say
from .window_passes import run_windows


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    preset: PresetName | str | LayerSpec | Sequence[PresetName | str | LayerSpec] = "eigen-2",
    *,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    per_head: bool | None = None,
    gradients: bool = True,
    attention: bool = True,
    offload: bool = False,
    text_names: Sequence[str] | None = None,
    progress: bool | Report | None = True,
) -> Calibration:
    """Compute the parameters that `preset` needs for `model` from keys and values on `texts`.

        calibration = lb.calibrate(model, tokenizer, [Path("book.txt").read_text()], "eigen-2")
        calibration.save("eigen-2.safetensors")
        cache = lb.from_preset("eigen-2", model, calibration="eigen-2.safetensors")

    Args:
        texts: strings. Texts of `length` tokens or more are cut into windows. If these are too few, remainders and
            shorter texts are joined, separated by the end token. Every second window begins at position 0, the others
            at random positions within the context of the model. Use other texts for evaluation.
        preset: one or several names or `LayerSpec` objects. Presets share parameters that they have in common.
        samples: number of windows, drawn at random. `None`: 32768 tokens in all on a CPU and 131072 on a GPU, or all
            windows if there are fewer.
        length: tokens per window, at least two pages, at most the context of the model. `None`: the default of the
            presets, 512, or 4096 for `eigen-*`.
        seed: seed of all random choices, from 0 to 2**31 - 1.
        per_head: whether each KV head gets its own codebook. `None`: one codebook per layer.
        gradients: whether to compute gradients for presets that weight errors by them (`eigen-*`). The model then reads
            more windows of 1024 tokens, 8 on a CPU or 32 on a GPU. `samples` and `length` limit their number and
            length, but not below 512 tokens. Without gradients calibration is cheaper and less exact.
        attention: whether to compute attention for presets that weight tokens by it (`eigen-*`). Windows of fewer than
            1024 tokens are not weighted, with a warning.
        offload: save GPU memory. Sampled tokens are kept in CPU memory, and the backward pass computes layers again.
            The calibration is the same up to rounding, and takes somewhat longer.
        text_names: names of the texts, for the file and its card. The card rejects results that were measured on these
            texts.
        progress: `True` prints the numbers of available and read tokens to standard error, and shows a bar on a
            terminal. `False` shows nothing. A function is called in place of the bar with the name of a stage
            (`"reading"`, `"gradients"`, `"fitting"`), the number of its steps done, first 0, and their total.

    Raises:
        ValueError: a preset has no parameters or fits no layer, a number is out of range, the texts are too short (the
            message says how many tokens are needed), keys or values are not finite, or the model's first weights are not
            in memory.
        TypeError: `texts` is a string, or `model` is no model.
        ImportError: faiss is missing, for codebooks on a CPU.

    Example:
        >>> calibration = lb.calibrate(model, tokenizer, [long_text], ["vecinfer-2"], samples=2, length=256, progress=False)
        >>> tokens = lb.generate(model, **inputs, preset="vecinfer-2", calibration=calibration, max_new_tokens=8)
    """
    specs = _specs(preset)
    plan = plan_for(model, preset, per_head)
    check_in_memory(model, "windows", "calibrate where the model fits")
    limits = samples, length
    longest = longest_window(model)
    length = min(plan.length, longest) if length is None else length
    tokens, device = Tokens(texts, tokenizer), model.device.type
    windows = tokens.draw(samples, length, seed, device, plan.least_length, most=longest)
    gradient_sides = plan.gradient_sides if gradients else {}
    extra = None
    if gradient_sides:
        count, lengths = differentiation.gradient_windows(model, max(gradient_sides), *limits)
        extra = tokens.draw_for_gradients(count, lengths, seed)
    firsts = first_positions(model, len(windows.windows), length, seed)
    sampling = plan.choose(len(windows.windows), length, seed)
    plan.check(sampling, device)
    kept = KeptPages(plan, sampling, torch.device("cpu") if offload else None)
    grids = plan.weighted(length) if attention else []
    say(announcement(tokens, windows, extra), progress)
    tensors: dict[str, torch.Tensor] = {}
    with reporting(progress) as report:
        count = len(windows.windows)
        report("reading", 0, count)
        run_windows(model, windows.windows, kept.see, lambda done: report("reading", done, count), grids, firsts)
        if extra is not None:
            passes = len(gradient_sides) * len(extra.windows)
            report("gradients", 0, passes)
            for number, (page_size, sides) in enumerate(gradient_sides.items()):
                see = functools.partial(plan.see_gradients, page_size)
                before = number * len(extra.windows)
                notify = lambda done, before=before: report("gradients", before + done, passes)  # noqa: E731
                differentiation.read_gradients(
                    *(model, extra.windows, plan.sizes, sides, see, seed, notify, page_size, offload),
                    first_positions(model, len(extra.windows), extra.length, seed),
                )
        report("fitting", 0, len(plan.sizes))
        for number, layer in enumerate(plan.sizes):
            tensors |= kept.fit(layer, seed, model.device)
            report("fitting", number + 1, len(plan.sizes))
    source: dict[str, Any] = {"presets": list(specs)}
    if text_names is not None:
        source["texts"] = list(text_names)
    source |= {
        "text_hashes": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts],
        "samples": len(windows.windows),
        "length": length,
        "positions": max(firsts) + length,
        "gradients": bool(gradient_sides),
        "attention": bool(grids),
    }
    if grids:
        source["mix"] = ALIKE
    if any(isinstance(calibrator, StaticCalibrator) for calibrator in plan.calibrators.values()):
        source["power"] = POWER
    source |= {
        "page_sizes": plan.page_sizes,
        "seed": seed,
        "device": device,
        "versions": {name: importlib.metadata.version(name) for name in ("hf-lowbit-kv", "torch", "transformers")},
        "tensors": sorted(tensors),
    }
    return Calibration(tensors, describe_model(model, plan.sizes), [source])


def plan_for(
    model: Any, preset: str | LayerSpec | Sequence[str | LayerSpec], per_head: bool | None = None
) -> CalibrationPlan:
    """The calibrators for `model`. Reads no texts. Arguments and errors are those of `calibrate`."""
    specs = _specs(preset)
    if idle := [name for name, spec in specs.items() if not list(jobs_of(spec))]:
        raise ValueError(f"preset={idle[0]!r} has no parameters: it needs no calibration")
    sizes = packed_sizes(model)
    for name, spec in specs.items():
        _check_widths(name, spec, sizes)
    return CalibrationPlan([job for spec in specs.values() for job in jobs_of(spec)], sizes, per_head)


def _check_widths(name: str, spec: LayerSpec, sizes: Mapping[int, Any]) -> None:
    """Raise `ValueError` if the spec fits no layer: no cache could use its tensors. sizes: see `packed_sizes`."""
    reasons = []
    for index, (_, *widths) in sizes.items():
        try:
            spec.validate(*widths)
        except ValueError as error:
            reasons.append(f"layer {index}: {error}")
    if len(reasons) == len(sizes):
        raise ValueError(f"preset={name!r} does not fit the model: {reasons[0]}")


def _specs(preset: str | LayerSpec | Sequence[str | LayerSpec]) -> dict[str, LayerSpec]:
    choices = [preset] if isinstance(preset, (str, LayerSpec)) else list(preset)
    return {str(x): x if isinstance(x, LayerSpec) else get_preset(x).spec() for x in choices}
